"""Replay of a stream of runs through the real hierarchy of two tiers, moves ending at once.

What it counts is what the tiers decide, not how long anything takes: hits by tier, and the writes
that wear the drive.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.hierarchy import Hierarchy, TierSpec, check
from tiered_kv.sim.traces import Request
from tiered_kv.types import (
    Absent,
    BlockKey,
    Done,
    Fingerprint,
    Held,
    Medium,
    Move,
    MoveKind,
    Outcome,
    Reservation,
    Run,
)

BLOCK_BYTES = 2 << 20
"""Bytes. Only a unit here: no byte is moved."""

LAYOUT = Fingerprint(bytes(16))
BELOW = Held((Medium.NVME,))
DONE: Outcome = Done()


@dataclass(slots=True)
class Counts:
    """Blocks, summed over a replay. A hit is the leading part of a run that either tier holds."""

    requests: int = 0
    accesses: int = 0
    hits: int = 0
    dram_hits: int = 0
    written: int = 0
    restored: int = 0
    short: int = 0
    """Blocks that were held below and found no room above."""

    @property
    def hit_ratio(self) -> float:
        """Hits an access, in 0..1."""
        return self.hits / max(1, self.accesses)

    @property
    def dram_hit_ratio(self) -> float:
        """Hits that DRAM already held an access, in 0..1."""
        return self.dram_hits / max(1, self.accesses)

    @property
    def writes_per_access(self) -> float:
        """Blocks written to NVMe per block accessed: what the drive wears by."""
        return self.written / max(1, self.accesses)


class Fill(NamedTuple):
    """Blocks that each tier held at a moment of a trace."""

    at_s: float
    dram_blocks: int
    nvme_blocks: int


class TwoTier:
    """DRAM of `dram_blocks` above NVMe of `nvme_blocks`, both filled to the brim.

    `policy` orders both tiers, `admission` says what is written down and when.
    """

    def __init__(
        self, dram_blocks: int, nvme_blocks: int, *, policy: str = "lru",
        admission: str = "on_demotion",
    ) -> None:  # fmt: skip
        self.hierarchy = Hierarchy([
            TierSpec(Medium.DRAM, dram_blocks * BLOCK_BYTES, BLOCK_BYTES, high=1.0, low=1.0,
                     policy=policy),
            TierSpec(Medium.NVME, nvme_blocks * BLOCK_BYTES, BLOCK_BYTES, high=1.0, low=1.0,
                     policy=policy, admission=admission),
        ])  # fmt: skip
        self.counts = Counts()

    def replay(self, runs: Iterable[Run]) -> Counts:
        """All requests of a stream, one at a time. Memory is that of the tiers."""
        for now, run in enumerate(runs):
            self.request(run, float(now))
        return self.counts

    def fills(self, requests: Iterable[Request], every: int) -> Iterator[Fill]:
        """Carry out all requests; what is held after each `every` of them, and at the end."""
        at_s, number = 0.0, 0
        for number, request in enumerate(requests, 1):
            at_s = request.at_s
            self.request(request.run, float(number))
            if number % every == 0:
                yield self._fill(at_s)
        if number % every:
            yield self._fill(at_s)

    def _fill(self, at_s: float) -> Fill:
        dram, nvme = self.hierarchy.usage()
        return Fill(at_s, dram.blocks, nvme.blocks)

    def request(self, run: Run, now: float) -> None:
        """Find what is held, bring it up, use it, store the rest."""
        h, counts = self.hierarchy, self.counts
        counts.requests += 1
        counts.accesses += len(run)
        if not run:
            return
        held, above = self._find(run)
        counts.hits += held
        counts.dram_hits += above
        if above < held:
            # What is there already is used first, so that room is not made at its cost.
            h.release(h.lease(run[:held], 1.0, now).id)
            self._bring_up(run[:held], now)
        lease = h.lease(run, 1.0, now)
        counts.short += held - len(lease.keys)
        self._store(run, now)
        h.release(lease.id)
        self._carry_out(now)

    def check(self) -> None:
        """Raise `AssertionError` if an invariant of the hierarchy does not hold."""
        check(self.hierarchy)

    def _find(self, run: Run) -> tuple[int, int]:
        """How many leading blocks are held, and how many of these DRAM holds up to a gap."""
        held = above = 0
        whole = True
        for answer in self.hierarchy.lookup(run):
            if isinstance(answer, Absent):
                break
            held += 1
            whole = whole and answer != BELOW
            above += whole
        return held, above

    def _bring_up(self, run: Sequence[BlockKey], now: float) -> None:
        """As the node does it: ask again as long as that brings more, then at others' cost."""
        h = self.hierarchy
        left, force = len(run) + 1, False
        while True:
            wanted = h.want(run, LAYOUT, BLOCK_BYTES, force=force)
            self._carry_out(now)
            if not wanted.short or (force and wanted.short >= left):
                return
            force = wanted.short >= left
            left = wanted.short

    def _store(self, run: Run, now: float) -> None:
        h = self.hierarchy
        reserved = h.reserve(run, LAYOUT, BLOCK_BYTES, "replay")
        if not isinstance(reserved, Reservation):
            self._carry_out(now)
            reserved = h.reserve(run, LAYOUT, BLOCK_BYTES, "replay", force=True)
        if isinstance(reserved, Reservation):
            h.commit(reserved.id)

    def _carry_out(self, now: float) -> None:
        while moves := self.hierarchy.due(now):
            for move in moves:
                self._count(move)
                self.hierarchy.done(move, [DONE] * len(move.blocks))

    def _count(self, move: Move) -> None:
        if move.kind is MoveKind.RESTORE:
            self.counts.restored += len(move.blocks)
        else:
            self.counts.written += len(move.blocks)
