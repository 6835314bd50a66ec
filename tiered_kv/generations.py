"""Which filling of a slot a reader saw: one shared counter for every 4096 bytes of a pool.

A seqlock. Odd: the slot is being filled or belongs to nobody. Even: its bytes are those of one
committed block. 0: never used. Only the owner of the pool writes the table; every process that
maps it may read. The case it exists for, with an owner N and a reader R in two processes:

1. R gets a lease: slot 8 MiB, generation 6.
2. R copies half of the block, and is stopped (SIGSTOP, swap, a debugger) past its lease.
3. N sees the lease lapse, evicts the block, reserves the slot for another one: generation 7. A
   writer fills it; N commits: generation 8.
4. R continues and copies the other half. It has half of each block.
5. R compares: `unchanged([8 MiB], (6,))` is False. R throws the copy away: a miss.

The comparison comes after the copy and reads memory again. A reader that compared before the
copy would prove nothing.

Order. The owner's odd word must be visible before the new bytes, the new bytes before the even
word, and the reader's loads of the bytes must happen before its load of the word. x86 keeps loads
in order with loads and stores with stores, and the copies in between (glibc's non-temporal ones
end with sfence) are separated from the words by lock-prefixed instructions of the interpreter and
by a message between the processes. ARM reorders both, so every call here runs between two full
barriers there (`pages.fence`). A copy engine (CUDA, RDMA, NVMe) must have completed before
`publish` or `unchanged` is called: completion orders its bytes.

Slots of different sizes. A word belongs to the first page of a slot. When a slab is cut anew, a
reader of an 8 MiB slot would not notice that 2 MiB slots inside it are filled: `retire` the old
slots before their slab goes to another block size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.pages import fence
from tiered_kv.types import ALIGNMENT

Words = NDArray[np.uint64]
_ODD = np.uint64(1)


class Generations:
    """The table of one pool. Every call is O(slots), vectorised, and takes no lock: calls that
    write are for the owner's thread of decisions alone. Slots are unique within a call."""

    def __init__(self, words: Words) -> None:
        """`words[i]` is the generation of the slot at byte `i * 4096`."""
        self._words = words

    def open(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Make slots unreadable, for a filler: each gets its next odd generation."""
        at = self._index(slots)
        fence()
        opened = (self._words[at] + _ODD) | _ODD
        self._words[at] = opened
        fence()
        return tuple(opened.tolist())

    def publish(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Make filled slots readable: each gets its next even generation.

        Raises `StaleHandle`, with nothing changed, when one of them is not being filled.
        """
        at = self._index(slots)
        fence()
        found = self._words[at]
        if not (found & _ODD).all():
            which = int(np.flatnonzero(found & _ODD == 0)[0])
            raise StaleHandle(
                f"slot {slots[which]} is not being filled: its generation is {found[which]}"
            )
        published = found + _ODD
        self._words[at] = published
        fence()
        return tuple(published.tolist())

    def retire(self, slots: Sequence[int]) -> None:
        """Tell the readers of slots that are given up; `open` may follow at any time."""
        self.open(slots)

    def read(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The generations now."""
        at = self._index(slots)
        fence()
        return tuple(self._words[at].tolist())

    def unchanged(self, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether every slot still has the generation of a lease or reservation.

        True proves that no byte of a copy which ended before this call is another block's.
        """
        if len(slots) != len(generations):
            raise BadInput(f"{len(slots)} slots, but {len(generations)} generations")
        return self.read(slots) == tuple(generations)

    def _index(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Table indices. Raises `BadInput`: numpy would take a negative one from the end."""
        offsets = np.asarray(slots, dtype=np.int64)
        if offsets.size == 0:
            return offsets
        end = len(self._words) * ALIGNMENT
        if offsets.min() < 0 or offsets.max() >= end or (offsets % ALIGNMENT).any():
            bad = next(s for s in slots if not 0 <= s < end or s % ALIGNMENT)
            raise BadInput(f"slot {bad} is not a multiple of {ALIGNMENT} in 0..{end - 1}")
        return offsets // ALIGNMENT
