"""MIN: who is needed last leaves first (Belady, IBM Systems Journal 1966). Needs the future.

The bound that no policy passes, block by block. For the simulator, which knows the whole trace;
in a service, which does not, every block is needed never and this is an order of touches.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.policies.stamps import Stamps
from tiered_kv.types import BlockKey, Run

NEVER = 1 << 40

Future = Mapping[BlockKey, "array[int]"]
"""The numbers of the requests that use a block, ascending."""


def future_of(runs: Iterable[Run]) -> dict[BlockKey, "array[int]"]:
    """When each block of a trace is used. Eight bytes an access and a few hundred a block."""
    future: dict[BlockKey, array[int]] = {}
    for number, run in enumerate(runs):
        for key in run:
            if key in future:
                future[key].append(number)
            else:
                future[key] = array("q", (number,))
    return future


class MIN:
    """Blocks by their next use, the farthest first, among equals the one touched longest ago:
    of those that the same request needs, the deepest."""

    name: ClassVar[str] = "min"

    def __init__(self, capacity_blocks: int, future: Future | None = None) -> None:
        self._future: Future = future or {}
        self._done: dict[BlockKey, int] = {}  # how many uses of a block are over
        self._order = Stamps()  # by minus the number of the next request

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        self._touch(new)

    def use(self, run: Sequence[BlockKey]) -> None:
        self._touch(run)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._order.take(key)

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        return pick(self._order, n, evictable)

    def __len__(self) -> int:
        return len(self._order.of)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._order.of.keys() == set(resident), "the order and the residents differ"

    def _touch(self, run: Sequence[BlockKey]) -> None:
        future, done = self._future, self._done
        for key in reversed(run):
            uses = done[key] = done.get(key, 0) + 1
            when = future.get(key, ())
            self._order.put(key, -(when[uses] if uses < len(when) else NEVER))
