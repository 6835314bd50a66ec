"""What an eviction policy is: an order over the blocks of one tier.

A policy is pure. It has no clock, does no I/O and removes nothing by itself: the hierarchy tells
it what arrived, was used and left, and asks who should leave next. Which of its candidates *can*
leave (leases, moves, prefix closure) is not its business; it is asked through `evictable`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from tiered_kv.types import BlockKey

Evictable = Callable[[BlockKey], bool]


class EvictionPolicy(Protocol):
    """The verbs of every policy. All costs are a block's: O(1), a few hundred ns."""

    name: ClassVar[str]

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` is a hint: about how many blocks the tier can hold."""
        ...

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        """`new` became resident, in prefix order. `before` are the blocks of the same run in
        front of them, used by the same request; some of them may not be here."""
        ...

    def use(self, run: Sequence[BlockKey]) -> None:
        """A request used these resident blocks, in prefix order."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """These blocks left. All of them are here."""
        ...

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        """Up to `n` blocks for which `evictable` said yes, least wanted first.

        Asks about each candidate once, in the order in which it would let them go, and stops at
        `n`. Changes nothing: `remove` follows for those that really leave.
        """
        ...

    def __len__(self) -> int: ...

    def check(self, resident: Collection[BlockKey]) -> None:
        """Raise `AssertionError` unless exactly the resident blocks are ordered here."""
        ...


@runtime_checkable
class Expecting(Protocol):
    """An optional ability: a policy that can use what is expected of a session. A hint may be
    wrong, so a policy must find out what hints are worth."""

    def expect(self, run: Sequence[BlockKey], return_s: float) -> None:
        """A request of this run is over, and its session is expected back in `return_s` seconds;
        infinite when it has ended. Some of the blocks may not be here. A step a stretch of blocks
        of equal history, not one a block."""
        ...


def pick(order: Iterable[BlockKey], n: int, evictable: Evictable) -> list[BlockKey]:
    """The first `n` of the order that can leave; asks no further."""
    found: list[BlockKey] = []
    if n > 0:
        for key in order:
            if evictable(key):
                found.append(key)
                if len(found) == n:
                    break
    return found
