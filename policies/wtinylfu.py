"""W-TinyLFU: a small LRU window before a main cache that is guarded by frequency (Einziger,
Friedman and Manes, ACM TOS 2017).

What falls out of the window (1 % of the room) is let into the main cache only if it was used more
often than what would leave for it. Frequencies come from a count-min sketch of four-bit counters
that are halved now and then. The main cache is a segmented LRU: on trial until used again.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.types import BlockKey

WINDOW, TRIAL = 0.01, 0.2
"""Share of the room for the window; share of the main cache for blocks on trial (the paper's)."""
MOST = 15
SAMPLE = 10
"""Accesses for each resident block after which counts are halved (section 3.3)."""


class Sketch:
    """How often keys were seen lately, at most `MOST`. Four bytes a counter's row of four."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(6, (4 * capacity - 1).bit_length())
        self._mask = size - 1
        self._rows = [bytearray(size) for _ in range(4)]
        self._added, self._sample = 0, SAMPLE * max(1, capacity)

    def add(self, key: BlockKey) -> None:
        """Seen once more."""
        h, mask = xxh3_64_intdigest(key), self._mask
        for i, row in enumerate(self._rows):
            at = (h >> 15 * i) & mask
            if row[at] < MOST:
                row[at] += 1
        self._added += 1
        if self._added >= self._sample:
            self._added //= 2
            self._rows = [row.translate(_HALF) for row in self._rows]

    def count(self, key: BlockKey) -> int:
        """How often; a little too high where keys collide."""
        h, mask = xxh3_64_intdigest(key), self._mask
        return min(row[(h >> 15 * i) & mask] for i, row in enumerate(self._rows))


class WTinyLFU:
    """Window, trial and proven: three LRU lists, oldest first, each run tail first."""

    name: ClassVar[str] = "wtinylfu"

    def __init__(self, capacity_blocks: int) -> None:
        self._sketch = Sketch(capacity_blocks)
        self._window: OrderedDict[BlockKey, None] = OrderedDict()
        self._trial: OrderedDict[BlockKey, None] = OrderedDict()
        self._proven: OrderedDict[BlockKey, None] = OrderedDict()
        self._chosen: set[BlockKey] = set()
        self._let_in: list[BlockKey] = []

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in reversed(new):
            self._sketch.add(key)
            self._window[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        for key in reversed(run):
            self._sketch.add(key)
            if key in self._window:
                self._window.move_to_end(key)
                continue
            self._trial.pop(key, None)
            self._proven.pop(key, None)
            self._proven[key] = None
        main = len(self._trial) + len(self._proven)
        while len(self._proven) > (1 - TRIAL) * main:
            self._trial[self._proven.popitem(last=False)[0]] = None

    def remove(self, keys: Sequence[BlockKey]) -> None:
        if keys and keys[0] in self._chosen:
            for key in self._let_in:
                if key in self._window:
                    del self._window[key]
                    self._trial[key] = None
            self._let_in = []
        for key in keys:
            for part in (self._window, self._trial, self._proven):
                if key in part:
                    del part[key]
                    break

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        self._let_in = []
        found = pick(self._walk(n), n, evictable)
        self._chosen = set(found)
        return found

    def __len__(self) -> int:
        return len(self._window) + len(self._trial) + len(self._proven)

    def check(self, resident: Collection[BlockKey]) -> None:
        everyone = [*self._window, *self._trial, *self._proven]
        assert len(set(everyone)) == len(everyone), "a block is in two lists"
        assert set(everyone) == set(resident), "the order and the residents differ"

    def _walk(self, n: int) -> Iterator[BlockKey]:
        """Duels between the window's oldest and the main cache's; the loser leaves."""
        window, guarded = iter(self._window), chain(self._trial, self._proven)
        outside, inside = len(self._window), len(self._trial) + len(self._proven)
        limit, count = max(1, int(WINDOW * len(self))), self._sketch.count
        room = len(self) - limit - n  # of the main cache, once `n` have left
        weakest = next(guarded, None)
        while outside > limit or (outside and weakest is None):
            candidate = next(window)
            outside -= 1
            if inside < room:
                self._let_in.append(candidate)
                inside += 1
            elif weakest is None or count(candidate) <= count(weakest):
                yield candidate
            else:
                self._let_in.append(candidate)
                yield weakest
                weakest = next(guarded, None)
        if weakest is not None:
            yield weakest
        yield from guarded
        yield from list(self._let_in)
        yield from window


_HALF = bytes(i // 2 for i in range(256))
