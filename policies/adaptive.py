"""The default: evict what is least likely to be worth its place, as learned while running.

Which blocks are worth what says `forecast.Forecast`; here they are kept in the order of that, in
stretches of runs that were always used together, from the tails of runs on. Until something was
learned this is LRU.

State: about 0.5 KB a resident block, with all that is remembered of evicted ones (8 bytes a block
and 0.3 KB a stretch of them) and 0.9 MB for three tables. Time: 1 us a block accessed in long
runs, 3 us in short ones, where LRU takes 0.1 and 0.3.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable
from tiered_kv.policies.forecast import MOST_USES, Forecast
from tiered_kv.policies.segments import Ghost, History, Segment, Segments
from tiered_kv.types import BlockKey

REFRESHES = 4.0
"""Refreshes of the forecast for each capacity of accesses, and"""
REFRESH_REQUESTS = 32
"""requests between two refreshes at least."""
REORDERS = 64.0
"""How often for each capacity of accesses the order follows the ages."""
MISJUDGED = 1.5
"""The capacity is taken anew when the tier proves larger or smaller than so many times."""


class Adaptive:
    """See the module. Segments of runs, ordered by the learned index of their kind and age."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = float(capacity_blocks)
        self._forecast = Forecast(self._capacity)
        self._now = 0.0  # block accesses
        self._requests = 0
        self._segments = Segments()
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._order: list[tuple[float, float, int, Segment]] = []
        self._start = 0  # entries of the order before it are stale
        self._ranks = 0
        self._ordered_at = self._refreshed_at = 0.0
        self._refreshed_request = 0

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
            self._forecast.leave(segment, len(segment.keys))
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

    def expect(self, run: Sequence[BlockKey], return_s: float) -> None:
        """See `Expecting`. Only for blocks that nobody used since the end of the run was."""
        parts, others = self._segments.cut(run)
        self._file(others)
        mine = [segment for segment in parts if segment.last <= parts[-1].last]
        for segment in mine:
            self._forecast.expect(segment, return_s)
        self._file(mine)

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
        """Blocks that were used before are used."""
        age = self._now - known.last
        self._forecast.used(known, blocks, age)
        known.era = None
        known.uses = min(known.uses + 1, MOST_USES)
        known.gap, known.last = age, self._now

    def _enroll(self, parts: list[Segment], known: int, length: int, gap: float) -> None:
        """Put the segments of a request of `length` blocks, of which `known` had been seen, into
        classes and into the order, so that the tail leaves first."""
        if length:
            self._forecast.wait(parts, known, length, gap)
            self._file(parts)

    def _file(self, segments: list[Segment]) -> None:
        for segment, index in zip(
            reversed(segments), self._forecast.indices(self._now, segments[::-1]), strict=True
        ):
            self._ranks += 1
            segment.rank = self._ranks
            insort(self._order, (index, segment.last, segment.rank, segment), lo=self._start)

    def _reorder(self) -> None:
        """Half of all time that this policy takes."""
        some = [s for _, _, rank, s in self._order[self._start :] if s.rank == rank and s.keys]
        indices = self._forecast.indices(self._now, some)
        self._order = sorted(
            (index, s.last, s.rank, s) for index, s in zip(indices, some, strict=True)
        )
        self._start, self._ordered_at = 0, self._now

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
        size = max(1, len(self))
        if not self._capacity / MISJUDGED <= size <= self._capacity * MISJUDGED:
            self._capacity = float(size)
            self._forecast.rescale(self._capacity)
            self._reorder()

    def _tick(self) -> None:
        """A request begins."""
        self._requests += 1
        passed = self._now - self._refreshed_at
        if passed < self._capacity / REFRESHES:
            return
        if self._requests < self._refreshed_request + REFRESH_REQUESTS:
            return
        self._refreshed_at, self._refreshed_request = self._now, self._requests
        self._forecast.refresh(self._now, passed, self._now / self._requests)
        ghosts = self._ghosts
        while ghosts and (era := next(iter(ghosts.values())).era) and not era.open:
            ghosts.popitem(last=False)
        self._reorder()
