"""The default: evict what is least likely to be worth its place, as learned while running.

Two ways of telling blocks apart are learned side by side (`reuse.ReuseTable`), by how much of a
request was known when it came and by

* how often a block was used (what LRU-2 and frequency policies go by: chat, where most blocks are
  never used again), or
* how long the session was away before this request, the same for all blocks of its run (agents,
  whose sessions come back at their own pace).

The one that foretold the stream better so far decides. Blocks leave in the order of the index of
their class and age, from the tails of runs. Until something was learned this is LRU.

State: about 0.5 KB a resident block, with all that is remembered of evicted ones (8 bytes a block
and 0.3 KB a stretch of them) and 0.6 MB for two tables. Time: 1 us a block accessed in long runs,
3 us in short ones, where LRU takes 0.1 and 0.3.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from math import log2
from typing import ClassVar

import numpy as np

from tiered_kv.policies.base import Evictable
from tiered_kv.policies.reuse import BUCKETS, Ages, Era, ReuseTable
from tiered_kv.policies.segments import Ghost, History, Segment, Segments
from tiered_kv.types import BlockKey

MOST_USES = 4
"""Blocks used four times and more are one class."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Where the share of a request that was known is told apart; besides there is none and all."""
GAPS = 10
"""Classes of gaps: two for each doubling, from an eighth of the capacity to three times it."""
KINDS = ((len(SHARES) + 2) * MOST_USES, (len(SHARES) + 2) * GAPS)

HORIZON = 12.0
"""Capacities of accesses after which a block's next use is no longer waited for. From 6 to 24
nothing changes but for the smallest caches, which need the requests."""
HORIZON_REQUESTS = 1500
"""Requests that the horizon reaches back at least: fewer teach too little."""
HALF_LIFE = 256.0
"""Capacities of accesses after which what was learned counts half: long, since noise costs more
than a late answer. 32 costs agents half a point."""
REFRESHES = 4.0
"""Refreshes of the tables for each capacity of accesses, and"""
REFRESH_REQUESTS = 32
"""requests between two refreshes at least."""
REORDERS = 64.0
"""How often for each capacity of accesses the order follows the ages."""
MISJUDGED = 1.5
"""The capacity is taken anew when the tier proves larger or smaller than so many times."""


class Adaptive:
    """See the module. Segments of runs, ordered by the learned index of their class and age."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = float(capacity_blocks)
        self._ages = Ages(self._capacity)
        self._tables = [ReuseTable(n) for n in KINDS]
        self._chosen = 0
        self._now = 0.0  # block accesses
        self._requests = 0
        self._segments = Segments()
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._order: list[tuple[float, float, int, Segment]] = []
        self._start = 0  # entries of the order before it are stale
        self._ranks = 0
        self._ordered_at = self._refreshed_at = 0.0
        self._refreshed_request = 0
        self._era = Era(0.0, KINDS)
        self._eras: deque[Era] = deque([self._era])

    def use(self, run: Sequence[BlockKey]) -> None:
        if not run:
            return
        self._tick()
        parts, others = self._segments.cut(run)
        gap = self._now - parts[-1].last if parts else 0.0
        for segment in parts:
            self._again(segment, len(segment.keys))
        self._enroll(parts, len(run), len(run), gap)
        self._file(others)
        self._now += len(run)

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        if not new:
            return
        if not before:
            self._tick()
        parts, others = self._segments.cut(before)
        self._file(others)
        gap = parts[-1].gap if parts else 0.0
        for segment in parts:
            self._leave(segment, len(segment.keys))
        known, i = len(before), 0
        while i < len(new) and (found := self._recall(new, i)) is not None:
            parts.append(found)
            gap = found.gap
            i += len(found.keys)
            known += len(found.keys)
        if i < len(new):
            parts.append(Segment(list(new[i:]), self._now, 1, 0.0))
            self._segments.add(parts[-1])
        self._enroll(parts, known, len(before) + len(new), gap)
        self._now += len(new)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        of = self._segments.of
        piece: list[BlockKey] = []  # deepest first
        last: Segment | None = None
        for key in keys:
            segment = of.pop(key)
            if segment is not last:
                self._bury(piece, last)
                piece, last = [], segment
            if segment.keys[-1] == key:
                segment.keys.pop()
            else:
                segment.keys.remove(key)
            piece.append(key)
        self._bury(piece, last)

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        found: list[BlockKey] = []
        if n <= 0:
            return found
        self._measure()
        if self._now - self._ordered_at > self._capacity / REORDERS:
            self._reorder()
        refused: list[tuple[Segment, int]] = []
        for place in range(self._start, len(self._order)):
            _, _, rank, segment = self._order[place]
            if segment.rank != rank or not segment.keys:
                if place == self._start:
                    self._start += 1
                continue
            keys = segment.keys
            for i in range(len(keys) - 1, -1, -1):
                if not evictable(keys[i]):
                    refused.append((segment, i))  # nor, most likely, what lies before it
                    break
                found.append(keys[i])
                if len(found) == n:
                    return found
        for segment, end in refused:
            for i in range(end - 1, -1, -1):
                if evictable(segment.keys[i]):
                    found.append(segment.keys[i])
                    if len(found) == n:
                        return found
        return found

    def __len__(self) -> int:
        return len(self._segments.of)

    def check(self, resident: Collection[BlockKey]) -> None:
        of = self._segments.of
        assert of.keys() == set(resident), "the order and the residents differ"
        ordered = [s for _, _, rank, s in self._order[self._start :] if s.rank == rank]
        assert len(set(map(id, ordered))) == len(ordered), "a segment is ordered twice"
        assert sum(len(s.keys) for s in ordered) == len(of), "a segment is not in the order"
        for segment in ordered:
            assert all(of[key] is segment for key in segment.keys), "a block is filed wrongly"

    def _again(self, known: History, blocks: int) -> None:
        """Learn from a use of blocks that were used before."""
        age = self._now - known.last
        if known.era is not None and known.era.open:
            bucket, weight = self._ages.bucket(age), known.weight * blocks
            for table, kind in zip(self._tables, known.kinds, strict=True):
                table.reused(kind, bucket, weight)
        self._leave(known, blocks)
        known.era = None
        known.uses = min(known.uses + 1, MOST_USES)
        known.gap, known.last = age, self._now

    def _leave(self, known: History, blocks: int) -> None:
        """They wait for their next use in another class, or no longer."""
        if known.era is not None and known.era.open:
            for waiting, kind in zip(known.era.waiting, known.kinds, strict=True):
                waiting[kind] -= known.weight * blocks

    def _enroll(self, parts: list[Segment], known: int, length: int, gap: float) -> None:
        """Put the segments of a request of `length` blocks, of which `known` had been seen, into
        classes and into the order, so that the tail leaves first."""
        if not length:
            return
        share = known / length
        news = sum(share >= edge for edge in SHARES) + 1 if known else 0
        pace = min(GAPS - 1, int(2 * log2(8 * gap / self._capacity + 1))) if known else 0
        for segment in reversed(parts):
            kinds = (news * MOST_USES + segment.uses - 1, news * GAPS + pace)
            segment.kinds, segment.weight, segment.era = kinds, 1 / length, self._era
            for waiting, kind in zip(self._era.waiting, kinds, strict=True):
                waiting[kind] += segment.weight * len(segment.keys)
        self._file(parts)

    def _file(self, segments: list[Segment]) -> None:
        for segment in reversed(segments):
            self._ranks += 1
            segment.rank = self._ranks
            entry = (self._index(segment), segment.last, segment.rank, segment)
            insort(self._order, entry, lo=self._start)

    def _index(self, segment: Segment) -> float:
        chosen = self._chosen
        bucket = self._ages.bucket(self._now - segment.last)
        return self._tables[chosen].index[segment.kinds[chosen]][bucket]

    def _reorder(self) -> None:
        """Half of all time that this policy takes, hence by hand what `_index` does."""
        chosen, now, edges = self._chosen, self._now, self._ages.edges
        index = self._tables[chosen].index
        entries = []
        for _, last, rank, segment in self._order[self._start :]:
            if segment.rank == rank and segment.keys:
                row = index[segment.kinds[chosen]]
                entries.append((row[bisect_right(edges, now - last)], last, rank, segment))
        entries.sort()
        self._order, self._start, self._ordered_at = entries, 0, now

    def _bury(self, piece: list[BlockKey], segment: Segment | None) -> None:
        """Remember evicted blocks, together with those that left behind them."""
        if segment is None:
            return
        ghost, behind = Ghost(piece[::-1], segment), segment.ghost
        if behind is not None and behind.last == segment.last:
            first = behind.prints[0]
            if self._ghosts.get(first) is behind:
                del self._ghosts[first]
                ghost.prints += behind.prints
        self._ghosts[ghost.prints[0]] = segment.ghost = ghost
        while len(self._ghosts) > 2 * self._capacity:
            self._ghosts.popitem(last=False)

    def _recall(self, run: Sequence[BlockKey], start: int) -> Segment | None:
        """Blocks at `start` of a run that had been evicted, as a segment with their history."""
        ghost = self._ghosts.pop(hash(run[start]), None)
        if ghost is None or ghost.era is None or not ghost.era.open:
            return None
        blocks = ghost.matched(run, start)
        segment = Segment(list(run[start : start + blocks]), 0.0, 0, 0.0)
        segment.like(ghost)
        self._segments.add(segment)
        self._again(segment, blocks)
        if blocks < len(ghost.prints):  # another run may come for the rest
            del ghost.prints[:blocks]
            self._ghosts[ghost.prints[0]] = ghost
        return segment

    def _measure(self) -> None:
        """Take the number of resident blocks for the capacity, where the hint was far off."""
        size = len(self)
        if not self._capacity / MISJUDGED <= size <= self._capacity * MISJUDGED:
            self._capacity = float(size)
            self._ages = Ages(self._capacity)
            for table in self._tables:
                table.clear()
            self._reorder()

    def _tick(self) -> None:
        """A request begins."""
        self._requests += 1
        passed = self._now - self._refreshed_at
        if passed < self._capacity / REFRESHES:
            return
        if self._requests < self._refreshed_request + REFRESH_REQUESTS:
            return
        keep = 0.5 ** (passed / (HALF_LIFE * self._capacity))
        self._refreshed_at, self._refreshed_request = self._now, self._requests
        horizon = max(HORIZON * self._capacity, HORIZON_REQUESTS * self._now / self._requests)
        last = min(self._ages.bucket(horizon), BUCKETS - 1)
        self._expire(horizon, last)
        buckets = [self._ages.bucket(self._now - era.at) for era in self._eras]
        for t, table in enumerate(self._tables):
            waiting = np.zeros((table.classes, BUCKETS))
            for era, bucket in zip(self._eras, buckets, strict=True):
                waiting[:, bucket] += era.waiting[t]
            table.refresh(self._ages, np.maximum(waiting, 0.0), last, keep)
        self._chosen = max(range(len(KINDS)), key=lambda t: self._tables[t].score)
        self._reorder()
        self._era = Era(self._now, KINDS)
        self._eras.append(self._era)

    def _expire(self, horizon: float, last: int) -> None:
        while len(self._eras) > 1 and self._now - self._eras[0].at > horizon:
            era = self._eras.popleft()
            era.open = False
            for table, waiting in zip(self._tables, era.waiting, strict=True):
                table.expired(waiting, last)
        ghosts = self._ghosts
        while ghosts and (era_ := next(iter(ghosts.values())).era) and not era_.open:
            ghosts.popitem(last=False)
