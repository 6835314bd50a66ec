"""SIEVE: a queue, a hand, a mark for what was used (Zhang et al., NSDI'24).

The hand walks from the oldest block towards the newest, takes marks away and stops at the first
block without one, which leaves. Nothing ever moves, so new blocks are sifted quickly.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.types import BlockKey


class Sieve:
    """Two queues: before the hand, where marks were taken, and behind it."""

    name: ClassVar[str] = "sieve"

    def __init__(self, capacity_blocks: int) -> None:
        self._ahead: OrderedDict[BlockKey, None] = OrderedDict()  # the hand is at its beginning
        self._passed: OrderedDict[BlockKey, None] = OrderedDict()
        self._marked: set[BlockKey] = set()
        self._chosen: set[BlockKey] = set()  # the last answer of `victims`

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in reversed(new):
            self._ahead[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        self._marked.update(run)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self._chosen:
                self._advance(key)
            side = self._ahead if key in self._ahead else self._passed
            del side[key]
            self._marked.discard(key)

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        found = pick(self._walk(), n, evictable)
        self._chosen = set(found)
        return found

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._ahead.keys() | self._passed.keys() == set(resident), "residents differ"
        assert not self._ahead.keys() & self._passed.keys(), "a block is on both sides"
        assert self._marked <= set(resident), "a mark has no block"

    def _walk(self) -> Iterator[BlockKey]:
        """A lap of the hand, then a second one in which no mark is left."""
        lap = (self._ahead, self._passed)
        for side in lap:
            yield from (key for key in side if key not in self._marked)
        for side in lap:
            yield from (key for key in side if key in self._marked)

    def _advance(self, to: BlockKey) -> None:
        """The hand goes to a block that leaves: marks on its way are taken, blocks stay. Those
        without a mark that could not leave (somebody reads them) are passed by too."""
        if to in self._passed:  # the hand begins anew with the oldest
            self._marked.difference_update(self._ahead)
            self._passed.update(self._ahead)
            self._ahead, self._passed = self._passed, OrderedDict()
        while (key := next(iter(self._ahead))) != to:
            del self._ahead[key]
            self._passed[key] = None
            self._marked.discard(key)
