"""Random histories against an oracle that models the bytes.

The oracle owns the memory of every tier, byte by byte. Owners of reservations and moves under way
scribble over their slots after every step, so a slot with two owners shows as a wrong byte. Each
computation of a block has a number of its own, which is also its checksum.
"""

import os
import sys
from collections import Counter
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.hierarchy import Hierarchy, TierSpec, check, flow
from tiered_kv.hierarchy.book import ABSENT
from tiered_kv.types import (
    BlockKey,
    Coming,
    Done,
    Failed,
    Fingerprint,
    Held,
    Lease,
    Located,
    Medium,
    Move,
    MoveKind,
    Outcome,
    Refused,
    Reservation,
    Why,
)

EXAMPLES = int(os.environ.get("KV_TEST_EXAMPLES", "50"))
STEPS = 50
SLAB = 12
SIZES = (4, 5)  # three a slab, and two with a rest
LAYOUTS = (Fingerprint(b"layout of size 4"), Fingerprint(b"layout of size 5"))
OWNERS = ("ada", "bob", "cyd")
FAILURES = (Why.CORRUPT, Why.IO_ERROR, Why.DEADLINE, Why.ABSENT, Why.OFFLINE, Why.UNREACHABLE)

paths = st.lists(st.integers(0, 1), min_size=1, max_size=6)
"""A run is a path from a root of a binary prefix tree: random ones fork and share prefixes."""


class Tag(NamedTuple):
    """What a byte holds: one computation of one block, or somebody's scribble."""

    key: BlockKey | str
    number: int


def keys_of(layout: int, path: list[int]) -> list[BlockKey]:
    return [BlockKey(bytes([layout, *path[: i + 1]])) for i in range(len(path))]


def parent_of(key: BlockKey) -> BlockKey | None:
    return BlockKey(key[:-1]) if len(key) > 2 else None


def descends(key: BlockKey, ancestor: BlockKey) -> bool:
    return key.startswith(ancestor)


class Memory:
    """The bytes of all tiers."""

    def __init__(self) -> None:
        self.bytes: dict[Medium, dict[int, Tag]] = {medium: {} for medium in Medium}

    def write(self, medium: Medium, slot: int, nbytes: int, tag: Tag) -> None:
        self.bytes[medium].update(dict.fromkeys(range(slot, slot + nbytes), tag))

    def read(self, medium: Medium, slot: int, nbytes: int) -> Tag:
        found = {self.bytes[medium].get(at) for at in range(slot, slot + nbytes)}
        assert len(found) == 1, f"torn block at {medium} {slot}: {found}"
        (tag,) = found
        return tag or Tag("never written", 0)


class HierarchyMachine(RuleBasedStateMachine):
    """Subclasses say which tiers and how many layouts there are."""

    tiers: ClassVar[dict[Medium, int]]
    layouts = 1
    below = False

    @initialize(
        marks=st.sampled_from([(1.0, 1.0), (0.9, 0.6), (0.5, 0.25)]),
        floor=st.sampled_from([0.0, 0.2]),
        policy=st.sampled_from(["lru", "lru", "fifo"]),
    )
    def start(self, marks: tuple[float, float], floor: float, policy: str) -> None:
        self.specs = [
            TierSpec(medium, slabs * SLAB, SLAB, high=marks[0], low=marks[1], policy=policy,
                     restore_floor=floor if medium is self.top else 0.0)
            for medium, slabs in self.tiers.items()
        ]  # fmt: skip
        self.now = 0.0
        self.number = 0
        self.memory = Memory()
        self.host: dict[BlockKey, Tag] = {}
        self.rows: list[Located] = []  # everything that was ever written to the last tier
        self.suspect = False  # rows of a former incarnation may name bytes of another block
        self.tame = True  # nothing failed, was offline or was forced so far
        self.boot()

    @property
    def top(self) -> Medium:
        return next(iter(self.tiers))

    def boot(self) -> None:
        self.h = Hierarchy(self.specs, below=self.below)
        self.leases: dict[int, tuple[Lease, list[Tag]]] = {}
        self.open: dict[int, tuple[Reservation, list[BlockKey | None]]] = {}
        self.moves: dict[int, Move] = {}
        self.ended = {"lease": 10**6, "reservation": 10**6}
        self.known: set[BlockKey] = set()
        self.counts: Counter[str] = Counter()
        self.excuse: set[BlockKey] = set()  # may vanish in this step
        self.evicting = False  # blocks may vanish in this step if they are counted

    # -- helpers --------------------------------------------------------------------------

    def fresh(self) -> int:
        self.number += 1
        return self.number

    def held(self) -> set[BlockKey]:
        return {key for key, block in self.h.book.blocks.items() if block.mask}

    def picture(self) -> object:
        """All that must not change when something is refused."""
        book = self.h.book
        return (
            {key: (block.mask, tuple(block.slots)) for key, block in book.blocks.items()},
            self.h.pending,
            [(usage.used_bytes, usage.reserved_bytes) for usage in self.h.usage()],
            self.h.pins(),
            self.h.guards(),
        )

    def absent(self, keys: list[BlockKey]) -> list[BlockKey]:
        return [k for k, a in zip(keys, self.h.lookup(keys), strict=True) if a is ABSENT]

    def some_run(self, data: st.DataObject) -> list[BlockKey]:
        """Any path, or the one to a block that was held after the last step."""
        if self.known and data.draw(st.integers(0, 3)):
            key = data.draw(st.sampled_from(sorted(self.known)))
            return keys_of(key[0], list(key[1:]))
        return keys_of(data.draw(st.integers(0, self.layouts - 1)), data.draw(paths))

    # -- rules: storing -------------------------------------------------------------------

    @rule(
        data=st.data(), path=paths, other=paths, forest=st.booleans(),
        force=st.booleans(), owner=st.sampled_from(OWNERS),
    )  # fmt: skip
    def reserve(self, data, path, other, forest, force, owner) -> None:
        layout = data.draw(st.integers(0, self.layouts - 1))
        run = keys_of(layout, path)
        if forest:
            run = list(dict.fromkeys(run + keys_of(layout, other)))
        parents = [parent_of(key) for key in run]
        missing = self.absent(run)
        before, top, nbytes = self.picture(), self.h.book.top, SIZES[layout]
        room, copies = top.slots.room(nbytes), len(top.policy)
        self.evicting = True
        self.tame &= not force
        answer = self.h.reserve(
            run, LAYOUTS[layout], nbytes, owner, parents if forest else None, force
        )
        if isinstance(answer, Refused):
            assert self.picture() == before
            assert missing
            assert answer.why in (Why.FULL, Why.DEMOTING, Why.TOO_LARGE)
            assert answer.why is not Why.DEMOTING or not force
            too_large = len(missing) > top.slots.total(nbytes) - top.floor(nbytes)
            assert (answer.why is Why.TOO_LARGE) == too_large
            return
        assert list(answer.keys) == missing
        assert answer.held == len(run) - len(missing)
        assert answer.owner == owner
        if missing and len(self.specs) == self.layouts == 1:
            need = len(missing) + top.floor(nbytes) - room
            assert copies - len(top.policy) == max(0, need)
        assert not missing or top.slots.room(nbytes) >= top.floor(nbytes)
        self.open[answer.id] = answer, [parent_of(key) for key in answer.keys]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.sampled_from([1.0, 1.0, 0.5, 0.0]), sums=st.booleans())
    def commit(self, data, share, sums) -> None:
        self.commit_number(data.draw(st.sampled_from(sorted(self.open))), share, sums)

    def commit_number(self, number: int, share: float, sums: bool) -> None:
        reservation, parents = self.open.pop(number)
        n = round(len(reservation.keys) * share)
        tags = [Tag(key, self.fresh()) for key in reservation.keys[:n]]
        for slot, tag in zip(reservation.slots, tags, strict=False):
            self.memory.write(self.top, slot, reservation.nbytes, tag)
        on_file, expected = set(self.h.book.blocks), []
        missing = set(self.absent(list(reservation.keys)))
        for key, parent in zip(reservation.keys[:n], parents, strict=False):
            if key in missing and (parent is None or parent in on_file or self.below):
                expected.append(key)
                on_file.add(key)
        sealed = [tag.number for tag in tags] if sums else None
        assert self.h.commit(number, sealed, n if share < 1 else None) == expected
        self.ended["reservation"] = number
        assert all(isinstance(answer, Held) for answer in self.h.lookup(expected))

    @rule(data=st.data(), path=paths)
    def store(self, data, path) -> None:
        """What most clients do: reserve, and commit soon; with force if nothing else helps."""
        before = set(self.open)
        for force in (False, True):
            self.reserve(data, path, path, False, force, "ada")
            self.nothing_vanished_uncounted()
            for number in set(self.open) - before:
                self.commit_number(number, 1.0, True)
                return

    @precondition(lambda self: self.open)
    @rule(data=st.data(), dies=st.booleans())
    def abort(self, data, dies) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        if dies:
            self.owner_died(self.open[number][0].owner)
            return
        del self.open[number]
        self.h.abort(number)
        self.ended["reservation"] = number

    def owner_died(self, owner: str) -> None:
        mine = [i for i, (reservation, _) in self.open.items() if reservation.owner == owner]
        assert self.h.owners() == {reservation.owner for reservation, _ in self.open.values()}
        assert self.h.owner_died(owner) == len(mine)
        for number in mine:
            del self.open[number]

    def stale_handles_are_refused(self) -> None:
        before = self.picture()
        with pytest.raises(StaleHandle):
            self.h.release(self.ended["lease"])
        with pytest.raises(StaleHandle):
            self.h.commit(self.ended["reservation"])
        with pytest.raises(StaleHandle):
            self.h.abort(self.ended["reservation"])
        for number, (reservation, _) in self.open.items():
            with pytest.raises(BadInput):
                self.h.commit(number, count=len(reservation.keys) + 1)
            with pytest.raises(BadInput):
                self.h.commit(number, [0] * (len(reservation.keys) + 1))
        assert self.picture() == before

    # -- rules: reading -------------------------------------------------------------------

    @rule(data=st.data(), ttl=st.sampled_from([1.0, 5.0, 50.0]))
    def lease(self, data, ttl) -> None:
        run = self.some_run(data)
        leading = 0
        for answer in self.h.lookup(run):
            if not (isinstance(answer, Held) and self.top in answer.tiers):
                break
            leading += 1
        lease = self.h.lease(run, ttl, self.now)
        assert list(lease.keys) == run[:leading]
        assert lease.expires_s == self.now + ttl
        tags = [self.memory.read(self.top, slot, lease.nbytes) for slot in lease.slots]
        assert [tag.key for tag in tags] == run[:leading]
        self.leases[lease.id] = lease, tags

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[number]
        self.h.release(number)
        self.ended["lease"] = number

    @rule(data=st.data(), force=st.booleans())
    def want(self, data, force) -> None:
        run = self.some_run(data)
        layout = run[0][0]
        pinned = {key for lease, _ in self.leases.values() for key in lease.keys}
        self.evicting = True
        self.tame &= not force
        wanted = self.h.want(run, LAYOUTS[layout], SIZES[layout], force)
        assert not pinned & set(self.absent(sorted(pinned & self.known)))
        under_way = {flight.move.id: flight.move for flight in self.h.in_flight()}
        coming = {b.key for i in wanted.moves for b in under_way[i].blocks}
        if not wanted.short and not self.below:
            for key, answer in zip(run, self.h.lookup(run), strict=True):
                if answer is ABSENT:
                    break
                top = isinstance(answer, Held) and self.top in answer.tiers
                assert top or key in coming

    # -- rules: moving --------------------------------------------------------------------

    @rule(data=st.data())
    def persist(self, data) -> None:
        run = self.some_run(data)
        self.evicting = True
        ids = self.h.persist(run)
        assert len(set(ids)) == len(ids)
        assert set(ids) <= {flight.move.id for flight in self.h.in_flight()}

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 2.0, 10.0, 100.0]))
    def due(self, seconds) -> None:
        self.now += seconds
        self.evicting = True
        for number, (lease, _) in list(self.leases.items()):
            if lease.expires_s <= self.now:
                del self.leases[number]
                self.ended["lease"] = number
        moves = self.h.due(self.now)
        assert [move.kind for move in moves] == sorted(move.kind for move in moves)
        for move in moves:
            assert move.id not in self.moves
            self.moves[move.id] = move
        assert set(self.moves) == {flight.move.id for flight in self.h.in_flight()}
        if len(self.specs) == 1 and not self.below:
            self.top_is_below_its_high_mark_or_stuck()

    def top_is_below_its_high_mark_or_stuck(self) -> None:
        top = self.h.book.top
        if top.slots.used_cost > top.spec.high * top.slots.capacity_bytes + 1:
            for block in self.h.book.blocks.values():
                assert block.pins or block.guards or block.child

    @precondition(lambda self: len(self.specs) > 1 or self.below)
    @rule(data=st.data())
    def persist_and_settle(self, data) -> None:
        """What happens on most days: all moves are made and succeed."""
        self.persist(data)
        self.nothing_vanished_uncounted()
        self.due(0.0)
        self.nothing_vanished_uncounted()
        for number in sorted(self.moves):
            move = self.moves.pop(number)
            self.finish(move, [None] * len(move.blocks))

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), share=st.sampled_from([0, 0, 0, 1, 3]), sums=st.booleans())
    def done(self, data, share, sums) -> None:
        """`share` of four blocks fail."""
        number = data.draw(st.sampled_from(sorted(self.moves)))
        fail = [data.draw(st.integers(0, 3)) < share for _ in self.moves[number].blocks]
        self.finish(
            self.moves.pop(number),
            [data.draw(st.sampled_from(FAILURES)) if bad else None for bad in fail],
            sums,
        )

    def finish(self, move: Move, whys: list[Why | None], sums: bool = True) -> None:
        outcomes: list[Outcome] = []
        for block, target, why in zip(
            move.blocks, move.targets or [-1] * len(move.blocks), whys, strict=True
        ):
            tag = self.content(move, block)
            if why is None and tag is None:
                why = Why.ABSENT if move.source is Medium.HOST else Why.CORRUPT
            if why is not None:
                outcomes.append(Failed(why))
                self.tame = False
                self.excuse |= {key for key in self.known if descends(key, block.key)}
                continue
            outcomes.append(Done(tag.number if sums else None))
            if move.target is Medium.HOST:
                self.host[block.key] = tag
                if move.kind is MoveKind.DEMOTE:
                    self.excuse.add(block.key)
            else:
                self.memory.write(move.target, target, move.nbytes, tag)
                self.rows.append(
                    block._replace(slot=target, checksum=tag.number)
                    if move.target is not self.top
                    else block._replace(checksum=None)
                )
        self.h.done(move, outcomes)
        with pytest.raises(StaleHandle):
            self.h.done(move, outcomes)

    def content(self, move: Move, block: Located) -> Tag | None:
        """What a careful mover reads at the source; None if it is not there or damaged."""
        if move.source is Medium.HOST:
            return self.host.get(block.key)
        if move.source is self.top:
            return self.memory.read(move.source, block.slot, move.nbytes)
        try:
            tag = self.memory.read(move.source, block.slot, move.nbytes)
        except AssertionError:
            tag = None
        if tag is None or tag.key != block.key or block.checksum not in (None, tag.number):
            assert self.suspect, f"{block} reads {tag}"
            return None
        return tag

    # -- rules: changing ------------------------------------------------------------------

    @rule(data=st.data(), last=st.integers(1, 6))
    def forget(self, data, last) -> None:
        run = self.some_run(data)[-last:]
        gone = self.h.forget(run)
        assert set(gone) <= set(run)
        self.excuse |= set(gone)
        assert self.absent(gone) == gone
        for key in set(run) - set(gone):
            block = self.h.book.blocks.get(key)
            assert block is None or block.child or block.guards

    @precondition(lambda self: len(self.specs) > 1 or self.below)
    @rule(data=st.data(), online=st.booleans())
    def set_online(self, data, online) -> None:
        media = [spec.medium for spec in self.specs[1:]] + [Medium.HOST] * self.below
        self.h.set_online(data.draw(st.sampled_from(media)), online)
        self.tame &= online
        with pytest.raises(BadInput):
            self.h.set_online(self.top, online)

    @precondition(lambda self: len(self.specs) > 1)
    @rule(data=st.data(), damage=st.sampled_from(["none", "none", "rows", "old"]))
    def kill_and_restart(self, data, damage) -> None:
        last = self.specs[-1].medium
        bit = self.h.book.tier(last).bit
        lasting = {k for k, b in self.h.book.blocks.items() if b.mask & bit}
        slots = {k: self.h.book.blocks[k].slots[-1] for k in lasting}
        rows = [row for row in self.rows if row.checksum is not None]
        if damage != "old":
            latest = {row.key: row for row in rows}
            rows = [row for k, row in latest.items() if k in lasting and row.slot == slots[k]]
        if damage == "rows" and rows:
            for _ in range(data.draw(st.integers(1, 4))):
                i = data.draw(st.integers(0, len(rows) - 1))
                wrong = data.draw(st.sampled_from([-4, 1, 4, 7, 12, 10**6, rows[0].slot]))
                rows.append(rows[i]._replace(slot=wrong))
                del rows[i]
        self.suspect |= damage != "none"
        honest = {row.key for row in rows}
        whole = {k for k in honest if all(k[:i] in honest for i in range(2, len(k)))}
        for medium in self.tiers:
            if medium is not last:
                self.memory.bytes[medium].clear()
        self.rows = list(rows)
        self.boot()
        kept = self.h.adopt(last, rows)
        assert set(kept) <= whole
        if damage == "none":
            assert set(kept) == whole
            assert {k: self.h.book.blocks[k].slots[-1] for k in kept} == {k: slots[k] for k in kept}
        assert set(kept) == self.held()
        self.known = self.held()

    # -- invariants -----------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "h"):
            return
        check(self.h)
        self.scribble()
        self.every_copy_has_its_bytes()
        self.every_promise_is_kept()
        self.answers_are_true()
        self.nothing_vanished_uncounted()
        self.usage_adds_up()
        self.last_tier_is_self_contained()

    def scribble(self) -> None:
        """Whoever is filling slots may write at any time."""
        for number, (reservation, _) in self.open.items():
            for slot in reservation.slots:
                self.memory.write(self.top, slot, reservation.nbytes, Tag("filling", number))
        for flight in self.h.in_flight():
            move = flight.move
            for slot in move.targets:
                self.memory.write(move.target, slot, move.nbytes, Tag("moving", move.id))

    def every_copy_has_its_bytes(self) -> None:
        for key, block in self.h.book.blocks.items():
            for tier in self.h.book.tiers:
                if block.mask & tier.bit and not (self.suspect and tier is not self.h.book.top):
                    tag = self.memory.read(tier.spec.medium, block.slots[tier.index], block.nbytes)
                    assert tag.key == key
                    assert block.checksum in (None, tag.number)

    def every_promise_is_kept(self) -> None:
        for lease, tags in self.leases.values():
            self.h.book.top.slots.check(lease.slots)
            for slot, tag in zip(lease.slots, tags, strict=True):
                assert self.memory.read(self.top, slot, lease.nbytes) == tag
        for move in (flight.move for flight in self.h.in_flight()):
            if move.source is Medium.HOST:
                continue
            self.h.book.tier(move.source).slots.check([block.slot for block in move.blocks])
            for block in move.blocks:
                if not self.suspect:
                    tag = self.memory.read(move.source, block.slot, move.nbytes)
                    assert tag.key == block.key
        assert self.h.pending["leases"] == len(self.leases)
        assert self.h.pending["reservations"] == len(self.open)

    def answers_are_true(self) -> None:
        online = {usage.medium for usage in self.h.usage() if usage.online}
        keys = sorted(self.h.book.blocks)
        for key, answer in zip(keys, self.h.lookup(keys), strict=True):
            block = self.h.book.blocks[key]
            match answer:
                case Held(tiers):
                    assert tiers
                    assert set(tiers) <= online
                    assert all(block.mask & self.h.book.tier(medium).bit for medium in tiers)
                case Coming(tier):
                    assert tier is self.top
                    assert block.move
                case _:
                    assert not any(
                        block.mask & tier.bit and tier.online for tier in self.h.book.tiers
                    )

    def nothing_vanished_uncounted(self) -> None:
        held = self.held()
        vanished = self.known - held - self.excuse
        if not self.below:
            assert not vanished & {block.key for block in self.h.guards()}
        counts = self.h.book.counts
        if self.evicting:
            assert len(vanished) == counts["dropped.pressure"] - self.counts["dropped.pressure"]
        else:
            assert not vanished
        self.known, self.counts = held, Counter(counts)
        self.excuse, self.evicting = set(), False

    def usage_adds_up(self) -> None:
        for tier, usage in zip(self.h.book.tiers, self.h.usage(), strict=True):
            slots = tier.slots
            assert usage.used_bytes <= usage.capacity_bytes
            assert usage.used_bytes == round(sum(slots.used(n) * slots.cost(n) for n in SIZES))
            assert usage.blocks == sum(bool(b.mask & tier.bit) for b in self.h.book.blocks.values())

    def last_tier_is_self_contained(self) -> None:
        """A restart would find every block's parent, unless a failure came between."""
        if len(self.specs) != 2 or self.layouts > 1 or not self.tame or self.h.pending["moves"]:
            return
        bit = self.h.book.tiers[-1].bit
        for block in self.h.book.blocks.values():
            if block.mask & bit and block.parent is not None:
                assert block.parent.mask & bit

    # -- the end --------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "h") or sys.exc_info()[0] is not None:
            return  # a failed step has said what is wrong
        self.stale_handles_are_refused()
        self.all_that_is_open_ends()
        check(self.h)
        self.nothing_is_pending_or_leaked()
        self.whatever_fits_can_be_reserved()
        self.all_can_be_forgotten()

    def all_that_is_open_ends(self) -> None:
        for move in self.h.due(self.now):
            self.moves[move.id] = move
        for number in list(self.leases):
            self.h.release(number)
        for number in list(self.open):
            self.h.abort(number)
        for move in self.moves.values():
            self.finish(move, [None] * len(move.blocks))
        self.leases, self.open, self.moves = {}, {}, {}

    def nothing_is_pending_or_leaked(self) -> None:
        assert not any(self.h.pending.values()), self.h.pending
        for tier in self.h.book.tiers:
            copies = sum(bool(b.mask & tier.bit) for b in self.h.book.blocks.values())
            assert sum(map(tier.slots.used, SIZES)) == copies
            assert tier.reserved == 0

    def whatever_fits_can_be_reserved(self) -> None:
        """A full, stuck or offline lower tier never stops progress."""
        top = self.h.book.top
        for layout, nbytes in enumerate(SIZES[: self.layouts]):
            n = top.slots.total(nbytes) - top.floor(nbytes)
            run = [BlockKey(b"new" + bytes([layout, i])) for i in range(n)]
            answer = self.h.reserve(run, LAYOUTS[layout], nbytes, "ada", force=True)
            assert isinstance(answer, Reservation)
            check(self.h)
            self.h.abort(answer.id)

    def all_can_be_forgotten(self) -> None:
        while self.h.book.blocks:
            assert self.h.forget(list(self.h.book.blocks))
        assert all(tier.slots.used_cost == 0 for tier in self.h.book.tiers)


class OneTier(HierarchyMachine):
    tiers: ClassVar = {Medium.DRAM: 2}


class OneTierTwoLayouts(OneTier):
    tiers: ClassVar = {Medium.DRAM: 4}
    layouts = 2


class TwoTiers(HierarchyMachine):
    tiers: ClassVar = {Medium.DRAM: 2, Medium.NVME: 4}


class TwoTiersTwoLayouts(TwoTiers):
    tiers: ClassVar = {Medium.DRAM: 3, Medium.NVME: 5}
    layouts = 2


class SmallLowerTier(HierarchyMachine):
    tiers: ClassVar = {Medium.DRAM: 3, Medium.NVME: 1}


class ThreeTiers(HierarchyMachine):
    tiers: ClassVar = {Medium.HBM: 1, Medium.DRAM: 2, Medium.NVME: 3}


class Gpu(HierarchyMachine):
    tiers: ClassVar = {Medium.HBM: 2}
    below = True


class GpuTwoLayouts(Gpu):
    tiers: ClassVar = {Medium.HBM: 3}
    layouts = 2


@pytest.mark.parametrize(
    "machine",
    [OneTier, OneTierTwoLayouts, TwoTiers, TwoTiersTwoLayouts, SmallLowerTier, ThreeTiers, Gpu,
     GpuTwoLayouts],
)  # fmt: skip
def test_no_history_breaks_an_invariant(
    machine: type[HierarchyMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "MOVE_BYTES", 2 * max(SIZES))  # several moves for one run
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
