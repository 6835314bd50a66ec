"""`tiered-kv bench sessions`: more sessions through one engine than its own cache can hold.

Every session says something, then every session comes back with a second turn, in the same order,
so that the engine's own cache (a few dozen of them) never helps. What is not a hit is counted; the
time to the first token of a wake stands beside that of an engine that has only its own cache.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.bench.engine_contenders import BLOCK_TOKENS, OURS, RECOMPUTE, Pythons
from tiered_kv.bench.engine_field import SETTLE_S, Field
from tiered_kv.bench.report import Result, compared

BATCH = 8
"""Sessions whose first turn is served together: only wakes are timed."""
TURN_TOKENS = 32
"""What a second turn adds."""
COMPARED = 32
"""Second turns that are also computed anew, spread over the run: both meet the same machine."""
HIT_SHARE = 0.9

Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """`sessions` of `tokens` each. Data files lie under `folder`."""

    pythons: Pythons
    folder: Path
    model: Path | None = None
    sessions: int = 1024
    tokens: int = 512
    token_bytes: int = 23_040  # of KV: those of SmolLM2 in bfloat16

    @property
    def nvme_bytes(self) -> int:
        """Disk for all blocks of all sessions, and a fifth more: watermarks keep some free."""
        blocks = -(-(self.tokens + TURN_TOKENS) // BLOCK_TOKENS) + 1
        return max(4 << 30, int(1.2 * self.sessions * blocks * BLOCK_TOKENS * self.token_bytes))


class Run:
    """One run, and what it measured."""

    def __init__(self, plan: Plan, field: Field, progress: Progress) -> None:
        self._plan = plan
        self._field = field
        self._progress = progress
        self._wakes: list[float] = []
        self._pairs: list[tuple[float, float]] = []  # (wake, computed anew) of the same turn
        self._misses = self._different = 0

    def first_turns(self) -> None:
        """Every session says something."""
        plan = self._plan
        with self._field.asking(OURS) as child:
            for start in range(0, plan.sessions, BATCH):
                self._progress("first turns", start, 2 * plan.sessions)
                names = range(start, min(start + BATCH, plan.sessions))
                child.ask("serve", prompts=[self._turn(i, 1) for i in names], max_tokens=1)
            child.ask("settle", seconds=SETTLE_S)

    def second_turns(self) -> None:
        """Every session comes back, one at a time."""
        plan = self._plan
        every = max(1, plan.sessions // COMPARED)
        for i in range(plan.sessions):
            self._progress("second turns", plan.sessions + i, 2 * plan.sessions)
            with self._field.asking(OURS) as child:
                done = child.ask("serve", prompts=[self._turn(i, 2)], max_tokens=1)
            self._wakes.append(done["seconds"])
            self._misses += done["cached"][0] < HIT_SHARE * plan.tokens
            if i % every == 0:
                self._compare(i, done["seconds"], done["answers"][0])

    def results(self) -> list[Result]:
        """What was measured."""
        n, tokens = self._plan.sessions, self._plan.tokens
        name = f"engine/sessions/{n}x{tokens}"
        hits = n - self._misses
        p50, p99 = quantile(self._wakes, 0.5), quantile(self._wakes, 0.99)
        anew = statistics.median(b for _, b in self._pairs)
        ratio = statistics.median(b / a for a, b in self._pairs)
        return [
            compared(f"{name}/hits", hits, "sessions", "sessions that came back", n, bar=1.0),
            compared(f"{name}/wake-p50", p50, "s", RECOMPUTE, anew, ratio=ratio),
            compared(f"{name}/wake-p99", p99, "s", RECOMPUTE, anew, ratio=anew / p99),
            Result(f"{name}/different-answers", self._different, "first tokens", RECOMPUTE),
        ]

    def _compare(self, i: int, wake_s: float, answer: Sequence[int]) -> None:
        with self._field.asking(RECOMPUTE) as child:
            done = child.ask("serve", prompts=[self._turn(i, 2)], max_tokens=1)
        self._pairs.append((wake_s, done["seconds"]))
        self._different += list(answer) != list(done["answers"][0])

    def _turn(self, session: int, turn: int) -> list[int]:
        rng = random.Random(f"session {session}")
        tokens = self._plan.tokens + (turn - 1) * TURN_TOKENS
        return [rng.randrange(3, self._field.vocabulary) for _ in range(tokens)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed, one of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run(plan: Plan, progress: Progress, say: Say) -> list[Result]:
    """Measure. About a quarter of an hour on two idle cores for 1,024 sessions of 512 tokens. Ends
    every process and removes every file that it made. Raises `EngineFailed`."""
    with Field(plan.pythons, plan.folder, say, plan.nvme_bytes) as field:
        one = Run(plan, field, progress)
        field.start(plan.model, (), plan.tokens + TURN_TOKENS + BLOCK_TOKENS, say)
        one.first_turns()
        one.second_turns()
    return one.results()
