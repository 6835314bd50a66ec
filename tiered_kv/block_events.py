"""Which blocks came and left, for routers that want to know: a ring of the last ones. Pure."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from tiered_kv.hierarchy.book import Book
from tiered_kv.types import BlockKey, Medium
from tiered_kv.wire import BlockEvent, Events

CAPACITY = 65_536
"""Events that are kept; who asks less often starts over. 200 bytes each."""


class BlockEvents:
    """Watches a ledger (`book.Watch`) from now on. Numbers grow by one an event."""

    def __init__(self, book: Book, first: int, capacity: int = CAPACITY) -> None:
        """`first` must be above every number that a former life of the node gave away."""
        self._book = book
        self._ring: deque[BlockEvent] = deque(maxlen=capacity)
        self._next = first
        self._online = self._told()
        book.watch = self

    def stored(self, keys: Iterable[BlockKey], medium: Medium) -> None:
        """See `book.Watch`."""
        self._tell(keys, medium, stored=True)

    def removed(self, keys: Iterable[BlockKey], medium: Medium) -> None:
        """See `book.Watch`."""
        self._tell(keys, medium, stored=False)

    def restart(self) -> None:
        """See `book.Watch`: every reader starts over."""
        self._online = self._told()
        self._ring.clear()
        self._next += 1

    def since(self, number: int) -> Events:
        """Events from this number on, or all that is held, when they are not known any more.
        O(events), O(copies) when it starts over."""
        first = self._next - len(self._ring)
        if first <= number <= self._next:
            return Events(number, self._next, tuple(islice(self._ring, number - first, None)))
        if number > self._next:  # of another clock: its reader, too, must see that it starts over
            self._next = number
            self.restart()
        return Events(self._next, self._next, tuple(islice(self._held(), self._ring.maxlen)))

    def _tell(self, keys: Iterable[BlockKey], medium: Medium, stored: bool) -> None:
        if medium in self._online:
            for key in keys:
                self._ring.append(BlockEvent(self._next, key, medium, stored))
                self._next += 1

    def _told(self) -> frozenset[Medium]:
        """Tiers whose copies count: those of an offline one are misses, and readers start over
        when it is back."""
        return frozenset(tier.spec.medium for tier in self._book.tiers if tier.online)

    def _held(self) -> Iterable[BlockEvent]:
        tiers = [tier for tier in self._book.tiers if tier.spec.medium in self._online]
        for key, block in self._book.blocks.items():
            for tier in tiers:
                if block.mask & tier.bit:
                    yield BlockEvent(self._next, key, tier.spec.medium, True)
