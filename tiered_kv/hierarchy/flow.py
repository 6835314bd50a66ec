"""Moves between tiers: which ones are wanted, and what their outcomes change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.errors import StaleHandle
from tiered_kv.hierarchy.book import Book
from tiered_kv.hierarchy.landing import Flight, Landing
from tiered_kv.hierarchy.room import Room
from tiered_kv.hierarchy.state import Block, TierState
from tiered_kv.types import (
    BlockKey,
    Fingerprint,
    Located,
    Medium,
    Move,
    MoveKind,
    Outcome,
    Why,
)

MOVE_BYTES = 64 << 20
"""Bytes of one move between our own tiers: enough for a drive's bandwidth, and little enough
that a restore need not wait long behind it."""
RESTORE_BYTES = 16 << 20
"""The first move upwards: whoever waits copies it on while the next ones come."""


@dataclass(slots=True)
class Wanted:
    """What has to happen until a run is in the top tier: await `moves`, then lease.

    `short` blocks found no room yet: ask again when some was made.
    """

    moves: list[int]
    short: int = 0
    why: Why | None = None


class Flow:
    """Creates moves and takes their results. Sources are pinned while a move is in flight."""

    def __init__(self, book: Book, room: Room) -> None:
        self._book = book
        self._room = room
        self._landing = Landing(book)
        self._flights: dict[int, Flight] = {}
        self._ready: list[Move] = []
        self._ids = 0

    @property
    def in_flight(self) -> int:
        """Moves handed out and not done."""
        return len(self._flights)

    def flights(self) -> list[Flight]:
        """All moves handed out and not done."""
        return list(self._flights.values())

    def target_slots(self, medium: Medium) -> list[int]:
        """Slots of a tier that moves are filling."""
        flights = self._flights.values()
        return [s for f in flights if f.move.target is medium for s in f.move.targets]

    def moving(self) -> list[Block]:
        """The blocks of all moves in flight."""
        return [block for flight in self._flights.values() for block in flight.blocks]

    def take_ready(self) -> list[Move]:
        """Moves created since the last call, most urgent first."""
        ready = sorted(self._ready, key=lambda move: move.kind)
        self._ready = []
        return ready

    def restore(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None],
        nbytes: int, layout: Fingerprint, force: bool,
    ) -> Wanted:  # fmt: skip
        """Bring what is below into the top tier; joins moves that are under way."""
        book, top = self._book, self._book.top
        wanted = Wanted([])
        here = [b for b in book.live(keys) if b.mask & top.bit]
        for held in here:
            held.pins += 1  # making room for the rest of a run must not cost its beginning
        sources: dict[int, list[Block]] = {}
        unseen: list[tuple[BlockKey, BlockKey | None]] = []
        for key, parent in zip(keys, parents, strict=True):
            block = book.blocks.get(key)
            if block is None:
                if not book.sinks:
                    break
                unseen.append((key, parent))
            elif not block.mask & top.bit:
                if block.move:
                    if block.move not in wanted.moves:
                        wanted.moves.append(block.move)
                    if block.answer is not book.coming:  # on its way further down
                        wanted.short += 1
                        wanted.why = Why.DEMOTING
                    continue
                source = next((t for t in book.tiers if block.mask & t.bit and t.online), None)
                if source is None:
                    break
                sources.setdefault(source.index, []).append(block)
        for index, blocks in sources.items():
            self._restore_from(book.tiers[index], blocks, wanted, force)
        if unseen:
            self._restore_below(unseen, nbytes, layout, wanted, force)
        for held in here:
            book.unpin(held)
        return wanted

    def _restore_from(
        self, source: TierState, blocks: list[Block], wanted: Wanted, force: bool
    ) -> None:
        for some in _batches(blocks, RESTORE_BYTES):
            slots = self._incoming(some[0].nbytes, len(some), wanted, force)
            if slots is not None:
                wanted.moves.append(
                    self._launch(MoveKind.RESTORE, source, self._book.top, some, slots)
                )

    def _restore_below(
        self, unseen: list[tuple[BlockKey, BlockKey | None]], nbytes: int,
        layout: Fingerprint, wanted: Wanted, force: bool,
    ) -> None:  # fmt: skip
        """One move for all of them, however many: each costs the node below one call."""
        slots = self._incoming(nbytes, len(unseen), wanted, force)
        if slots is not None:
            blocks = [self._book.add(key, parent, nbytes, layout) for key, parent in unseen]
            wanted.moves.append(self._launch(MoveKind.RESTORE, None, self._book.top, blocks, slots))

    def _incoming(self, nbytes: int, n: int, wanted: Wanted, force: bool) -> list[int] | None:
        top = self._book.top
        if wanted.short:  # not the end of a run without what comes before it
            wanted.short += n
            return None
        why = self._room.make(top, nbytes, n, store=False, force=force)
        slots = top.slots.take(nbytes, n) if why is None else None
        if slots is None:
            wanted.short += n
            wanted.why = why or Why.FULL
        return slots

    def write_down(self, blocks: Iterable[Block]) -> list[int]:
        """Copy blocks of the top tier down and keep them up; ids of all moves that do so."""
        top = self._book.top
        target = self._room.lower(top)
        if target is None and not self._book.sinks:
            return []
        lower = target.bit if target else 0
        moves: dict[int, None] = {}
        mine: list[Block] = []
        for block in blocks:
            if block.move:
                moves[block.move] = None
            elif block.mask & top.bit and not block.mask & lower:
                mine.append(block)
        ordered = self._with_ancestors(top, mine[::-1], lower)
        started, _ = self._descend_in_order(top, target, ordered, set())
        moves.update(dict.fromkeys(started))
        return list(moves)

    def demote(self, tier: TierState) -> None:
        """Bring a tier from above its high mark (or from a wish for room) down again."""
        excess = self._excess(tier)
        if excess < 1.0:
            return  # bytes; less is rounding
        target = self._room.lower(tier)
        if target is None and not self._book.sinks:
            self._room.trim(tier, excess)
            tier.wanted.clear()
            return
        leaving = self._leaving(tier, excess)
        tier.wanted.clear()
        lower = target.bit if target else 0
        clean = [b for b in leaving if b.mask & lower]
        dirty = [b for b in leaving if not b.mask & lower]
        self._room.release(clean, tier)
        if tier is self._book.top:
            worth = self._book.gate.worth
            self._room.shed(tier, [b for b in dirty if not worth(b.key)])
            dirty = [b for b in dirty if not b.gone]  # who has descendants goes down in spite of it
        ordered = self._with_ancestors(tier, dirty, lower)
        _, refused = self._descend_in_order(tier, target, ordered, set(dirty))
        self._room.shed(tier, [b for b in reversed(refused) if b in set(dirty)])

    def _excess(self, tier: TierState) -> float:
        """Bytes of capacity that should leave, beyond what is leaving already."""
        slots, spec = tier.slots, tier.spec
        staying = slots.used_cost - tier.leaving_cost
        excess = 0.0
        if staying > spec.high * slots.capacity_bytes:
            excess = staying - spec.low * slots.capacity_bytes
        for nbytes, n in tier.wanted.items():
            missing = n - slots.room(nbytes) - tier.leaving.get(nbytes, 0)
            excess = max(excess, missing * slots.cost(nbytes))
        return excess

    def _leaving(self, tier: TierState, excess: float) -> list[Block]:
        """Unpinned blocks, least wanted first, that make up for the excess: of the sizes that
        somebody waits for as far as there are any, then of all sizes."""
        blocks, slots = self._book.blocks, tier.slots
        found: dict[Block, None] = {}

        def go(key: BlockKey) -> bool:
            nonlocal excess
            block = blocks[key]
            if excess < 1.0 or block.pins or block in found or block.nbytes not in sizes:
                return False
            excess -= slots.cost(block.nbytes)
            found[block] = None
            return True

        every = set(slots.sizes())
        for nbytes, n in tier.wanted.items():
            sizes = {nbytes}
            tier.policy.victims(n - slots.room(nbytes) - tier.leaving.get(nbytes, 0), go)
        if every and excess >= 1.0:
            sizes = every
            tier.policy.victims(-int(-excess // min(map(slots.cost, every))), go)
        return list(found)

    def _with_ancestors(self, tier: TierState, dirty: list[Block], lower: int) -> list[Block]:
        """The blocks in prefix order, with every ancestor that the lower tier lacks.

        Tails leave first, and a tail without its head is worth nothing to the next incarnation:
        so heads are written along, and stay up as clean copies.
        """
        ordered: dict[Block, None] = {}
        for block in reversed(dirty):  # most wanted first, as policies are told of arrivals
            chain: list[Block] = []
            one: Block | None = block
            while one is not None and one not in ordered and not one.mask & lower:
                if one.mask & tier.bit and not one.move:
                    chain.append(one)
                one = one.parent
            ordered.update(dict.fromkeys(reversed(chain)))
        return list(ordered)

    def _together(self, blocks: list[Block], target: TierState | None) -> list[list[Block]]:
        """Batches of equal block size (and layout, for the node below), in order."""
        groups: dict[tuple[int, Fingerprint], list[Block]] = {}
        for block in blocks:
            groups.setdefault((block.nbytes, block.layout), []).append(block)
        if target is None:
            return list(groups.values())
        return [some for group in groups.values() for some in _batches(group, MOVE_BYTES)]

    def _descend_in_order(
        self, tier: TierState, target: TierState | None, ordered: list[Block], leaving: set[Block]
    ) -> tuple[list[int], list[Block]]:
        """Start moves for blocks in prefix order; their ids, and the blocks that found no room.

        What comes behind a batch without room stays too: no tail goes where its head could not.
        """
        moves: list[int] = []
        refused: list[Block] = []
        full: set[tuple[int, Fingerprint]] = set()
        for some in self._together(ordered, target):
            group = some[0].nbytes, some[0].layout
            ids = [] if group in full else self._descend(tier, target, some, leaving & set(some))
            moves += ids
            if not ids:
                full.add(group)
                refused += some
        return moves, refused

    def _descend(
        self, tier: TierState, target: TierState | None, blocks: list[Block], leaving: set[Block]
    ) -> list[int]:
        blocks = [b for b in blocks if not b.gone]  # making room for others may have cost it
        if not blocks:
            return []
        nbytes = blocks[0].nbytes
        slots: list[int] | None = []
        if target is not None:
            parents = [b.parent for b in blocks if b.parent is not None]
            for parent in parents:
                parent.pins += 1  # room for a tail must not cost the head below it
            roomy = self._room.bottom(target, nbytes, len(blocks))
            for parent in parents:
                self._book.unpin(parent)
            slots = target.slots.take(nbytes, len(blocks)) if roomy else None
        if slots is None:
            return []
        leaving &= set(blocks)
        tier.leaving[nbytes] = tier.leaving.get(nbytes, 0) + len(leaving)
        kind = MoveKind.DEMOTE if leaving else MoveKind.STORE
        return [self._launch(kind, tier, target, blocks, slots, leaving)]

    def _launch(
        self, kind: MoveKind, source: TierState | None, target: TierState | None,
        blocks: list[Block], slots: list[int], leaving: set[Block] | None = None,
    ) -> int:  # fmt: skip
        self._ids += 1
        nbytes = blocks[0].nbytes
        move = Move(
            id=self._ids,
            kind=kind,
            source=source.spec.medium if source else Medium.HOST,
            target=target.spec.medium if target else Medium.HOST,
            blocks=tuple(
                Located(b.key, b.parent_key, b.slots[source.index] if source else -1,
                        nbytes, b.layout, b.checksum)
                for b in blocks
            ),
            targets=tuple(slots),
            nbytes=nbytes,
        )  # fmt: skip
        for block in blocks:
            block.pins += 1
            block.move = move.id
            if target is self._book.top:
                block.answer = self._book.coming
        if target is not None:
            target.reserved += nbytes * len(slots)
        self._flights[move.id] = Flight(move, blocks, leaving or set())
        self._ready.append(move)
        return move.id

    def done(self, move: Move, outcomes: Sequence[Outcome]) -> None:
        """Take the outcome of each block of a move."""
        flight = self._flights.get(move.id)
        if flight is None or len(outcomes) != len(flight.blocks):
            raise StaleHandle(f"move {move.id} is not in flight with {len(outcomes)} blocks")
        del self._flights[move.id]
        self._landing.land(flight, outcomes)


def _batches(blocks: list[Block], first_bytes: int) -> list[list[Block]]:
    """Cut into moves of equal block size, the first of about `first_bytes`, each twice as long as
    the one before it up to `MOVE_BYTES`."""
    out: list[list[Block]] = []
    room = 0
    for block in blocks:
        if room < block.nbytes or out[-1][0].nbytes != block.nbytes:
            out.append([])
            room = max(first_bytes, block.nbytes)
            first_bytes = min(2 * first_bytes, MOVE_BYTES)
        out[-1].append(block)
        room -= block.nbytes
    return out
