"""ARC: recency and frequency share the room as their ghosts ask (Megiddo and Modha, FAST'03).

T1 holds blocks used once lately, T2 those used more often; B1 and B2 remember what left them. A
miss that B1 remembers moves the target for T1 up, one that B2 remembers moves it down. The paper
evicts one block for each it brings in; a tier makes room for a whole run before it is stored, so
the target moves after that, by the run.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.types import BlockKey

Order = OrderedDict[BlockKey, None]


class ARC:
    """Four lists, oldest first, each run tail first."""

    name: ClassVar[str] = "arc"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = max(1, capacity_blocks)
        self._target = 0.0  # of T1, in blocks
        self._once: Order = OrderedDict()
        self._often: Order = OrderedDict()
        self._once_gone: Order = OrderedDict()
        self._often_gone: Order = OrderedDict()

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        once_gone, often_gone, capacity = self._once_gone, self._often_gone, self._capacity
        for key in reversed(new):
            if key in once_gone:
                step = max(1.0, len(often_gone) / len(once_gone))
                self._target = min(float(capacity), self._target + step)
                del once_gone[key]
                self._often[key] = None
            elif key in often_gone:
                step = max(1.0, len(once_gone) / len(often_gone))
                self._target = max(0.0, self._target - step)
                del often_gone[key]
                self._often[key] = None
            else:
                self._once[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        once, often = self._once, self._often
        for key in reversed(run):
            if key in once:
                del once[key]
                often[key] = None
            else:
                often.move_to_end(key)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self._once:
                del self._once[key]
                self._once_gone[key] = None
            else:
                del self._often[key]
                self._often_gone[key] = None
        self._trim()

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        self._capacity = max(1, len(self))
        return pick(self._by_target(), n, evictable)

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._once.keys() | self._often.keys() == set(resident), "residents differ"
        assert not self._once.keys() & self._often.keys(), "a block is in both lists"

    def _by_target(self) -> Iterator[BlockKey]:
        once, often = iter(self._once), iter(self._often)
        left, rest = len(self._once), len(self._often)
        while left or rest:
            if left and (left > self._target or not rest):
                left -= 1
                yield next(once)
            else:
                rest -= 1
                yield next(often)

    def _trim(self) -> None:
        """L1 = T1 + B1 holds at most the capacity, all four lists together twice of it."""
        capacity = self._capacity
        while self._once_gone and len(self._once) + len(self._once_gone) > capacity:
            self._once_gone.popitem(last=False)
        over = len(self) + len(self._once_gone) + len(self._often_gone) - 2 * capacity
        for _ in range(min(over, len(self._often_gone))):
            self._often_gone.popitem(last=False)
