"""Beyond the node: whole sessions in other hosts' memory and in an object store.

As in the service, nothing here is a tier of the hierarchy: cold sessions are written out while
their blocks still lie on the node, so that these can be dropped later; a session that is wanted
again is read straight into HBM. The coldest leave a full shelf for the next one.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from tiered_kv.sessions import Session
from tiered_kv.sim.machine import Machine
from tiered_kv.sim.profiles import StorePart
from tiered_kv.types import Medium, SessionId

ARCHIVE_PRIORITY = 3
"""Behind the classes of `MoveKind`."""
AHEAD = 0.75
"""Sessions that only the node holds may fill this share of its lowest tier; the coldest others
are written out, before they are dropped."""
CONCURRENT = 4
EVERY_S = 1.0


class Shelf:
    """One place beyond the node. Oldest use first."""

    def __init__(self, name: str, part: StorePart) -> None:
        self.name = name
        self.capacity_bytes = part.high * part.bytes
        self.used_bytes = 0
        self.blocks: OrderedDict[SessionId, int] = OrderedDict()


class Archive:
    """The shelves of a machine and who lies on them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.shelves = [Shelf(n, machine.setup.part(n)) for n in machine.setup.shelves]
        self._only_here: OrderedDict[SessionId, int] = OrderedDict()  # blocks that no shelf has
        self._only_blocks = 0
        self._busy: set[SessionId] = set()
        self._tails: set[SessionId] = set()  # whose last block on a shelf is incomplete
        if self.shelves:
            lowest = machine.hierarchy.book.tiers[-1].spec
            self._limit = AHEAD * lowest.low * lowest.capacity_bytes / machine.block_bytes
            machine.clock.every(EVERY_S, self._tidy)

    def used(self, sid: SessionId, blocks: int) -> None:
        """A session of so many blocks was used just now: an incomplete last one that lies on a
        shelf is worth nothing any more."""
        if not self.shelves:
            return
        self._forget_debt(sid)
        if sid in self._tails:
            self._tails.discard(sid)
            for shelf in self.shelves:
                if sid in shelf.blocks:
                    shelf.blocks[sid] -= 1
                    shelf.used_bytes -= self._machine.block_bytes
        missing = blocks - self.held(sid)
        if missing > 0:
            self._only_here[sid] = missing
            self._only_blocks += missing
        for shelf in self.shelves:
            if sid in shelf.blocks:
                shelf.blocks.move_to_end(sid)

    def held(self, sid: SessionId) -> int:
        """Leading blocks of a session that some shelf has."""
        return max((shelf.blocks.get(sid, 0) for shelf in self.shelves), default=0)

    def where(self, sid: SessionId) -> str | None:
        """The fastest shelf that has a session."""
        return next((s.name for s in self.shelves if sid in s.blocks), None)

    def close(self, sid: SessionId) -> None:
        """A session has ended."""
        self._forget_debt(sid)
        self._tails.discard(sid)
        for shelf in self.shelves:
            shelf.used_bytes -= shelf.blocks.pop(sid, 0) * self._machine.block_bytes

    def used_bytes(self) -> Iterator[tuple[str, int]]:
        """Bytes on each shelf."""
        for shelf in self.shelves:
            yield shelf.name, shelf.used_bytes

    def _forget_debt(self, sid: SessionId) -> None:
        self._only_blocks -= self._only_here.pop(sid, 0)

    def _tidy(self) -> None:
        excess = self._only_blocks - self._limit
        lost = []
        for sid, blocks in self._only_here.items():
            if excess <= 0 or len(self._busy) >= CONCURRENT:
                break
            session = self._machine.table.find(sid)
            if sid in self._busy:
                continue
            if session is None or not self._machine.holds(session.run):
                lost.append(sid)
                continue
            excess -= blocks
            self._busy.add(sid)
            self._write(session, blocks)
        for sid in lost:
            self._forget_debt(sid)

    def _write(self, session: Session, blocks: int) -> None:
        machine, sid = self._machine, session.id
        media = Counter(machine.where(session.run))
        below = [medium for medium in media if medium is not Medium.HBM]
        source = max(below, key=lambda medium: media[medium], default=Medium.HBM)
        name = self.shelves[0].name
        if source is Medium.HBM:
            lane, legs = machine.path(name, False)
        else:
            lane, legs = machine.beside(name, source)

        def written() -> None:
            self._busy.discard(sid)
            now = machine.table.find(sid)
            if now is None:
                return
            same = now.run == session.run
            self._put(0, sid, len(session.run) - (session.tail and not same))
            if same:
                self._forget_debt(sid)
                self._tails |= {sid} if session.tail else set()
            else:
                self.used(sid, len(now.run))

        nbytes = blocks * machine.block_bytes
        machine.traffic.submit(lane, legs, nbytes, ARCHIVE_PRIORITY, written)

    def _put(self, index: int, sid: SessionId, blocks: int) -> None:
        shelf, size = self.shelves[index], self._machine.block_bytes
        shelf.used_bytes += (blocks - shelf.blocks.get(sid, 0)) * size
        shelf.blocks[sid] = blocks
        shelf.blocks.move_to_end(sid)
        while shelf.used_bytes > shelf.capacity_bytes and shelf.blocks:
            cold, n = shelf.blocks.popitem(last=False)
            shelf.used_bytes -= n * size
            if index + 1 < len(self.shelves):  # to the next shelf, past the node
                lane, legs = self._machine.beside(self.shelves[index + 1].name, shelf.name)
                self._machine.traffic.submit(lane, legs, n * size, ARCHIVE_PRIORITY, lambda: None)
                self._put(index + 1, cold, n)
