"""A workload, a node, a seed: how many sessions are held, how fast they wake, what it wears."""

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiered_kv.errors import BadInput
from tiered_kv.sim.clock import Clock, Process
from tiered_kv.sim.machine import Setup
from tiered_kv.sim.serving import Ask, Server
from tiered_kv.types import BlockKey, SessionId

GOLDEN = (math.sqrt(5) - 1) / 2
"""Steps of it, modulo 1, fill an interval evenly from the first few on."""
Z90 = 1.2815515594
"""The 90th percentile of a standard normal distribution."""
SAMPLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions that take turns for ever: a prompt, an answer, a pause. Tokens and seconds.

    A session grows from `start_tokens` until `end_tokens` and is then replaced by a fresh one;
    at the beginning all ages occur alike. A pause is a tool's run (`tool_share` of them) or a
    person's; both are lognormal with these medians and 90th percentiles (Claude Code trace:
    9 and 71 s after tool calls, 210 and 2,977 s after the end of a turn).
    """

    sessions: int
    start_tokens: int = 8192
    end_tokens: int = 32768
    prompt_tokens: int = 256
    output_tokens: int = 256
    tool_share: float = 0.9
    tool_p50_s: float = 9.0
    tool_p90_s: float = 71.0
    turn_p50_s: float = 210.0
    turn_p90_s: float = 2977.0

    def __post_init__(self) -> None:
        for name in ("sessions", "start_tokens", "end_tokens", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BadInput(f"workload: {name} = {value!r} must be a positive whole number")
        if self.end_tokens < self.start_tokens + self.prompt_tokens + self.output_tokens:
            raise BadInput(
                f"workload: end_tokens = {self.end_tokens} leaves no room for a turn of "
                f"{self.prompt_tokens} + {self.output_tokens} tokens behind start_tokens = "
                f"{self.start_tokens}"
            )
        if not 0 <= self.tool_share <= 1:
            raise BadInput(f"workload: tool_share = {self.tool_share!r} must be from 0 to 1")
        for kind in ("tool", "turn"):
            p50, p90 = getattr(self, f"{kind}_p50_s"), getattr(self, f"{kind}_p90_s")
            if not 0 < p50 <= p90 < math.inf:
                raise BadInput(f"workload: {kind}_p50_s = {p50!r} and {kind}_p90_s = {p90!r} "
                               "must be positive and in this order")  # fmt: skip

    def pause_s(self, rng: random.Random) -> float:
        """A pause."""
        tool = rng.random() < self.tool_share
        p50, p90 = (
            (self.tool_p50_s, self.tool_p90_s) if tool else (self.turn_p50_s, self.turn_p90_s)
        )
        return p50 * math.exp(rng.gauss(0.0, 1.0) * math.log(p90 / p50) / Z90)

    def slower(self, times: float) -> "Workload":
        """The same with pauses that are so much longer."""
        names = ("tool_p50_s", "tool_p90_s", "turn_p50_s", "turn_p90_s")
        return replace(self, **{name: getattr(self, name) * times for name in names})


class Sample(NamedTuple):
    """One moment of a simulation."""

    at_s: float
    held: int
    used_bytes: dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation came to. `held_*`: open sessions whose whole KV is in reach."""

    sessions: int
    held_peak: int
    held_mean: float
    ooms: int
    tokens_per_s: float
    ttft_s: tuple[float, ...]
    wakes: tuple[tuple[str, float], ...]
    hit_share: float
    recomputed_tokens_per_s: float
    chosen_recompute: int
    written_bytes_per_s: dict[str, float]
    busy: dict[str, float]
    samples: tuple[Sample, ...]
    events_s: float

    @property
    def wake_s(self) -> list[float]:
        """Seconds of all wakes."""
        return sorted(seconds for _, seconds in self.wakes)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the sorted values does not exceed; NaN where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


class _Chats:
    """The sessions of a workload, each a process."""

    def __init__(self, server: Server, workload: Workload, seed: int, arrive_s: float) -> None:
        self.server = server
        self.workload = workload
        self.open: dict[int, SessionId] = {}
        bt = server.setup.block_tokens
        pool = server.machine.pool_blocks
        if -(-workload.end_tokens // bt) > pool:
            raise BadInput(f"a session of {workload.end_tokens} tokens exceeds the {pool * bt} "
                           "that HBM holds beside the weights")  # fmt: skip
        offset = random.Random(f"ages/{seed}").random()
        for n in range(workload.sessions):
            rng = random.Random(f"{seed}/{n}")  # the same in every configuration
            age = (offset + n * GOLDEN) % 1.0
            begin = arrive_s * n / workload.sessions
            server.clock.at(begin, lambda n=n, a=age, r=rng: server.clock.spawn(self._live(n, a, r)))  # type: ignore[misc]  # noqa: E501

    def _live(self, number: int, age: float, rng: random.Random) -> Process:
        work = self.workload
        turn = work.prompt_tokens + work.output_tokens
        tokens = work.start_tokens + int(age * (work.end_tokens - work.start_tokens - turn))
        life = 0
        while True:
            sid = SessionId(f"{number}.{life}")
            self.open[number] = sid
            known, run, turns = 0, (), 0
            while tokens + turn <= work.end_tokens:
                prompt = tokens + work.prompt_tokens
                tokens = prompt + work.output_tokens
                turns += 1
                after, tail = self._keys(number, life, tokens, turns)
                yield from self.server.serve(
                    Ask(sid, run, known, prompt, work.output_tokens, after, tail)
                )
                run, known = after, tokens
                yield work.pause_s(rng)
            self.server.close(sid)
            life += 1
            tokens = work.start_tokens

    def _keys(self, *of: int) -> tuple[tuple[BlockKey, ...], bool]:
        number, life, tokens, turn = of
        whole, rest = divmod(tokens, self.server.setup.block_tokens)
        keys = [BlockKey(struct.pack("<4I", number, life, i, 0)) for i in range(whole)]
        if rest:  # the incomplete block of a turn is another one than that of the next turn
            keys.append(BlockKey(struct.pack("<4I", number, life, whole, turn)))
        return tuple(keys), bool(rest)


def simulate(
    setup: Setup, workload: Workload, *, seed: int = 1, warm_s: float = 1200.0,
    window_s: float = 1800.0, naive: bool = False, choose: bool = True,
) -> Outcome:  # fmt: skip
    """Sessions arrive evenly over `warm_s`; what happens in the `window_s` after that counts,
    OOMs and the peak of held sessions from the beginning on. Deterministic by seed."""
    if not (0 <= warm_s < math.inf and 0 < window_s < math.inf):
        raise BadInput(f"warm_s = {warm_s!r} and window_s = {window_s!r} must be positive")
    clock = Clock()
    server = Server(clock, setup, naive=naive, choose=choose)
    chats = _Chats(server, workload, seed, warm_s)
    samples: list[Sample] = []

    def sample() -> None:
        held = sum(server.holds(sid) for sid in chats.open.values())
        used = {str(u.medium): float(u.used_bytes) for u in server.machine.hierarchy.usage()}
        used |= dict(server.archive.used_bytes())
        samples.append(Sample(clock.now, held, used))

    clock.every(SAMPLE_S, sample)
    clock.run(warm_s)
    log, traffic = server.log, server.machine.traffic
    ooms = log.ooms
    server.log.since_s = warm_s
    for name in ("output_tokens", "prompt_tokens", "hit_tokens", "recomputed_tokens"):
        setattr(log, name, 0)
    log.ttft_s.clear()
    log.wakes.clear()
    log.chosen_recompute = 0
    written = dict(traffic.bytes)
    busy, gpu_busy = dict(traffic.busy_s), server.gpu.busy_s
    clock.run(warm_s + window_s)
    if traffic is not server.machine.traffic:  # it crashed; nothing but HBM then
        written, busy = {}, {}
    traffic = server.machine.traffic
    shares = {n: (s - busy.get(n, 0.0)) / window_s for n, s in traffic.busy_s.items()}
    shares["gpu"] = (server.gpu.busy_s - gpu_busy) / window_s
    window = [s for s in samples if s.at_s > warm_s]
    return Outcome(
        sessions=workload.sessions,
        held_peak=max((s.held for s in samples), default=0),
        held_mean=sum(s.held for s in window) / max(1, len(window)),
        ooms=log.ooms,
        tokens_per_s=log.output_tokens / window_s,
        ttft_s=tuple(log.ttft_s),
        wakes=tuple(log.wakes),
        hit_share=log.hit_tokens / max(1, log.prompt_tokens),
        recomputed_tokens_per_s=log.recomputed_tokens / window_s,
        chosen_recompute=log.chosen_recompute,
        written_bytes_per_s={
            name: (n - written.get((name, read), 0)) / window_s
            for (name, read), n in traffic.bytes.items() if not read
        },
        busy=shares,
        samples=tuple(samples),
        events_s=clock.now,
    )  # fmt: skip
