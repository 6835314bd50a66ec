"""The hierarchy: lookup, reserve, commit, lease, release, due, done."""

import heapq
from collections.abc import Sequence

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.hierarchy.adopt import adopt
from tiered_kv.hierarchy.book import ABSENT, Book
from tiered_kv.hierarchy.flow import Flow, Wanted
from tiered_kv.hierarchy.landing import Flight
from tiered_kv.hierarchy.room import Room
from tiered_kv.hierarchy.state import Block, TierSpec
from tiered_kv.hierarchy.stores import Stores
from tiered_kv.policies.base import Expecting
from tiered_kv.types import (
    Answer,
    BlockKey,
    Fingerprint,
    Lease,
    Located,
    Medium,
    Move,
    Outcome,
    Refused,
    Reservation,
    Run,
    Usage,
    Why,
)


class Hierarchy:
    """All tiers of one process, fastest first; the top one is the pool that clients address.

    Every call takes the time it needs as `now` (seconds, any origin, never decreasing), returns
    at once and either does all it says or changes nothing. `below` says that a node below holds
    what leaves the last tier. Not thread-safe: one owner calls it.
    """

    def __init__(self, specs: Sequence[TierSpec], *, below: bool = False) -> None:
        self.book = Book(specs, below)
        self._room = Room(self.book)
        self._flow = Flow(self.book, self._room)
        self._stores = Stores(self.book, self._room)
        self._leases: dict[int, tuple[Lease, list[Block]]] = {}
        self._expiry: list[tuple[float, int]] = []
        self._ids = 0

    # -- asking ---------------------------------------------------------------------------

    def lookup(self, run: Run) -> list[Answer]:
        """What is held of a run, block by block; a hit is its leading non-absent part.

        Changes nothing, promises nothing: `lease` does. About 0.1 us a block.
        """
        get = self.book.blocks.get
        return [ABSENT if (block := get(key)) is None else block.answer for key in run]

    def usage(self) -> list[Usage]:
        """One row a tier, fastest first."""
        return [tier.usage() for tier in self.book.tiers]

    @property
    def pending(self) -> dict[str, int]:
        """Open reservations, leases and moves, for `status` and leak tests."""
        return {
            "reservations": len(self._stores),
            "leases": len(self._leases),
            "moves": self._flow.in_flight,
            "buried": len(self.book.buried),
        }

    def leaked_slots(self, medium: Medium) -> int:
        """Used slots of a tier that no block, reservation or move owns: always 0. O(blocks)."""
        tier = self.book.tier(medium)
        used = sum(tier.slots.used(nbytes) for nbytes in tier.slots.sizes())
        copies = len(tier.policy) + sum(1 for b in self.book.buried if b.mask & tier.bit)
        return used - copies - len(self.outstanding_slots(medium))

    def outstanding_slots(self, medium: Medium) -> list[int]:
        """Slots of a tier that reservations and incoming moves own. For `check`."""
        slots = self._flow.target_slots(medium)
        if medium is self.book.top.spec.medium:
            slots += self._stores.slots()
        return slots

    def in_flight(self) -> list[Flight]:
        """The moves that are under way. For `check`."""
        return self._flow.flights()

    def reserved_bytes(self) -> int:
        """Bytes that open reservations own. For `check`."""
        return self._stores.reserved_bytes()

    def guards(self) -> dict[Block, int]:
        """How many open reservations will attach children to a block. For `check`."""
        return self._stores.guards()

    def pins(self) -> dict[Block, int]:
        """How often each block is pinned by leases and moves. For `check`."""
        pins: dict[Block, int] = {}
        for _, blocks in self._leases.values():
            for block in blocks:
                pins[block] = pins.get(block, 0) + 1
        for block in self._flow.moving():
            pins[block] = pins.get(block, 0) + 1
        return pins

    # -- storing --------------------------------------------------------------------------

    def reserve(
        self, run: Run, layout: Fingerprint, nbytes: int, owner: str,
        parents: Sequence[BlockKey | None] | None = None, force: bool = False,
    ) -> Reservation | Refused:  # fmt: skip
        """Slots in the top tier for the blocks of a run that are nowhere here yet.

        `parents` gives each block's parent where `run` is a forest in prefix order instead of one
        run. `Refused(DEMOTING)` means that room is being made: carry out `due` and ask again, or
        `force`, which drops blocks. Raises `BadInput` and `BadLayout`.
        """
        if parents is not None and len(parents) != len(run):
            raise BadInput(f"{len(run)} keys came with {len(parents)} parents")
        return self._stores.reserve(run, layout, nbytes, owner, parents, force)

    def commit(
        self, reservation: int, checksums: Sequence[int] | None = None, count: int | None = None
    ) -> list[BlockKey]:
        """Make the first `count` (all) reserved blocks visible and give the other slots back.

        Blocks that somebody else committed meanwhile, and those whose parent has gone, are left
        out; the keys that are now held because of this call are returned. Raises `StaleHandle`
        for a reservation that has ended, `BadInput` for a wrong count; nothing changes then.
        """
        return self._stores.commit(reservation, checksums, count)

    def filling(self, reservation: int) -> tuple[int, ...]:
        """Slots of an open reservation. Raises `StaleHandle` for one that has ended."""
        return self._stores.filling(reservation)

    def reserving(self, keys: Run) -> bool:
        """Whether an open reservation will bring one of these blocks. O(reserved blocks)."""
        return self._stores.reserving(set(keys))

    def abort(self, reservation: int) -> None:
        """Give all slots back. Raises `StaleHandle` for a reservation that has ended."""
        self._stores.abort(reservation)

    def owners(self) -> set[str]:
        """Who has reservations, so that somebody can prove them dead."""
        return self._stores.owners()

    def owner_died(self, owner: str) -> int:
        """Abort all reservations of a process that is proven dead; how many."""
        return self._stores.owner_died(owner)

    # -- reading --------------------------------------------------------------------------

    def used(self, run: Run) -> None:
        """A request uses these blocks of one run: what the top tier holds of them is noted."""
        bit = self.book.top.bit
        keys = [block.key for block in self.book.live(run) if block.mask & bit]
        if keys:
            self.book.top.policy.use(keys)
            self.book.gate.used(keys)

    def lease(self, run: Run, ttl_s: float, now: float, *, again: bool = False) -> Lease:
        """Pin the leading blocks of a run that the top tier holds. May be empty.

        They stay where they are until released or until `ttl_s` seconds have passed. A lease is a
        use, unless it is for a request whose use was noted before (`again`).
        """
        if not ttl_s > 0:
            raise BadInput(f"ttl_s must be positive, not {ttl_s}")
        top = self.book.top
        bit, index = top.bit, top.index
        blocks: list[Block] = []
        for block in map(self.book.blocks.get, run):
            if block is None or not block.mask & bit:
                break
            block.pins += 1
            blocks.append(block)
        keys = tuple(run[: len(blocks)])
        if blocks and not again:
            top.policy.use(keys)
            self.book.gate.used(keys)
        self._ids += 1
        slots = tuple([block.slots[index] for block in blocks])
        nbytes = blocks[0].nbytes if blocks else 0
        lease = Lease(self._ids, keys, slots, nbytes, now + ttl_s)
        self._leases[lease.id] = lease, blocks
        heapq.heappush(self._expiry, (lease.expires_s, lease.id))
        return lease

    def hold(self, run: Run, ttl_s: float, now: float) -> int:
        """Pin the blocks of a run that are here or coming, in whatever tier; `release` ends it.

        For who waits for moves: what has come stays while the rest comes. Without that, a run
        longer than the pool's high mark leaves as fast as it arrives.
        """
        blocks = self.book.live(run)
        for block in blocks:
            block.pins += 1
        self._ids += 1
        self._leases[self._ids] = Lease(self._ids, (), (), 0, now + ttl_s), blocks
        heapq.heappush(self._expiry, (now + ttl_s, self._ids))
        return self._ids

    def release(self, lease: int) -> None:
        """End a lease. Raises `StaleHandle` for one that was released or has expired."""
        held = self._leases.pop(lease, None)
        if held is None:
            raise StaleHandle(f"lease {lease} was released or has expired")
        unpin = self.book.unpin
        for block in held[1]:
            if block.gone:
                unpin(block)
            else:
                block.pins -= 1

    def want(
        self, run: Run, layout: Fingerprint, nbytes: int, force: bool = False,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> Wanted:  # fmt: skip
        """Start bringing the leading held part of a run into the top tier (prefetch, wake).

        Raises `BadInput` for a key that is named twice.
        """
        if parents is None:
            parents = [None, *run[:-1]] if run else []
        if len(parents) != len(run):
            raise BadInput(f"{len(run)} keys came with {len(parents)} parents")
        if len(set(run)) != len(run):
            raise BadInput("a key is named twice in one run")
        return self._flow.restore(run, parents, nbytes, layout, force)

    def expect(self, run: Run, return_s: float) -> None:
        """Hint: a request of this run is over, and its session is expected back in `return_s`
        seconds (infinite: it has ended). Moves nothing; policies that can use it may let the
        blocks leave sooner or later. About a step a stretch of blocks of equal history.

        Raises `BadInput` for what is no such time.
        """
        if not return_s >= 0:
            raise BadInput(f"return_s must be 0 or more, not {return_s}")
        for tier in self.book.tiers:
            if isinstance(tier.policy, Expecting):
                tier.policy.expect(run, return_s)

    # -- moving ---------------------------------------------------------------------------

    def persist(self, run: Run) -> list[int]:
        """Copy the blocks of a run one tier down and keep them up; ids of the moves to await."""
        return self._flow.write_down(self.book.live(run))

    def due(self, now: float) -> list[Move]:
        """Let leases expire and say what should move now, most urgent first.

        The source of each move is pinned and its target reserved until `done` is called.
        """
        self._expire(now)
        if owed := self.book.gate.owed():
            self._flow.write_down(self.book.live(owed))
        for tier in self.book.tiers:
            if tier.online:
                self._flow.demote(tier)
        return self._flow.take_ready()

    def done(self, move: Move, outcomes: Sequence[Outcome]) -> None:
        """Take the outcome of each block of a move.

        A block whose copy failed stays where it was. A copy that proved corrupt is dropped, and
        with the last copy the block and all that descends from it.
        """
        self._flow.done(move, outcomes)

    # -- changing -------------------------------------------------------------------------

    def forget(self, keys: Run) -> list[BlockKey]:
        """Drop blocks that nothing descends from (the given ones tail first); which ones went.

        Invisible at once; slots that a lease or a move uses come back with their last pin.
        """
        gone: list[BlockKey] = []
        for block in reversed(self.book.live(keys)):
            if not (block.child or block.guards or block.gone):
                self.book.drop(block)
                gone.append(block.key)
        return gone

    def distrust(self, keys: Run) -> int:
        """Drop copies in the top tier whose bytes proved wrong; how many blocks went with them.

        A lower copy stays, and is compared when it comes up. Without one the block goes, and all
        that descends from it.
        """
        book, top, gone = self.book, self.book.top, 0
        for block in book.live(keys):
            if block.gone or not block.mask & top.bit:
                continue
            if block.mask == top.bit or block.pins:
                gone += book.drop(block)
            else:
                book.lose(block, top)
        book.count(f"dropped.{Why.CORRUPT}", gone)
        return gone

    def adopt(self, medium: Medium, found: Sequence[Located]) -> list[BlockKey]:
        """Take over what a former incarnation left in a tier; the keys that are held now.

        Blocks without their parent, and those whose slots make no sense here, are left out.
        """
        return adopt(self.book, self.book.tier(medium), found)

    def set_online(self, medium: Medium, online: bool) -> None:
        """Take a tier out (its copies are misses, nothing moves there) or back in."""
        if medium is Medium.HOST and self.book.below:
            self.book.below_online = online
            return
        tier = self.book.tier(medium)
        if tier is self.book.top:
            raise BadInput(f"the top tier {medium} cannot be taken out")
        if tier.online != online:
            tier.online = online
            self.book.refresh_answers()

    def _expire(self, now: float) -> None:
        expiry = self._expiry
        while expiry and expiry[0][0] <= now:
            _, lease = heapq.heappop(expiry)
            if lease in self._leases:
                self.release(lease)
                self.book.count("leases.expired")
        if len(expiry) > 64 + 4 * len(self._leases):
            # released leases leave their entries behind
            self._expiry = [(e, i) for e, i in expiry if i in self._leases]
            heapq.heapify(self._expiry)
