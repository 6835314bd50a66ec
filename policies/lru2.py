"""LRU-2: least recent in its last use but one (O'Neil, O'Neil and Weikum, SIGMOD'93).

Blocks that were used once leave first, in the order of LRU; then those whose second last use is
oldest. The times of evicted blocks are kept for a while (the paper's retained information), since
a cache that is small forgets a block before it is used twice.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.policies.stamps import Stamps
from tiered_kv.types import BlockKey

RETAINED = 4
"""Evicted blocks whose last use is remembered, for each resident one."""


class LRU2:
    """One request is one moment: all blocks of its run have the same time."""

    name: ClassVar[str] = "lru2"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._now = 0
        self._last: dict[BlockKey, int] = {}
        self._once: OrderedDict[BlockKey, None] = OrderedDict()
        self._twice = Stamps()  # by the last use but one
        self._gone: OrderedDict[BlockKey, int] = OrderedDict()

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        self._now += 1
        for key in reversed(new):
            former = self._gone.pop(key, None)
            if former is None:
                self._once[key] = None
            else:
                self._twice.put(key, former)
            self._last[key] = self._now

    def use(self, run: Sequence[BlockKey]) -> None:
        self._now += 1
        last, once, twice, now = self._last, self._once, self._twice, self._now
        for key in reversed(run):
            if key in once:
                del once[key]
            twice.put(key, last[key])
            last[key] = now

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self._once:
                del self._once[key]
            else:
                self._twice.take(key)
            self._gone[key] = self._last.pop(key)
        while len(self._gone) > RETAINED * self._capacity:
            self._gone.popitem(last=False)

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        self._capacity = max(1, len(self))
        order: Iterator[BlockKey] = chain(self._once, self._twice)
        return pick(order, n, evictable)

    def __len__(self) -> int:
        return len(self._last)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._last.keys() == set(resident), "the order and the residents differ"
        assert self._once.keys() | self._twice.of.keys() == self._last.keys(), "a block is lost"
        assert not self._once.keys() & self._twice.of.keys(), "a block is in both orders"
