"""Two-phase stores: reserve slots, let somebody fill them, commit or abort."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.hierarchy.book import ABSENT, Book
from tiered_kv.hierarchy.room import Room
from tiered_kv.hierarchy.state import Block
from tiered_kv.types import BlockKey, Fingerprint, Refused, Reservation, Run, Why


@dataclass(slots=True)
class _Open:
    reservation: Reservation
    layout: Fingerprint
    parents: list[BlockKey | None]  # of each reserved key
    before: list[BlockKey]  # blocks of the run that were held already
    anchors: list[Block]  # held parents: they stay until the children come


class Stores:
    """Open reservations. They end by commit, abort or the death of their owner, not by time."""

    def __init__(self, book: Book, room: Room) -> None:
        self._book = book
        self._room = room
        self._open: dict[int, _Open] = {}
        self._ids = 0

    def __len__(self) -> int:
        return len(self._open)

    def slots(self) -> list[int]:
        """All slots that are being filled."""
        return [slot for opened in self._open.values() for slot in opened.reservation.slots]

    def reserved_bytes(self) -> int:
        """Bytes that are being filled."""
        return sum(o.reservation.nbytes * len(o.reservation.slots) for o in self._open.values())

    def reserving(self, keys: set[BlockKey]) -> bool:
        """See `Hierarchy.reserving`."""
        return any(not keys.isdisjoint(o.reservation.keys) for o in self._open.values())

    def guards(self) -> dict[Block, int]:
        """How many open reservations guard a block."""
        guards: dict[Block, int] = {}
        for opened in self._open.values():
            for block in opened.anchors:
                guards[block] = guards.get(block, 0) + 1
        return guards

    def reserve(
        self, run: Run, layout: Fingerprint, nbytes: int, owner: str,
        parents: Sequence[BlockKey | None] | None, force: bool,
    ) -> Reservation | Refused:  # fmt: skip
        """See `Hierarchy.reserve`."""
        book = self._book
        found = list(map(book.blocks.get, run))
        if book.outage:  # what only an offline tier holds is missed, so it is stored again
            found = [None if b is None or b.answer is ABSENT else b for b in found]
        first = found.index(None) if None in found else len(found)
        before: list[BlockKey] = list(run[:first])
        anchors: list[Block] = []
        keys, above = list(run[first:]), [None, *run[:-1]][first:] if parents is None else []
        if parents is not None or any(found[first:]):
            keys, above, before, anchors = self._forest(run, parents, found)
        elif first and keys:
            anchor = found[first - 1]
            assert anchor is not None
            anchors = [anchor]
        for anchor in anchors:  # first, lest room for the children is made at their cost
            anchor.guards += 1
        slots: list[int] = []
        if keys:
            why = self._room.make(book.top, nbytes, len(keys), store=True, force=force)
            taken = book.top.slots.take(nbytes, len(keys)) if why is None else None
            if taken is None:
                for anchor in anchors:
                    anchor.guards -= 1
                book.count(f"refused.{why or Why.FULL}")
                return Refused(why or Why.FULL, self._numbers(nbytes, len(keys)))
            slots = taken
        self._ids += 1
        reservation = Reservation(
            self._ids, tuple(keys), tuple(slots), nbytes, len(run) - len(keys), owner
        )
        self._open[reservation.id] = _Open(reservation, layout, above, before, anchors)
        book.top.reserved += nbytes * len(slots)
        return reservation

    def _forest(
        self, run: Run, parents: Sequence[BlockKey | None] | None, found: list[Block | None]
    ) -> tuple[list[BlockKey], list[BlockKey | None], list[BlockKey], list[Block]]:
        """Missing keys, their parents, the held keys, and the held parents of missing ones."""
        if parents is None:
            parents = [None, *run[:-1]]
        keys: list[BlockKey] = []
        above: list[BlockKey | None] = []
        before: list[BlockKey] = []
        anchors: dict[Block, None] = {}
        for key, parent, block in zip(run, parents, found, strict=True):
            if block is not None:
                before.append(key)
                continue
            keys.append(key)
            above.append(parent)
            anchor = self._book.blocks.get(parent) if parent is not None else None
            if anchor is not None:
                anchors[anchor] = None
        if len(set(keys)) != len(keys):
            raise BadInput("a key is named twice in one reservation")
        return keys, above, before, list(anchors)

    def commit(
        self, reservation: int, checksums: Sequence[int] | None, count: int | None
    ) -> list[BlockKey]:
        """See `Hierarchy.commit`."""
        keys = self._get(reservation).reservation.keys
        n = len(keys) if count is None else count
        if not 0 <= n <= len(keys):
            raise BadInput(f"count {count} is not in 0..{len(keys)}")
        if checksums is not None and len(checksums) != n:
            raise BadInput(f"{n} blocks came with {len(checksums)} checksums")
        opened = self._close(reservation)
        book, top = self._book, self._book.top
        blocks, bit, nbytes = book.blocks, top.bit, opened.reservation.nbytes
        if not blocks and n:
            book.fit(nbytes)
        index, answer, blank = top.index, book.answers[bit], book.blank
        slots, parents = opened.reservation.slots, opened.parents
        new: list[BlockKey] = []
        spare = list(slots[n:])
        last: Block | None = None
        for i in range(n):
            key, parent = keys[i], parents[i]
            if last is None or last.key is not parent:
                last = blocks.get(parent) if parent is not None else None
            orphan = last is None and parent is not None and not book.below
            if orphan or key in blocks:
                if not orphan and self._revive(blocks[key], slots[i]):
                    last = blocks[key]
                    last.checksum = checksums[i] if checksums is not None else None
                    new.append(key)
                    continue
                book.count(f"dropped.{Why.ORPHANED}" if orphan else "stores.twice")
                spare.append(slots[i])
                continue
            block = Block(key, parent, nbytes, opened.layout, blank[:], answer)
            blocks[key] = block
            if last is not None:
                block.attach(last)
            block.slots[index] = slots[i]
            block.mask = bit
            if checksums is not None:
                block.checksum = checksums[i]
            new.append(key)
            last = block
        if spare:
            top.slots.give(nbytes, spare)
        top.policy.admit(new, opened.before)
        book.gate.stored(new)
        if book.watch is not None:
            book.watch.stored(new, top.spec.medium)
        book.count("stores", len(new))
        return new

    def _revive(self, block: Block, slot: int) -> bool:
        """Hold the new copy of a block instead of the ones that only offline tiers have.

        Instead, not beside: two computations of a block may differ in their last bits, and a
        block has one checksum.
        """
        book = self._book
        if block.answer is not ABSENT or block.pins:
            return False
        for tier in book.tiers:
            if block.mask & tier.bit:
                book.lose(block, tier)
        book.hold(block, book.top, slot)
        return True

    def filling(self, reservation: int) -> tuple[int, ...]:
        """See `Hierarchy.filling`."""
        return self._get(reservation).reservation.slots

    def abort(self, reservation: int) -> None:
        """See `Hierarchy.abort`."""
        opened = self._close(reservation)
        if opened.reservation.slots:
            self._book.top.slots.give(opened.reservation.nbytes, opened.reservation.slots)
        self._book.count("stores.aborted", len(opened.reservation.slots))

    def owners(self) -> set[str]:
        """Who has open reservations."""
        return {opened.reservation.owner for opened in self._open.values()}

    def owner_died(self, owner: str) -> int:
        """Abort what a dead process had reserved; how many reservations."""
        mine = [i for i, opened in self._open.items() if opened.reservation.owner == owner]
        for reservation in mine:
            self.abort(reservation)
        self._book.count(f"reservations.{Why.OWNER_DIED}", len(mine))
        return len(mine)

    def _get(self, reservation: int) -> _Open:
        opened = self._open.get(reservation)
        if opened is None:
            raise StaleHandle(f"reservation {reservation} was committed, aborted or never made")
        return opened

    def _close(self, reservation: int) -> _Open:
        opened = self._get(reservation)
        del self._open[reservation]
        for anchor in opened.anchors:
            anchor.guards -= 1
        held = opened.reservation
        self._book.top.reserved -= held.nbytes * len(held.slots)
        return opened

    def _numbers(self, nbytes: int, n: int) -> str:
        top = self._book.top
        return (
            f"{n} blocks of {nbytes} bytes; {top.spec.medium} has {top.slots.room(nbytes)} "
            f"of {top.slots.total(nbytes)} slots free"
        )
