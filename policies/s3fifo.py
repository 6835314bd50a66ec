"""S3-FIFO: a small queue that sifts, a main queue, a ghost queue (Yang et al., SOSP'23).

New blocks enter the small queue, a tenth of the room; those that were used there twice go on to the
main queue, the others leave and are remembered. Who returns while remembered enters the main queue
at once. The main queue gives blocks that were used another round, up to three times.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.types import BlockKey

SMALL = 0.1
"""Share of the room for the small queue (section 4.1 of the paper)."""
PROMOTED = 2
"""Uses in the small queue that lead on to the main queue."""
MOST_USES = 3
"""Two bits a block."""


class S3FIFO:
    """Three queues, oldest first, in the order of arrival: a run from its head on."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = max(1, capacity_blocks)
        self._small: OrderedDict[BlockKey, int] = OrderedDict()  # block -> uses since
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        self._gone: OrderedDict[BlockKey, None] = OrderedDict()
        self._chosen: set[BlockKey] = set()
        self._passed: dict[BlockKey, None] = {}  # got another round in the last answer

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in new:
            if key in self._gone:
                del self._gone[key]
                self._main[key] = 0
            else:
                self._small[key] = 0

    def use(self, run: Sequence[BlockKey]) -> None:
        for key in run:
            queue = self._small if key in self._small else self._main
            queue[key] = min(MOST_USES, queue[key] + 1)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        if keys and keys[0] in self._chosen:
            self._pass_by()
        for key in keys:
            if key in self._small:
                del self._small[key]
                self._gone[key] = None
            else:
                del self._main[key]
        while len(self._gone) > (1 - SMALL) * self._capacity:
            self._gone.popitem(last=False)

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        self._capacity = max(1, len(self))
        self._passed = {}
        found = pick(self._walk(), n, evictable)
        self._chosen = set(found)
        return found

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._small.keys() | self._main.keys() == set(resident), "residents differ"
        assert not self._small.keys() & self._main.keys(), "a block is in both queues"

    def _walk(self) -> Iterator[BlockKey]:
        """What the queues would let go of, in turn. Who gets another round is noted, and moved
        when somebody really leaves."""
        small, main = iter(self._small.items()), iter(self._main.items())
        limit = SMALL * self._capacity
        in_small, in_main = len(self._small), len(self._main)
        again: deque[tuple[BlockKey, int]] = deque()  # behind all others in the main queue
        while in_small or in_main or again:
            if in_small and (in_small > limit or not (in_main or again)):
                key, uses = next(small)
                in_small -= 1
                if uses < PROMOTED:
                    yield key
                    continue
                again.append((key, 0))
            else:
                key, uses = next(main) if in_main else again.popleft()
                in_main -= in_main > 0
                if not uses:
                    yield key
                    continue
                again.append((key, uses - 1))
            self._passed[key] = None

    def _pass_by(self) -> None:
        for key in self._passed:
            uses = self._small.pop(key, None)
            if uses is None:
                uses = self._main.pop(key, None)
                if uses is not None:
                    self._main[key] = max(0, uses - 1)
            else:
                self._main[key] = 0
        self._passed = {}
