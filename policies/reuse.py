"""When does a block come back? Learned from the stream, by classes of blocks.

For each class a life table is kept: of the blocks that were last used `age` ago and not since, how
many are used next. Blocks that still wait count as waiting, so that nothing has to return before
something is known (Kaplan and Meier 1958). From it comes what eviction needs: the most hits a
block of this class and age can still bring for each unit of time that it occupies its place,

    index(age) = max over h of  P(used within h) / E[time until used, at most h],

Gittins' index (1979) for "keep it for another while, or give it up"; hits for space and time is
also what LHD ranks by (Beckmann, Chen and Cidon, NSDI'18). Time is counted in block accesses.
"""

from bisect import bisect_right
from math import log

import numpy as np
from numpy.typing import NDArray

PER_OCTAVE = 3
"""Age buckets for each doubling of age. Two to four differ by tenths of a point."""
FINEST = 64
"""The first buckets are this part of the capacity: far below what eviction can tell apart."""
BUCKETS = 64
PRIOR = 20.0
"""Requests that the mean over all classes weighs in a class of its own; 5 to 50 are alike."""
SMOOTHINGS = 2
"""Passes of a (1, 2, 1) / 4 filter along the ages: single buckets of small classes are noise."""
CERTAIN = 0.98
"""No bucket is believed to hold more returns than this, however few blocks it has seen."""

Floats = NDArray[np.float64]
LATER: NDArray[np.bool_] = np.triu(np.ones((BUCKETS, BUCKETS), dtype=np.bool_))


class Ages:
    """Age buckets: about logarithmic, in units of the capacity."""

    def __init__(self, capacity: float) -> None:
        unit = max(capacity, 1.0) / FINEST
        edges = [unit * (2 ** (i / PER_OCTAVE) - 1) for i in range(BUCKETS + 1)]
        self.edges = edges[1:-1]
        self.widths: Floats = np.diff(np.array(edges))

    def bucket(self, age: float) -> int:
        """The bucket of an age. About 0.1 us."""
        return bisect_right(self.edges, age)


class Era:
    """What was touched between two refreshes and waits for its next use: weight by class of each
    table, of blocks without and with a hint. Past the horizon it is no longer `open`."""

    __slots__ = ("at", "open", "waiting")

    def __init__(self, at: float, classes: tuple[int, ...]) -> None:
        self.at = at
        self.open = True
        self.waiting = tuple([[0.0] * n for n in classes] for _ in (False, True))


class ReuseTable:
    """One way to sort blocks into classes, and what was learned of each."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.clear()

    def clear(self) -> None:
        """Forget everything (the scale of ages has changed)."""
        self.used = [[0.0] * BUCKETS for _ in range(self.classes)]
        self.lost = [[0.0] * BUCKETS for _ in range(self.classes)]
        self.index = [[0.0] * BUCKETS for _ in range(self.classes)]
        self._surprise = [[-log(BUCKETS)] * BUCKETS for _ in range(self.classes)]
        self.score = self.told_score = 0.0
        """Decayed log-likelihood of what happened, each time judged before it was learned from:
        of everything, and of blocks with a hint alone."""

    def reused(self, kind: int, bucket: int, weight: float, told: bool) -> None:
        """A block of this class, with a hint or without, was used again at this age."""
        likely = weight * self._surprise[kind][bucket]
        self.score += likely
        if told:
            self.told_score += likely
        self.used[kind][bucket] += weight

    def expired(self, waiting: list[float], bucket: int, told: bool) -> None:
        """What waited until the horizon, by class."""
        for kind, weight in enumerate(waiting):
            if weight:
                likely = weight * self._surprise[kind][-1]
                self.score += likely
                if told:
                    self.told_score += likely
                self.lost[kind][bucket] += weight

    def refresh(self, ages: Ages, waiting: Floats, last: int, keep: float) -> None:
        """Make the index anew. `waiting` is by class and bucket, `last` the horizon's bucket, and
        `keep` what the past weighs from now on. About 2 ms."""
        n = last + 1
        used, lost = np.array(self.used), np.array(self.lost)
        exposed = (used + lost + waiting)[:, ::-1].cumsum(axis=1)[:, ::-1][:, :n]
        mean = used.sum(axis=0)[:n] / (exposed.sum(axis=0) + 1.0)
        returns, chances = _smooth(used[:, :n]), _smooth(exposed)
        hazard = np.minimum(CERTAIN, (returns + PRIOR * mean) / (chances + PRIOR))
        known = exposed[:, 0] > 0
        self._index(hazard, known, ages.widths[:n])
        self._judge(hazard)
        self.used = (used * keep).tolist()
        self.lost = (lost * keep).tolist()
        self.score *= keep
        self.told_score *= keep

    def _index(self, hazard: Floats, known: NDArray[np.bool_], widths: Floats) -> None:
        rows = hazard[known]
        n = len(widths)
        index = np.zeros((len(rows), BUCKETS))
        alive = np.ones_like(rows)
        np.cumprod(1.0 - rows[:, :-1], axis=1, out=alive[:, 1:])
        hits = _beyond(alive * rows)
        time = _beyond(alive * widths * (1.0 - rows / 2))
        # what comes from b to h is what comes from b on less what comes after h
        ratios = (hits[:, :n, None] - hits[:, None, 1:]) / np.where(
            LATER[:n, :n], time[:, :n, None] - time[:, None, 1:], np.inf
        )
        index[:, :n] = ratios.max(axis=2)
        for kind, row in zip(np.flatnonzero(known), index.tolist(), strict=True):
            self.index[kind] = row

    def _judge(self, hazard: Floats) -> None:
        gone = np.log1p(-hazard).cumsum(axis=1)
        before = np.zeros_like(gone)
        before[:, 1:] = gone[:, :-1]
        surprise = np.repeat(gone[:, -1:], BUCKETS, axis=1)
        surprise[:, : hazard.shape[1]] = before + np.log(np.maximum(hazard, 1e-6))
        self._surprise = surprise.tolist()


def _beyond(rows: Floats) -> Floats:
    """Sums from each column on, and a last column of nothing."""
    sums = np.zeros((len(rows), rows.shape[1] + 1))
    sums[:, :-1] = rows[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums


def _smooth(rows: Floats) -> Floats:
    for _ in range(SMOOTHINGS):
        wide = np.pad(rows, ((0, 0), (1, 1)), mode="edge")
        rows = (wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]) / 4
    return rows
