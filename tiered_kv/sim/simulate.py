"""A workload, a node, a seed: how many sessions are held, how fast they wake, what it wears."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.errors import BadInput
from tiered_kv.sim.chats import Chats, Trace
from tiered_kv.sim.clock import Clock
from tiered_kv.sim.description import Workload
from tiered_kv.sim.machine import LAYOUT, Machine, Setup
from tiered_kv.sim.serving import Server
from tiered_kv.sim.workload_sessions import Request
from tiered_kv.types import BlockKey, Located, Medium

SAMPLE_S, SAMPLES = 5.0, 600
"""Every so many seconds, and at most so many times."""


class Sample(NamedTuple):
    """One moment of a simulation."""

    at_s: float
    held: int
    queued: int
    used_bytes: dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation came to. `held_*`: open sessions whose whole KV is in reach."""

    sessions: int
    held_at_oom: tuple[int, ...]
    queued_mean: float
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

    @property
    def held(self) -> int:
        """Sessions that this node holds: the most at one moment or, where a server runs out of
        memory, what it held on average when it did."""
        if self.held_at_oom:
            return round(sum(self.held_at_oom) / len(self.held_at_oom))
        return self.held_peak

    @property
    def wake_s(self) -> list[float]:
        """Seconds of all wakes."""
        return sorted(seconds for _, seconds in self.wakes)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the sorted values does not exceed; NaN where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def simulate(
    setup: Setup, work: Workload | Iterable[Request], *, seed: int = 1, warm_s: float = 1200.0,
    window_s: float = 1800.0, choose: bool = True,
) -> Outcome:  # fmt: skip
    """Sessions arrive evenly over `warm_s`; what happens in the `window_s` after that counts,
    OOMs and the peak of held sessions from the beginning on. Deterministic by seed."""
    if not (0 <= warm_s < math.inf and 0 < window_s < math.inf):
        raise BadInput(f"warm_s = {warm_s!r} and window_s = {window_s!r} must be positive")
    clock = Clock()
    server = Server(clock, setup, choose=choose)
    chats = Chats(server, work, seed, warm_s) if isinstance(work, Workload) else Trace(server, work)
    samples: list[Sample] = []

    def sample() -> None:
        held = sum(server.holds(sid) for sid in chats.open.values())
        used = {str(u.medium): float(u.used_bytes) for u in server.machine.hierarchy.usage()}
        used |= dict(server.archive.used_bytes())
        samples.append(Sample(clock.now, held, server.queued, used))

    clock.every(max(SAMPLE_S, (warm_s + window_s) / SAMPLES), sample)
    clock.run(warm_s)
    log, traffic = server.log, server.machine.traffic
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
        sessions=work.sessions if isinstance(work, Workload) else 0,
        held_at_oom=tuple(log.held_at_oom),
        queued_mean=sum(s.queued for s in window) / max(1, len(window)),
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
    )  # fmt: skip


def idle_wake_s(setup: Setup, tokens: int, medium: Medium) -> float:
    """Seconds in which one sequence comes from a tier into HBM when nothing else happens."""
    clock = Clock()
    machine = Machine(clock, setup)
    blocks = -(-tokens // setup.block_tokens)
    run = [BlockKey(i.to_bytes(16, "little")) for i in range(1, blocks + 1)]
    parents = [None, *run[:-1]]
    size = setup.block_bytes
    found = [
        Located(key, parent, i * size, size, LAYOUT, 1)
        for i, (key, parent) in enumerate(zip(run, parents, strict=True))
    ]
    if len(machine.hierarchy.adopt(medium, found)) < blocks:
        raise BadInput(f"{tokens} tokens do not fit {medium} of profile {setup.profile.name}")
    ended = clock.spawn(machine.wake(run))
    times: list[float] = []
    ended.then(lambda: times.append(clock.now))
    clock.run()
    return times[0]
