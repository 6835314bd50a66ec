"""MIN: who is needed last leaves first (Belady, IBM Systems Journal 1966). Needs the future.

The bound that no policy passes, block by block. For the simulator, which knows the whole trace;
in a service, which does not, every block is needed never and this is an order of touches.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.policies.stamps import Stamps
from tiered_kv.types import BlockKey, Run

NEVER = 1 << 40


class Ahead(NamedTuple):
    """Where a block lies in its prefix, and the numbers of the requests that use it, ascending."""

    depth: int
    requests: "array[int]"


def future_of(runs: Iterable[Run]) -> dict[BlockKey, Ahead]:
    """When each block of a trace is used. Eight bytes an access and a few hundred a block."""
    future: dict[BlockKey, Ahead] = {}
    for number, run in enumerate(runs):
        for depth, key in enumerate(run):
            if key in future:
                future[key].requests.append(number)
            else:
                future[key] = Ahead(depth, array("q", (number,)))
    return future


class MIN:
    """Blocks by their next use, the farthest first; of those that the same request needs, the
    deepest."""

    name: ClassVar[str] = "min"

    def __init__(
        self, capacity_blocks: int, future: Mapping[BlockKey, Ahead] | None = None
    ) -> None:
        self._future = future or {}
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
        return pick(self._walk(), n, evictable)

    def __len__(self) -> int:
        return len(self._order.of)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._order.of.keys() == set(resident), "the order and the residents differ"

    def _walk(self) -> Iterator[BlockKey]:
        for stamp, bucket in self._order.buckets():
            if stamp != -NEVER:
                bucket.sort(key=lambda key: -self._future[key].depth)
            yield from bucket

    def _touch(self, run: Sequence[BlockKey]) -> None:
        future, done = self._future, self._done
        for key in reversed(run):
            uses = done[key] = done.get(key, 0) + 1
            when = future[key].requests if key in future else ()
            self._order.put(key, -(when[uses] if uses < len(when) else NEVER))
