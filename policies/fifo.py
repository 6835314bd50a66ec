"""First in, first out: the baseline that ignores use.

Order of arrival is that of the prefix: unlike everywhere else here, a run's head leaves first.
"""

from collections.abc import Sequence
from typing import ClassVar

from tiered_kv.policies.lru import LRU
from tiered_kv.types import BlockKey


class FIFO(LRU):
    """Order of arrival. Being used changes nothing."""

    name: ClassVar[str] = "fifo"

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        for key in new:
            self._order[key] = None

    def use(self, run: Sequence[BlockKey]) -> None:
        return
