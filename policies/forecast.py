"""What a block of some kind and age is worth, by the table that foretold the stream best so far.

Three ways of telling blocks apart are learned side by side (`reuse.ReuseTable`), all by how much
of a request was known when it came and by

* how often a block was used (what LRU-2 and frequency policies go by: chat, where most blocks are
  never used again),
* how long the session was away before this request, the same for all blocks of its run (agents,
  whose sessions come back at their own pace), or
* when the session is expected back, for runs of which somebody said so.

Hints are no orders: what becomes of the blocks of which something was said is learned like all
else, and the third table is asked only about those, and only while it foretells better than the
others what becomes of them. Wrong hints are thus found out, and cost nothing from then on. Only
"it has ended" is believed at once, until a quarter of what ended comes back all the same.
"""

from bisect import bisect_right
from collections import deque
from math import inf, log2

import numpy as np

from tiered_kv.policies.reuse import BUCKETS, Ages, Era, ReuseTable
from tiered_kv.policies.segments import History, Segment

MOST_USES = 4
"""Blocks used four times and more are one class."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Where the share of a request that was known is told apart; besides there is none and all."""
NEWS = len(SHARES) + 2
GAPS = 10
"""Classes of gaps: two for each doubling, from an eighth of the capacity to three times it."""
RETURNS = 9
"""Classes of expected returns: one for every four times as long from 2 s on; the last is never."""
FIRST_RETURN_S = 2.0
ENDED = RETURNS - 1
KINDS = (NEWS * MOST_USES, NEWS * GAPS, NEWS * RETURNS)
PLAIN = 2
"""The tables before this one need nobody to say anything."""

HORIZON = 12.0
"""Capacities of accesses after which a block's next use is no longer waited for. From 6 to 24
nothing changes but for the smallest caches, which need the requests."""
HORIZON_REQUESTS = 1500
"""Requests that the horizon reaches back at least: fewer teach too little."""
HALF_LIFE = 256.0
"""Capacities of accesses after which what was learned counts half: long, since noise costs more
than a late answer. 32 costs agents half a point."""
DOUBT, MISTRUST = 8.0, 0.25
"""Sessions that "have ended" leave first until this share of them came back all the same, with so
many imagined ones that did not: two or three wrong hints are enough."""
FIRST_OF_ALL = -1.0  # below every index


class Forecast:
    """The tables, what waits for its next use, and whom to believe. Times are block accesses."""

    def __init__(self, capacity: float) -> None:
        self._tables = [ReuseTable(n) for n in KINDS]
        self._chosen = [0, 0]  # whom to ask about the others, and about those with a hint
        self._ended = self._back = 0.0  # requests that are said to have ended, and that came back
        self._told = False
        self._ages = Ages(capacity)
        self._capacity = capacity
        self.era = Era(0.0, KINDS)
        self._eras: deque[Era] = deque([self.era])

    def rescale(self, capacity: float) -> None:
        """Begin anew: the scale of ages has changed."""
        self._capacity = capacity
        self._ages = Ages(capacity)
        for table in self._tables:
            table.clear()

    def wait(self, parts: list[Segment], known: int, length: int, gap: float) -> None:
        """The segments of a request of `length` blocks, of which `known` had been seen, wait for
        their next use. Its session had been away for `gap`."""
        weight = 1 / length
        news = bisect_right(SHARES, known / length) + 1 if known else 0
        pace = min(GAPS - 1, int(2 * log2(8 * gap / self._capacity + 1))) if known else 0
        base, paced = news * MOST_USES - 1, news * GAPS + pace
        era = self.era
        uses, gaps, _ = era.waiting[False]
        for segment in parts:
            segment.kinds, segment.weight, segment.era = (base + segment.uses, paced), weight, era
            uses[base + segment.uses] += weight * len(segment.keys)
            gaps[paced] += weight * len(segment.keys)

    def expect(self, segment: Segment, return_s: float) -> None:
        """Its session is expected back in so many seconds."""
        era = segment.era
        if era is None or not era.open:
            return
        weight = segment.weight * len(segment.keys)
        self._told = True
        self._count(segment, -weight)
        if _ended(segment):
            self._ended -= weight
        news = segment.kinds[1] // GAPS
        segment.kinds = (*segment.kinds[:PLAIN], news * RETURNS + _when(return_s))
        self._count(segment, weight)
        if _ended(segment):
            self._ended += weight

    def used(self, known: History, blocks: int, age: float) -> None:
        """Learn from a use of blocks that were used before."""
        if known.era is not None and known.era.open:
            bucket, weight = self._ages.bucket(age), known.weight * blocks
            told = len(known.kinds) > PLAIN
            for table, kind in zip(self._tables, known.kinds, strict=False):
                table.reused(kind, bucket, weight, told)
            if told and _ended(known):
                self._back += weight
        self.leave(known, blocks)

    def leave(self, known: History, blocks: int) -> None:
        """They wait for their next use in another class, or no longer."""
        if known.era is not None and known.era.open:
            self._count(known, -known.weight * blocks)

    def indices(self, now: float, some: list[Segment]) -> list[float]:
        """What each is worth, in hits for the time that it occupies its place."""
        edges = self._ages.edges
        plain, hinted = self._chosen
        index, told = self._tables[plain].index, self._tables[hinted].index
        ended = FIRST_OF_ALL if self._back <= MISTRUST * (self._ended + DOUBT) else None
        found = []
        for segment in some:
            kinds = segment.kinds
            if len(kinds) == PLAIN:
                row = index[kinds[plain]]
            elif ended is not None and kinds[PLAIN] % RETURNS == ENDED:
                found.append(ended)
                continue
            else:
                row = told[kinds[hinted]]
            found.append(row[bisect_right(edges, now - segment.last)])
        return found

    def refresh(self, now: float, passed: float, mean_length: float) -> None:
        """Learn from what happened in the `passed` accesses since the last time, choose whom to
        believe, begin a new era. Some milliseconds."""
        keep = 0.5 ** (passed / (HALF_LIFE * self._capacity))
        horizon = max(HORIZON * self._capacity, HORIZON_REQUESTS * mean_length)
        last = min(self._ages.bucket(horizon), BUCKETS - 1)
        self._expire(now - horizon, last)
        buckets = [self._ages.bucket(now - era.at) for era in self._eras]
        for t, table in enumerate(self._tables):
            if t >= PLAIN and not self._told:
                continue  # nobody ever gave a hint
            waiting = np.zeros((table.classes, BUCKETS))
            for era, bucket in zip(self._eras, buckets, strict=True):
                waiting[:, bucket] += np.add(era.waiting[0][t], era.waiting[1][t])
            table.refresh(self._ages, np.maximum(waiting, 0.0), last, keep)
        tables = range(len(KINDS))
        self._chosen = [
            max(tables[:PLAIN], key=lambda t: self._tables[t].score),
            max(tables, key=lambda t: self._tables[t].told_score),
        ]
        self._ended, self._back = self._ended * keep, self._back * keep
        self.era = Era(now, KINDS)
        self._eras.append(self.era)

    def _expire(self, before: float, last: int) -> None:
        while len(self._eras) > 1 and self._eras[0].at < before:
            era = self._eras.popleft()
            era.open = False
            for told, by_table in enumerate(era.waiting):
                for table, waiting in zip(self._tables, by_table, strict=True):
                    table.expired(waiting, last, bool(told))

    def _count(self, known: History, weight: float) -> None:
        """So much more waits in its classes."""
        assert known.era is not None
        kinds = known.kinds
        for waiting, kind in zip(known.era.waiting[len(kinds) > PLAIN], kinds, strict=False):
            waiting[kind] += weight


def _ended(known: History) -> bool:
    return len(known.kinds) > PLAIN and known.kinds[PLAIN] % RETURNS == ENDED


def _when(return_s: float) -> int:
    """The class of an expected return."""
    if return_s == inf:
        return ENDED
    return min(ENDED - 1, int(log2(max(return_s, FIRST_RETURN_S) / FIRST_RETURN_S) / 2))
