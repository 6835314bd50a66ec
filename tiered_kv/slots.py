"""Who may use which bytes of a tier: equal slots, cut from slabs that layouts get on demand.

A slot is a byte offset. A slab belongs to one block size at a time and is cut into as many slots
as fit; what is left over at its end is charged to its slots (`cost`), so that a tier is full when
`used_cost == capacity_bytes`, whatever the block size. With `stripes` > 1 a slab spans that many
devices: slot `i` of a slab lies on device `i % stripes` (see `place`).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tiered_kv.errors import BadInput, BadLayout

MIN_SLAB_BYTES = 1 << 20
MAX_SLAB_BYTES = 1 << 30


def slab_bytes_for(capacity_bytes: int, stripes: int = 1) -> int:
    """A slab size for a capacity: a sixteenth of it, between 1 MiB and 1 GiB a stripe.

    Smaller slabs move between layouts more easily, larger ones waste less at their ends.
    """
    per_stripe = capacity_bytes // stripes // 16
    size = MIN_SLAB_BYTES
    while size * 2 <= min(per_stripe, MAX_SLAB_BYTES):
        size *= 2
    return size * stripes


class Place(NamedTuple):
    """Where a slot lies when its slab spans several devices."""

    stripe: int
    offset: int


class SlotPool:
    """Free and used slots of one tier. Pure bookkeeping; O(1) a slot."""

    def __init__(self, capacity_bytes: int, slab_bytes: int, stripes: int = 1) -> None:
        if stripes < 1 or slab_bytes < stripes or capacity_bytes < slab_bytes:
            raise BadInput(
                f"capacity {capacity_bytes}, slab {slab_bytes}, stripes {stripes}: "
                "a tier needs room for one slab, and a slab for one byte a stripe"
            )
        self.slab_bytes = slab_bytes
        self.stripes = stripes
        self.slabs = capacity_bytes // slab_bytes
        self.capacity_bytes = self.slabs * slab_bytes
        self._spare = list(range(self.slabs - 1, -1, -1))  # slabs that no size owns
        self._owned: dict[int, set[int]] = {}  # block size -> its slabs
        self._free: dict[int, list[int]] = {}  # block size -> its free slots, used as a stack
        self._used: dict[int, int] = {}  # block size -> slots in use
        self._recut: list[int] = []  # former slots of slabs that changed their size

    def per_slab(self, nbytes: int) -> int:
        """Slots of this size in a slab. Raises `BadLayout` when a block does not fit one."""
        fit = self.slab_bytes // self.stripes // nbytes * self.stripes if nbytes > 0 else 0
        if fit < 1:
            raise BadLayout(
                f"a block of {nbytes} bytes does not fit a slab of "
                f"{self.slab_bytes // self.stripes} bytes; raise slab_bytes"
            )
        return fit

    def cost(self, nbytes: int) -> float:
        """Bytes of capacity that one slot of this size takes, slab ends included."""
        return self.slab_bytes / self.per_slab(nbytes)

    def total(self, nbytes: int) -> int:
        """Slots of this size if nothing else were here."""
        return self.slabs * self.per_slab(nbytes)

    @property
    def used_cost(self) -> float:
        """Bytes of capacity in use."""
        return sum(n * self.cost(nbytes) for nbytes, n in self._used.items() if n)

    def used(self, nbytes: int) -> int:
        """Slots of this size in use."""
        return self._used.get(nbytes, 0)

    def sizes(self) -> list[int]:
        """Block sizes that own a slab or use a slot."""
        return [n for n, slabs in self._owned.items() if slabs]

    def room(self, nbytes: int) -> int:
        """How many slots `take` could give now. O(1)."""
        return len(self._free.get(nbytes, ())) + len(self._spare) * self.per_slab(nbytes)

    def take(self, nbytes: int, n: int) -> list[int] | None:
        """`n` slots, or None and nothing changed."""
        free = self._free.get(nbytes)
        if free is None:
            self.per_slab(nbytes)  # raises before anything is touched
            free = self._free[nbytes] = []
            self._used[nbytes] = 0
            self._owned[nbytes] = set()
        if self.room(nbytes) < n and not (self.reclaim(nbytes) and self.room(nbytes) >= n):
            return None
        while len(free) < n:
            self._grow(nbytes)
        if n == 0:
            return []
        slots = free[-n:]
        slots.reverse()  # ascending after a fresh slab: neighbours make larger copies
        del free[-n:]
        self._used[nbytes] += n
        return slots

    def give(self, nbytes: int, slots: Sequence[int]) -> None:
        """Take slots back."""
        self._free[nbytes].extend(slots)
        self._used[nbytes] -= len(slots)

    def adopt(self, nbytes: int, slots: Sequence[int]) -> list[bool]:
        """Mark slots of a former incarnation as used; False for those that cannot be (they
        overlap another size, lie outside or on no slot boundary, or are named twice)."""
        per_slab = self.per_slab(nbytes)
        taken: list[bool] = []
        free = set(self._free.setdefault(nbytes, []))
        self._used.setdefault(nbytes, 0)
        owned = self._owned.setdefault(nbytes, set())
        spare = set(self._spare)
        for slot in slots:
            slab, rest = divmod(slot, self.slab_bytes)
            if slab in spare and rest % nbytes == 0 and rest // nbytes < per_slab:
                spare.discard(slab)
                owned.add(slab)
                free.update(self._slots_of(slab, nbytes))
            taken.append(slot in free)
            free.discard(slot)
        self._spare = sorted(spare, reverse=True)
        self._free[nbytes] = sorted(free, reverse=True)
        self._used[nbytes] += sum(taken)
        return taken

    def place(self, slot: int, nbytes: int) -> Place:
        """Device and offset of a slot whose slab spans `stripes` devices."""
        slab, rest = divmod(slot, self.slab_bytes)
        row, stripe = divmod(rest // nbytes, self.stripes)
        return Place(stripe, slab * (self.slab_bytes // self.stripes) + row * nbytes)

    def check(self, used: Collection[int] = ()) -> None:
        """Raise `AssertionError` unless every slot is free once or used, in a slab of its size,
        and none of those that the caller says are in use is free."""
        slabs = list(self._spare)
        for nbytes, owned in self._owned.items():
            free = self._free[nbytes]
            assert len(set(free)) == len(free), f"a slot of {nbytes} bytes is free twice"
            assert all(s // self.slab_bytes in owned for s in free), "a free slot has no slab"
            assert not set(free).intersection(used), f"a used slot of {nbytes} bytes is free"
            assert len(free) + self._used[nbytes] == len(owned) * self.per_slab(nbytes), (
                f"{len(free)} free and {self._used[nbytes]} used slots of {nbytes} bytes "
                f"in {len(owned)} slabs"
            )
            slabs += owned
        assert sorted(slabs) == list(range(self.slabs)), "a slab has no owner or two"

    def reclaim(self, for_nbytes: int) -> bool:
        """Take wholly free slabs away from other sizes; whether there were any.

        O(free slots) where another size has a slab's worth of them, else O(sizes).
        """
        found = False
        for nbytes, owned in self._owned.items():
            if nbytes == for_nbytes or not owned or len(self._free[nbytes]) < self.per_slab(nbytes):
                continue
            empty = {slab for slab, n in self._used_in(nbytes).items() if n == 0}
            if empty:
                for slab in empty:
                    self._recut += self._slots_of(slab, nbytes)
                self._free[nbytes] = [
                    s for s in self._free[nbytes] if s // self.slab_bytes not in empty
                ]
                owned -= empty
                self._spare += sorted(empty, reverse=True)
                found = True
        return found

    def take_recut(self) -> list[int]:
        """Slots whose slab was taken for another block size since the last call: a reader of one
        must be told before new slots, which may begin elsewhere, are filled."""
        recut, self._recut = self._recut, []
        return recut

    def used_by_slab(self, not_nbytes: int) -> dict[int, int]:
        """Used slots of each slab that another size owns. O(free slots)."""
        return {
            slab: n
            for nbytes in self._owned
            if nbytes != not_nbytes
            for slab, n in self._used_in(nbytes).items()
        }

    def slabs_of(self, nbytes: int) -> frozenset[int]:
        """Slabs that this size owns, by number (`slot // slab_bytes`)."""
        return frozenset(self._owned.get(nbytes, ()))

    def _slots_of(self, slab: int, nbytes: int) -> list[int]:
        start = slab * self.slab_bytes
        return [start + i * nbytes for i in range(self.per_slab(nbytes) - 1, -1, -1)]

    def _grow(self, nbytes: int) -> None:
        slab = self._spare.pop()
        self._owned[nbytes].add(slab)
        # below the slots that are free already: these are handed out first
        self._free[nbytes][:0] = self._slots_of(slab, nbytes)

    def _used_in(self, nbytes: int) -> dict[int, int]:
        used = dict.fromkeys(self._owned[nbytes], self.per_slab(nbytes))
        for slot in self._free[nbytes]:
            used[slot // self.slab_bytes] -= 1
        return used
