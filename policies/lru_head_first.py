"""LRU that touches a run from its head on: the common mistake, kept to show its price.

The head of a run becomes its oldest block and leaves first, and all behind it are dead weight.
"""

from collections.abc import Sequence
from typing import ClassVar

from tiered_kv.policies.lru import LRU
from tiered_kv.types import BlockKey


class HeadFirstLRU(LRU):
    """Textbook LRU that takes the blocks of a request for independent accesses."""

    name: ClassVar[str] = "lru_head_first"

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in new:
            self._order[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        touch = self._order.move_to_end
        for key in run:
            touch(key)
