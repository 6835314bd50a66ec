"""Replay of a trace through the real hierarchy: which share of the blocks would have been there?

One tier of a number of blocks, one request at a time. A request finds the longest resident prefix
of its run, reads it and stores the rest; blocks leave only when the tier is full, and never those
of the running request. That is how published replays count, so that numbers can be compared.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tiered_kv.errors import BadInput
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.policies.belady import MIN, future_of
from tiered_kv.sim.hints import Hints, told
from tiered_kv.sim.traces import Request
from tiered_kv.types import BlockKey, Fingerprint, Lease, Medium, Reservation, Run

BLOCK_BYTES = 2 << 20
"""Bytes. Only a unit here: no byte is moved."""
LAYOUT = Fingerprint(bytes(16))
FOR_EVER_S = 1e18

BY_THE_BLOCK = frozenset({"fifo", "lru_head_first", "s3fifo", "sieve", "gdsf", "min"})
"""Policies that are replayed as their papers define them, each block for itself: also the middle
of a prefix may leave, and what lies behind it is dead weight. The service never does that; here it
shows the price, and makes the numbers those of the literature."""


HINTED = "+hints"
REPORT_EVERY = 256  # requests
Progress = Callable[[int], None]


class Source(Protocol):
    """A trace, or what makes one up: the same runs each time it is asked."""

    def runs(self) -> Iterator[Run]:
        """The blocks of each request."""
        ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found, in blocks. A hit is a block of the leading resident part of a run.
    The name of a policy that was given hints ends in `HINTED`."""

    policy: str
    blocks: int
    requests: int
    accesses: int
    hits: int
    seconds: float

    @property
    def hit_percent(self) -> float:
        """Hits a hundred accesses."""
        return 100 * self.hits / max(1, self.accesses)


def replay(
    trace: Source | Sequence[Run], policy: str, blocks: int, progress: Progress | None = None,
    *, hinted: Iterable[Request] | None = None,
) -> Replayed:  # fmt: skip
    """Replay a trace, or runs, with a policy and a capacity. `min` reads it twice.

    `hinted` are the same requests with their stop reasons: with them the policy is told when a
    session is expected back. `progress` is told the number of requests that are done, now and
    then. Raises `UnknownName` for the policy, `BadInput` for the size, and what the trace raises.
    """
    if blocks < 1:
        raise BadInput(f"a capacity is 1 block or more, not {blocks}")
    tier = OneTier(policy, blocks)
    runs: Callable[[], Iterator[Run]]
    if hinted is not None:
        runs = partial(told, hinted, Hints(tier.hierarchy))
    else:
        runs = (lambda: iter(trace)) if isinstance(trace, Sequence) else trace.runs
    if policy == MIN.name:
        tier.foresee(runs())
    step = tier.request if policy not in BY_THE_BLOCK else tier.request_by_the_block
    requests = accesses = hits = 0
    began = time.perf_counter()
    for run in runs():
        requests += 1
        accesses += len(run)
        hits += step(run)
        if progress is not None and requests % REPORT_EVERY == 0:
            progress(requests)
    name = policy if hinted is None else policy + HINTED
    return Replayed(name, blocks, requests, accesses, hits, time.perf_counter() - began)


class OneTier:
    """A hierarchy of one tier, filled to the brim."""

    def __init__(self, policy: str, blocks: int) -> None:
        spec = TierSpec(
            Medium.DRAM, blocks * BLOCK_BYTES, BLOCK_BYTES, high=1.0, low=1.0, policy=policy
        )
        self.hierarchy = Hierarchy([spec])
        self._blocks = blocks
        self._now = 0.0

    def foresee(self, runs: Iterable[Run]) -> None:
        """Order the tier by what is going to happen."""
        future = future_of(run[: self._blocks] for run in runs)
        self.hierarchy.book.top.policy = MIN(self._blocks, future)

    def request(self, run: Run) -> int:
        """Serve a request; how many of its blocks hit. What exceeds the tier is not stored."""
        lease = self._read(run)
        held = len(lease.keys)
        if held < len(run):
            self._store(run[: self._blocks], None)
        self.hierarchy.release(lease.id)
        return held

    def request_by_the_block(self, run: Run) -> int:
        """The same with blocks that do not know each other: none has a parent, so each may leave.

        What is resident behind a gap is no hit, and used and kept all the same.
        """
        h = self.hierarchy
        run = run[: self._blocks]
        leases = [self._read(run)]
        held = len(leases[0].keys)
        if held < len(run):
            blocks = h.book.blocks
            behind: list[BlockKey] = [key for key in run[held:] if key in blocks]
            leases.append(h.lease(behind, FOR_EVER_S, self._now))
            self._store(run, [None] * len(run))
        for lease in leases:
            h.release(lease.id)
        return held

    def _read(self, run: Run) -> Lease:
        self._now += 1.0
        self.hierarchy.lookup(run)
        return self.hierarchy.lease(run, FOR_EVER_S, self._now)

    def _store(self, run: Run, parents: list[BlockKey | None] | None) -> None:
        reserved = self.hierarchy.reserve(run, LAYOUT, BLOCK_BYTES, "replay", parents)
        assert isinstance(reserved, Reservation), f"{reserved} though nothing else is in use"
        self.hierarchy.commit(reserved.id)
