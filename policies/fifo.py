"""First in, first out: the baseline that ignores use.

A run is inserted tail first like everywhere here, so that its end leaves before its beginning.
"""

from collections.abc import Sequence
from typing import ClassVar

from tiered_kv.policies.lru import LRU
from tiered_kv.types import BlockKey


class FIFO(LRU):
    """Order of arrival. Being used changes nothing."""

    name: ClassVar[str] = "fifo"

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in reversed(new):
            self._order[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        return
