"""Which blocks a lower tier takes, and when: what a drive wears by. Policies by name.

A block is written at most once while its lower copy lives (tiers are inclusive: a promotion leaves
the lower copy, so that demoting the block again is free). What is left to choose is whether a
block that was never written is worth a write, and whether to write it before it has to leave.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Protocol

from tiered_kv.errors import UnknownName
from tiered_kv.types import BlockKey


class AdmissionPolicy(Protocol):
    """Told of every request at the pool above; O(1) a block."""

    name: ClassVar[str]

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` is a hint: about how many blocks this tier can hold."""
        ...

    def used(self, run: Sequence[BlockKey]) -> None:
        """A request found these blocks."""
        ...

    def stored(self, new: Sequence[BlockKey]) -> None:
        """A request computed these blocks, in prefix order."""
        ...

    def owed(self) -> list[BlockKey]:
        """Blocks to write down now, ancestors first; each is named once."""
        ...

    def worth(self, key: BlockKey) -> bool:
        """Whether a block that has to leave is written; it is lost otherwise."""
        ...


class OnDemotion:
    """What has to leave the tier above is written, and nothing else. No state."""

    name: ClassVar[str] = "on_demotion"

    def __init__(self, capacity_blocks: int) -> None:
        pass

    def used(self, run: Sequence[BlockKey]) -> None:
        """See `AdmissionPolicy`."""

    def stored(self, new: Sequence[BlockKey]) -> None:
        """See `AdmissionPolicy`."""

    def owed(self) -> list[BlockKey]:
        """See `AdmissionPolicy`."""
        return []

    def worth(self, key: BlockKey) -> bool:
        """See `AdmissionPolicy`."""
        return True


class WriteBehind(OnDemotion):
    """New blocks are written soon after they were stored.

    A process that dies loses little, and making room above never waits for the drive. The price is
    a write for each block that would have died above. State: what was stored since the last `due`.
    """

    name: ClassVar[str] = "write_behind"

    def __init__(self, capacity_blocks: int) -> None:
        self._owed: list[BlockKey] = []

    def stored(self, new: Sequence[BlockKey]) -> None:
        """See `AdmissionPolicy`."""
        self._owed += new

    def owed(self) -> list[BlockKey]:
        """See `AdmissionPolicy`."""
        owed, self._owed = self._owed, []
        return owed


class SecondUse(OnDemotion):
    """Only blocks of which two requests are remembered are written.

    The fewest writes, and it costs hits: a session's last turn is lost when it has to leave. State:
    about 150 bytes for each of the last blocks seen, twice as many as the tier can hold.
    """

    name: ClassVar[str] = "second_use"
    LEAST: ClassVar[int] = 16_384  # the hint is too small where blocks are

    def __init__(self, capacity_blocks: int) -> None:
        self._limit = max(self.LEAST, 2 * capacity_blocks)
        self._seen: OrderedDict[BlockKey, bool] = OrderedDict()  # whether more than once

    def used(self, run: Sequence[BlockKey]) -> None:
        """See `AdmissionPolicy`."""
        seen = self._seen
        for key in reversed(run):  # heads are forgotten last
            again = key in seen
            seen[key] = again
            if again:
                seen.move_to_end(key)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def stored(self, new: Sequence[BlockKey]) -> None:
        """See `AdmissionPolicy`."""
        self.used(new)

    def worth(self, key: BlockKey) -> bool:
        """See `AdmissionPolicy`."""
        return self._seen.get(key, False)


ADMISSION: dict[str, type[AdmissionPolicy]] = {
    policy.name: policy for policy in (OnDemotion, WriteBehind, SecondUse)
}


def admission(name: str, capacity_blocks: int) -> AdmissionPolicy:
    """A fresh admission policy. Raises `UnknownName` with the list of known ones."""
    if name not in ADMISSION:
        raise UnknownName(f"admission policy {name!r} is not one of {', '.join(sorted(ADMISSION))}")
    return ADMISSION[name](capacity_blocks)
