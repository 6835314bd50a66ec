"""`tiered-kv bench engine`: what a returning session waits for in vLLM, and what a miss costs.

Every engine runs in a process of its own that stays up, so all meet the same machine: rounds are
interleaved, in alternating order, and medians count. A session returns when the same prompt comes
again after the engine's own prefix cache was emptied. For NVMe, host memory was emptied too (ours
by other sessions, vLLM's by resetting its CPU tier) and the files dropped from the page cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.bench.engine_contenders import DRAM, NVME, OURS, PEERS, RECOMPUTE, Pythons
from tiered_kv.bench.engine_field import SETTLE_S, Field
from tiered_kv.bench.engine_pipe import Child
from tiered_kv.bench.engine_results import Sample, Samples, left_out, missed, ttft, zero_hit
from tiered_kv.bench.report import Result

SIZES = (1024, 4096)
ROOM_TOKENS = 256
"""What an engine's longest request has beyond the longest prompt."""
AFTER_S = 0.3
"""How long an engine may finish what it does beside its work, before the next one's turn."""

Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """A pass: `prompts` of `prompt_tokens` that nobody has seen, `answer_tokens` each."""

    prompts: int = 16
    prompt_tokens: int = 512
    answer_tokens: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of a pass, computed and answered."""
        return self.prompts * (self.prompt_tokens + self.answer_tokens)


@dataclass(frozen=True)
class Plan:
    """What to measure. `model` is a folder; None: SmolLM2 from its package. Data files lie under
    `folder`, on the disk that is measured."""

    pythons: Pythons
    folder: Path
    model: Path | None = None
    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    peers: tuple[str, ...] = PEERS
    load: Load = field(default_factory=Load)


class Run:
    """One run, and what it measured."""

    def __init__(self, plan: Plan, field: Field, progress: Progress) -> None:
        self._plan = plan
        self._field = field
        self._progress = progress
        self._samples = Samples()
        self._passes: dict[str, list[float]] = {OURS: [], RECOMPUTE: []}
        engines, returns = 2 + len(plan.peers), len(plan.sizes) * plan.rounds
        self._steps = 2 + engines * (2 + returns) + 2 * plan.rounds
        self._done = 0
        self._unread = 0

    def start(self) -> None:
        """Start everybody; everybody sees the prompts for the first time and keeps its KV."""
        longest = max(*self._plan.sizes, self._plan.load.prompt_tokens)
        self._field.start(self._plan.model, self._plan.peers, longest + ROOM_TOKENS, self._step)
        for name in self._field.names():
            self._step(f"{name}: first visit")
            with self._field.asking(name) as child:
                for tokens in self._plan.sizes:
                    child.ask("serve", prompts=[self._prompt(tokens)], max_tokens=1)
                child.ask("settle", seconds=SETTLE_S)

    def returns(self, turn: int) -> None:
        """A round: every prompt returns to everybody, from each tier."""
        names = self._field.names()
        for tokens in self._plan.sizes:
            for name in names if turn % 2 == 0 else names[::-1]:
                if name not in self._field.names():
                    continue
                self._step(f"{name}: {tokens} tokens, round {turn + 1}")
                # NVMe first: what comes from there is in DRAM for the wake that follows.
                for tier in self._field.tiers(name)[::-1] or ("",):
                    with self._field.asking(name) as child:
                        if tier == NVME:
                            self._field.empty_memory(name)
                        read = self._field.bytes_from_nvme()
                        self._samples.add(name, tokens, tier, self._return(child, tokens))
                        if (name, tier) == (OURS, NVME):
                            self._unread += read == self._field.bytes_from_nvme()

    def misses(self, turn: int) -> None:
        """A round of prompts that nobody has seen, without and with our connector."""
        load = self._plan.load
        names = [f"{turn} {i}" for i in range(load.prompts)]
        prompts = [self._prompt(load.prompt_tokens, name) for name in names]
        for name in (RECOMPUTE, OURS) if turn % 2 == 0 else (OURS, RECOMPUTE):
            self._step(f"{name}: nothing to hit, round {turn + 1}")
            with self._field.asking(name) as child:
                child.ask("reset")
                done = child.ask("serve", prompts=prompts, max_tokens=load.answer_tokens)
                self._passes[name].append(done["seconds"])
                child.ask("settle", seconds=AFTER_S)

    def results(self) -> list[Result]:
        """What was measured."""
        different = self._samples.different()
        return [
            *ttft(self._samples, self._plan.sizes, (DRAM, NVME)),
            *zero_hit(self._plan.load.tokens, self._passes[OURS], self._passes[RECOMPUTE]),
            Result("engine/different-answers", different, "first tokens", RECOMPUTE),
        ]

    def complaints(self) -> list[str]:
        """Returns that were no hits, a line each."""
        lines = []
        if self._unread:
            lines.append(f"{OURS}: {self._unread} returns from nvme read nothing from there")
        for tokens in self._plan.sizes:
            for tier in (DRAM, NVME):
                for name in self._samples.names(tokens, tier):
                    samples = self._samples.of(name, tokens, tier)
                    if n := missed(samples, tokens):
                        out = name != OURS and left_out(samples, tokens)
                        lines.append(
                            f"{name}: {n} of {len(samples)} returns of {tokens} tokens from {tier} "
                            f"were no hits{': left out' if out else ''}"
                        )
        return lines

    def _return(self, child: Child, tokens: int) -> Sample:
        child.ask("reset")
        done = child.ask("serve", prompts=[self._prompt(tokens)], max_tokens=1)
        child.ask("settle", seconds=AFTER_S)
        return Sample(done["seconds"], done["cached"][0], tuple(done["answers"][0]))

    def _prompt(self, tokens: int, what: str = "returns") -> list[int]:
        rng = random.Random(f"{what} {tokens}")
        return [rng.randrange(3, self._field.vocabulary) for _ in range(tokens)]

    def _step(self, text: str) -> None:
        self._progress(text, self._done, self._steps)
        self._done += 1


def run(plan: Plan, progress: Progress, say: Say) -> Sequence[Result]:
    """Measure. About five minutes on two idle cores. Ends every process and removes every file
    that it made, also when it is interrupted. Raises `EngineFailed` when our own part fails; a
    peer that fails is said in a line and left out."""
    with Field(plan.pythons, plan.folder, say) as field:
        one = Run(plan, field, progress)
        one.start()
        for turn in range(plan.rounds):
            one.returns(turn)
        for turn in range(plan.rounds):
            one.misses(turn)
    for line in one.complaints():
        say(line)
    return one.results()
