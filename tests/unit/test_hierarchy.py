"""Each documented behaviour of the hierarchy, one by one. Random histories: the machine beside."""

from collections.abc import Sequence

import pytest

from tiered_kv.errors import BadConfig, BadInput, BadLayout, StaleHandle
from tiered_kv.hierarchy import Hierarchy, TierSpec, check, flow
from tiered_kv.types import (
    Absent,
    BlockKey,
    Coming,
    Done,
    Failed,
    Fingerprint,
    Held,
    Located,
    Medium,
    Move,
    MoveKind,
    Outcome,
    Refused,
    Reservation,
    Why,
)

LAYOUT, OTHER = Fingerprint(b"layout of size 4"), Fingerprint(b"layout of size 6")
SIZE, SLAB = 4, 12  # three slots a slab
DRAM, NVME, HBM, HOST = Medium.DRAM, Medium.NVME, Medium.HBM, Medium.HOST


def spec(medium: Medium, slots: int, **options: object) -> TierSpec:
    options = {"high": 1.0, "low": 1.0} | options
    return TierSpec(medium, slots * SIZE, SLAB, **options)  # type: ignore[arg-type]


def one_tier(slots: int = 6, **options: object) -> Hierarchy:
    return Hierarchy([spec(DRAM, slots, **options)])


def two_tiers(dram: int = 6, nvme: int = 12, **options: object) -> Hierarchy:
    return Hierarchy([spec(DRAM, dram, **options), spec(NVME, nvme)])


def gpu(slots: int = 6, **options: object) -> Hierarchy:
    return Hierarchy([spec(HBM, slots, **options)], below=True)


def run_of(name: str, n: int) -> list[BlockKey]:
    return [BlockKey(f"{name}{i}".encode()) for i in range(n)]


def reserve(h: Hierarchy, run: Sequence[BlockKey], **options: object) -> Reservation:
    answer = h.reserve(run, LAYOUT, SIZE, "ada", **options)  # type: ignore[arg-type]
    assert isinstance(answer, Reservation), answer
    return answer


def refused(h: Hierarchy, run: Sequence[BlockKey], **options: object) -> Why:
    answer = h.reserve(run, LAYOUT, SIZE, "ada", **options)  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    assert answer.detail
    return answer.why


def store(h: Hierarchy, run: Sequence[BlockKey], **options: object) -> list[BlockKey]:
    reservation = reserve(h, run, **options)
    kept = h.commit(reservation.id, [hash(key) & 0xFF for key in reservation.keys])
    check(h)
    return kept


def carry_out(h: Hierarchy, moves: Sequence[Move], *whys: Why | None) -> None:
    """Report each block of each move as done, or as failed for the reason at its place."""
    for move in moves:
        padded = [*whys, *[None] * len(move.blocks)][: len(move.blocks)]
        outcomes: list[Outcome] = [Failed(why) if why else Done() for why in padded]
        h.done(move, outcomes)
        check(h)


def media(h: Hierarchy, keys: Sequence[BlockKey]) -> list[tuple[Medium, ...]]:
    return [a.tiers if isinstance(a, Held) else () for a in h.lookup(keys)]


def persisted(h: Hierarchy, run: Sequence[BlockKey]) -> None:
    h.persist(run)
    carry_out(h, h.due(0))
    assert media(h, run) == [(DRAM, NVME)] * len(run)


def only_below(h: Hierarchy, run: Sequence[BlockKey]) -> None:
    """Store a run and bring it out of the top tier."""
    store(h, run)
    persisted(h, run)
    top = h.book.top
    fill = run_of("filler", top.slots.total(SIZE) - top.floor(SIZE))
    h.abort(reserve(h, fill, force=True).id)
    assert media(h, run) == [(NVME,)] * len(run)


# -- storing ------------------------------------------------------------------------------


def test_a_block_is_invisible_until_it_is_committed() -> None:
    h, run = one_tier(), run_of("a", 2)
    reservation = reserve(h, run)
    assert reservation.keys == tuple(run)
    assert len(set(reservation.slots)) == 2
    assert h.lookup(run) == [Absent(), Absent()]
    assert not h.lease(run, 1, 0).keys
    assert h.usage()[0].reserved_bytes == 2 * SIZE
    assert h.commit(reservation.id) == run
    assert h.lookup(run) == [Held((DRAM,))] * 2
    assert h.usage()[0].reserved_bytes == 0
    check(h)


def test_only_the_missing_blocks_of_a_run_are_reserved() -> None:
    h, run = one_tier(), run_of("a", 4)
    store(h, run[:3])
    reservation = reserve(h, run)
    assert reservation.keys == (run[3],)
    assert reservation.held == 3
    assert reserve(h, run[:3]).slots == ()


def test_an_empty_run_can_be_reserved_and_committed() -> None:
    h = one_tier()
    assert h.commit(reserve(h, []).id) == []


def test_a_partial_commit_gives_the_other_slots_back() -> None:
    h, run = one_tier(3), run_of("a", 3)
    reservation = reserve(h, run)
    assert h.commit(reservation.id, [1], count=1) == run[:1]
    assert media(h, run) == [(DRAM,), (), ()]
    assert len(reserve(h, run_of("b", 2)).slots) == 2
    check(h)


def test_abort_and_the_death_of_the_owner_give_all_slots_back() -> None:
    h = one_tier()
    mine, other = reserve(h, run_of("a", 2)), h.reserve(run_of("b", 2), LAYOUT, SIZE, "bob")
    third = reserve(h, run_of("c", 2))
    assert isinstance(other, Reservation)
    assert h.owners() == {"ada", "bob"}
    h.abort(mine.id)
    assert h.owner_died("ada") == 1
    assert h.owner_died("nobody") == 0
    assert h.owners() == {"bob"}
    with pytest.raises(StaleHandle):
        h.commit(third.id)
    assert h.usage()[0].used_bytes == 2 * SIZE
    assert h.book.counts["reservations.owner_died"] == 1
    check(h)


def test_a_reservation_does_not_end_by_time() -> None:
    h = one_tier(3)
    mine = reserve(h, run_of("a", 3))
    h.due(1e12)
    assert refused(h, run_of("b", 1), force=True) is Why.FULL
    assert h.commit(mine.id) == run_of("a", 3)


def test_what_two_writers_store_at_once_is_kept_once() -> None:
    h, run = one_tier(), run_of("a", 3)
    first, second = reserve(h, run[:2]), reserve(h, run)
    assert h.commit(first.id, [1, 2]) == run[:2]
    assert h.commit(second.id, [7, 8, 9]) == run[2:]
    assert [h.book.blocks[key].checksum for key in run] == [1, 2, 9]
    assert h.book.blocks[run[0]].slots == [first.slots[0]]
    assert h.book.counts["stores.twice"] == 2
    assert h.usage()[0].used_bytes == 3 * SIZE
    check(h)


def test_a_block_whose_parent_has_gone_is_not_committed() -> None:
    h, run = one_tier(), run_of("a", 3)
    store(h, run[:1])
    reservation = reserve(h, run)
    h.book.drop(h.book.blocks[run[0]])  # as a corrupt copy would be
    assert h.commit(reservation.id) == []
    assert h.book.counts["dropped.orphaned"] == 2
    assert h.usage()[0].used_bytes == 0
    check(h)


def test_the_parents_of_reserved_blocks_are_not_evicted_for_them() -> None:
    h, run = one_tier(3), run_of("a", 3)
    store(h, run[:1])
    store(h, run_of("b", 1))
    h.lease(run_of("b", 1), 1e9, 0)
    assert refused(h, run[:1] + run_of("x", 2), parents=[None, run[0], run[0]]) is Why.FULL
    assert store(h, run[:2]) == run[1:2]
    reservation = reserve(h, [*run[:2], *run_of("y", 0)])
    assert reservation.keys == ()
    h.abort(reservation.id)
    open_child = h.reserve(run, LAYOUT, SIZE, "ada")
    assert isinstance(open_child, Refused), "its parent would have had to go for it"
    check(h)


def test_a_forest_is_reserved_with_the_parents_it_names() -> None:
    h, run = one_tier(9), run_of("a", 2)
    left, right = BlockKey(b"left"), BlockKey(b"right")
    store(h, run)
    forest, parents = [*run, left, right], [None, run[0], run[1], run[1]]
    assert store(h, forest, parents=parents) == [left, right]
    assert {b.key for b in h.book.blocks[run[1]].children()} == {left, right}
    assert h.forget([run[1]]) == []


def test_a_forest_may_have_several_roots() -> None:
    h = one_tier(9)
    a, b = run_of("a", 2), run_of("b", 2)
    assert store(h, a + b, parents=[None, a[0], None, b[0]]) == a + b
    assert h.book.blocks[b[0]].parent is None


def test_bad_requests_are_typed_and_change_nothing() -> None:
    h, run = one_tier(), run_of("a", 2)
    mine = reserve(h, run)
    before = h.usage()
    for call in (
        lambda: h.reserve(run, LAYOUT, SIZE, "ada", [None]),
        lambda: h.reserve([*run_of("b", 1) * 2], LAYOUT, SIZE, "ada", [None, None]),
        lambda: h.commit(mine.id, count=3),
        lambda: h.commit(mine.id, count=-1),
        lambda: h.commit(mine.id, [1]),
        lambda: h.commit(mine.id, [1, 2], count=1),
        lambda: h.lease(run, 0, 0),
        lambda: h.lease(run, float("nan"), 0),
        lambda: h.want([*run, *run], LAYOUT, SIZE),
        lambda: h.want(run, LAYOUT, SIZE, parents=[None]),
        lambda: h.set_online(DRAM, False),
        lambda: h.set_online(HOST, False),
        lambda: h.adopt(NVME, []),
    ):
        with pytest.raises(BadInput):
            call()
    for nbytes in (0, -4, SLAB + 1):
        with pytest.raises(BadLayout):
            h.reserve(run_of("c", 1), LAYOUT, nbytes, "ada")
    assert h.usage() == before
    assert h.commit(mine.id) == run
    check(h)


def test_handles_that_have_ended_are_stale() -> None:
    h, run = one_tier(), run_of("a", 1)
    mine, lease = reserve(h, run), h.lease(run, 1, 0)
    h.abort(mine.id)
    h.release(lease.id)
    for call in (
        lambda: h.abort(mine.id),
        lambda: h.commit(mine.id),
        lambda: h.release(lease.id),
        lambda: h.release(99),
    ):
        with pytest.raises(StaleHandle):
            call()


@pytest.mark.parametrize(
    "bad", [{"high": 0.5, "low": 0.6}, {"low": 0.0}, {"high": 1.1}, {"restore_floor": 1.0}]
)
def test_marks_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadConfig, match="dram"):
        spec(DRAM, 6, **bad)


def test_tiers_must_be_different_media() -> None:
    for specs in ([], [spec(DRAM, 3), spec(DRAM, 6)]):
        with pytest.raises(BadConfig):
            Hierarchy(specs)


# -- leaving ------------------------------------------------------------------------------


def test_a_tail_leaves_before_its_head() -> None:
    h, run = one_tier(6), run_of("a", 6)
    store(h, run)
    store(h, run_of("b", 2))
    assert media(h, run) == [(DRAM,)] * 4 + [()] * 2
    assert h.book.counts["dropped.pressure"] == h.book.counts["evicted.dram"] == 2


def test_a_run_that_was_used_outlives_one_that_was_not() -> None:
    h, old, new = one_tier(6), run_of("a", 3), run_of("b", 3)
    store(h, old)
    store(h, new)
    h.release(h.lease(old, 1, 0).id)
    store(h, run_of("c", 3))
    assert media(h, old + new) == [(DRAM,)] * 3 + [()] * 3


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_chain_that_was_stored_head_first_can_leave_at_once(policy: str) -> None:
    h, run = one_tier(6, policy=policy), run_of("a", 6)
    for i in range(1, 7):
        store(h, run[:i])
    assert store(h, run_of("b", 4)) == run_of("b", 4)
    assert media(h, run) == [(DRAM,)] * 2 + [()] * 4, "exactly as many as were needed"


def test_it_is_refused_when_everything_is_leased_and_nothing_changes() -> None:
    h, run = one_tier(6), run_of("a", 6)
    store(h, run)
    lease = h.lease(run, 10, 0)
    order = h.book.top.policy.victims(9, lambda _: True)
    for force in (False, True):
        assert refused(h, run_of("b", 1), force=force) is Why.FULL
    assert media(h, run) == [(DRAM,)] * 6
    assert h.book.top.policy.victims(9, lambda _: True) == order
    h.release(lease.id)
    store(h, run_of("b", 1))


def test_a_refusal_for_some_puts_the_others_back() -> None:
    h, run, other = one_tier(6), run_of("a", 3), run_of("b", 3)
    store(h, run)
    store(h, other)
    h.lease(other, 1e9, 0)
    assert refused(h, run_of("c", 4)) is Why.FULL
    assert media(h, run) == [(DRAM,)] * 3
    check(h)
    assert h.forget(run) == run[::-1], "each is still the child of the one before"


def test_more_than_the_tier_can_hold_is_too_large() -> None:
    h = one_tier(6, restore_floor=0.34)
    assert refused(h, run_of("a", 7)) is Why.TOO_LARGE
    assert refused(h, run_of("a", 5), force=True) is Why.TOO_LARGE, "two are kept for restores"
    store(h, run_of("a", 4))


def test_above_the_high_mark_blocks_leave_until_the_low_one() -> None:
    h, run = one_tier(12, high=0.75, low=0.5), run_of("a", 9)
    store(h, run)
    assert h.due(0) == []
    assert len(h.book.blocks) == 9, "at the mark is not above it"
    store(h, run_of("b", 1))
    assert h.due(0) == []
    assert len(h.book.blocks) == 6
    check(h)


def test_the_rounding_of_odd_sizes_is_no_excess() -> None:
    h = Hierarchy([TierSpec(DRAM, 7 * 10, 10, high=1.0, low=1.0)])
    for i in range(7):
        reservation = h.reserve(run_of(f"r{i}", 3), LAYOUT, 3, "ada")
        assert isinstance(reservation, Reservation)
        h.commit(reservation.id)
        h.due(0)
    assert len(h.book.blocks) == 21


# -- demoting -----------------------------------------------------------------------------


def test_room_is_made_by_demotion_and_the_next_try_succeeds() -> None:
    h, old, new = two_tiers(6), run_of("a", 6), run_of("b", 3)
    store(h, old)
    assert refused(h, new) is Why.DEMOTING
    moves = h.due(0)
    assert {(move.kind, move.source, move.target) for move in moves} == {
        (MoveKind.DEMOTE, DRAM, NVME)
    }
    assert refused(h, new) is Why.DEMOTING, "the upper copies leave when the lower ones are there"
    assert h.due(0) == [], "what is under way is not asked for again"
    carry_out(h, moves)
    assert store(h, new) == new
    assert media(h, old) == [(DRAM, NVME)] * 3 + [(NVME,)] * 3
    assert h.book.counts["dropped.pressure"] == 0


def test_force_drops_instead_of_waiting() -> None:
    h, old = two_tiers(6), run_of("a", 6)
    store(h, old)
    assert store(h, run_of("b", 2), force=True) == run_of("b", 2)
    assert media(h, old) == [(DRAM,)] * 4 + [()] * 2
    assert h.book.counts["dropped.pressure"] == 2


def test_clean_copies_leave_without_a_move() -> None:
    h, run = two_tiers(6), run_of("a", 3)
    store(h, run)
    persisted(h, run)
    store(h, run_of("b", 3))
    assert store(h, run_of("c", 2)) == run_of("c", 2)
    assert media(h, run) == [(DRAM, NVME), (NVME,), (NVME,)]
    assert h.pending["moves"] == 0


def test_ancestors_are_written_before_or_with_a_demoted_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow, "MOVE_BYTES", 2 * SIZE)
    h, run = two_tiers(6), run_of("a", 6)
    store(h, run)
    assert refused(h, run_of("b", 1)) is Why.DEMOTING
    moves = h.due(0)
    assert [block.key for move in moves for block in move.blocks] == run
    assert [move.kind for move in moves] == [MoveKind.STORE, MoveKind.STORE, MoveKind.DEMOTE]
    carry_out(h, moves)
    assert media(h, run) == [(DRAM, NVME)] * 5 + [(NVME,)], "the ancestors stay, clean"


def test_persisting_a_tail_persists_its_head() -> None:
    h, run = two_tiers(), run_of("a", 3)
    store(h, run)
    h.persist(run[2:])
    (move,) = h.due(0)
    assert [block.key for block in move.blocks] == run
    carry_out(h, [move])
    assert h.persist(run) == [], "it is there already"


def test_persist_joins_a_write_that_is_under_way() -> None:
    h, run = two_tiers(), run_of("a", 3)
    store(h, run)
    first = h.persist(run[:2])
    assert h.persist(run[:2]) == first
    assert h.persist([*run, *run])[0] == first[0]
    assert sum(len(move.blocks) for move in h.due(0)) == 3
    check(h)


def test_a_lease_during_a_demotion_keeps_the_copy() -> None:
    h, run = two_tiers(6, high=0.5, low=0.4), run_of("a", 4)
    store(h, run)
    moves = h.due(0)
    lease = h.lease(run, 10, 0)
    assert len(lease.keys) == 4
    carry_out(h, moves)
    assert media(h, run) == [(DRAM, NVME)] * 4
    h.release(lease.id)
    h.due(0)
    assert (NVME,) in media(h, run), "and then it leaves without another move"


def test_a_failed_demotion_leaves_everything_where_it_was() -> None:
    h, run = two_tiers(6, high=0.5, low=0.4), run_of("a", 4)
    store(h, run)
    moves = h.due(0)
    carry_out(h, moves, *[Why.IO_ERROR] * 4)
    assert media(h, run) == [(DRAM,)] * 4
    assert h.usage()[1].used_bytes == 0
    assert h.book.counts["failed.io_error"] == 4
    assert h.due(0), "it is tried again"


def test_a_stuck_lower_tier_never_stops_progress_and_drops_are_counted() -> None:
    h = two_tiers(6, nvme=3, high=0.5, low=0.4)
    stuck: list[Move] = []  # these take all of the lower tier and never end
    for i in range(20):
        store(h, run_of(f"a{i}", 1), force=True)
        stuck += h.due(i)
    assert 0 < sum(len(move.blocks) for move in stuck) <= 3
    assert h.book.counts["dropped.pressure"] == 20 - len(h.book.blocks)
    assert len(h.book.blocks) <= 6
    carry_out(h, stuck)


def test_a_full_lower_tier_drops_its_own_tails_for_what_comes_down() -> None:
    h, first, second = two_tiers(3, nvme=3), run_of("a", 3), run_of("b", 3)
    only_below(h, first)
    store(h, second)
    assert refused(h, run_of("c", 1)) is Why.DEMOTING
    carry_out(h, h.due(0))
    store(h, run_of("c", 1))
    assert media(h, second) == [(DRAM, NVME), (DRAM, NVME), (NVME,)]
    assert not any(media(h, first))


def test_redundant_copies_leave_a_full_lower_tier_tail_first() -> None:
    h, hot, cold = two_tiers(6, nvme=3), run_of("a", 3), run_of("b", 1)
    store(h, hot)
    persisted(h, hot)
    store(h, cold)
    h.book.tier(NVME).policy.use(hot[2:])  # whatever its policy thinks
    h.persist(cold)
    assert media(h, hot) == [(DRAM, NVME), (DRAM, NVME), (DRAM,)]
    carry_out(h, h.due(0))
    assert media(h, cold) == [(DRAM, NVME)]


def test_a_redundant_copy_stays_while_its_child_is_on_its_way_down() -> None:
    h, run, other = two_tiers(6, nvme=3), run_of("a", 3), run_of("b", 1)
    store(h, run)
    persisted(h, run[:1])
    store(h, other)
    h.persist(run)
    under_way = h.due(0)
    assert h.persist(other) == [], "there is no room that could be made now"
    assert media(h, run[:1]) == [(DRAM, NVME)]
    carry_out(h, under_way)
    assert media(h, run) == [(DRAM, NVME)] * 3


def test_clean_copies_do_not_leave_before_their_turn() -> None:
    h, old, new = two_tiers(6), run_of("a", 3), run_of("b", 3)
    store(h, old)
    store(h, new)
    persisted(h, new)
    assert refused(h, run_of("c", 2)) is Why.DEMOTING
    carry_out(h, h.due(0))
    store(h, run_of("c", 2))
    assert media(h, new) == [(DRAM, NVME)] * 3
    assert media(h, old) == [(DRAM, NVME), (NVME,), (NVME,)]


def test_what_is_just_being_written_makes_room_when_that_is_done() -> None:
    h, run = two_tiers(3), run_of("a", 3)
    store(h, run)
    h.persist(run)
    writing = h.due(0)
    assert refused(h, run_of("b", 2)) is Why.DEMOTING
    assert refused(h, run_of("b", 2), force=True) is Why.FULL
    carry_out(h, writing)
    store(h, run_of("b", 2))
    assert media(h, run) == [(DRAM, NVME), (NVME,), (NVME,)]


def test_who_cannot_wait_takes_clean_copies_before_their_turn_and_loses_nothing() -> None:
    h, old, new = two_tiers(6), run_of("a", 3), run_of("b", 3)
    store(h, old)
    store(h, new)
    persisted(h, new)
    store(h, run_of("c", 2), force=True)
    assert media(h, old) == [(DRAM,)] * 3
    assert media(h, new) == [(DRAM, NVME), (NVME,), (NVME,)]


def test_policies_are_told_how_many_blocks_of_the_first_size_may_come() -> None:
    h = two_tiers(6, nvme=12, policy="adaptive")
    assert [tier.hint for tier in h.book.tiers] == [1, 1], "as if blocks had 2 MiB"
    store(h, run_of("a", 3))
    assert [tier.hint for tier in h.book.tiers] == [6, 12]
    policies = [tier.policy for tier in h.book.tiers]
    store(h, run_of("b", 2))
    h.forget(run_of("a", 3) + run_of("b", 2))
    store(h, run_of("a", 3))
    assert policies == [tier.policy for tier in h.book.tiers], "what was learned stays"


def test_the_most_urgent_moves_come_first() -> None:
    h, run = two_tiers(6), run_of("a", 2)
    only_below(h, run)
    store(h, run_of("b", 2))
    h.persist(run_of("b", 2))
    h.want(run, LAYOUT, SIZE)
    assert [move.kind for move in h.due(0)] == [MoveKind.RESTORE, MoveKind.STORE]


def test_a_move_ends_once_with_an_outcome_for_each_block() -> None:
    h, run = two_tiers(), run_of("a", 2)
    store(h, run)
    h.persist(run)
    (move,) = h.due(0)
    with pytest.raises(StaleHandle):
        h.done(move, [Done()])
    assert h.pending["moves"] == 1
    h.done(move, [Done(5), Done(6)])
    assert [h.book.blocks[key].checksum for key in run] == [5, 6]
    with pytest.raises(StaleHandle):
        h.done(move, [Done(), Done()])
    assert h.book.counts["moved.dram-nvme"] == 2


# -- restoring ----------------------------------------------------------------------------


def test_a_wanted_run_is_coming_and_then_held_in_both_tiers() -> None:
    h, run = two_tiers(), run_of("a", 3)
    only_below(h, run)
    wanted = h.want(run, LAYOUT, SIZE)
    assert len(wanted.moves) == 1
    assert wanted.short == 0
    assert h.lookup(run) == [Coming(DRAM)] * 3
    (move,) = h.due(0)
    assert (move.kind, move.id) == (MoveKind.RESTORE, wanted.moves[0])
    carry_out(h, [move])
    assert media(h, run) == [(DRAM, NVME)] * 3
    assert len(h.lease(run, 1, 0).keys) == 3


def test_a_second_reader_joins_the_move_of_the_first() -> None:
    h, run = two_tiers(), run_of("a", 3)
    only_below(h, run)
    first = h.want(run[:2], LAYOUT, SIZE)
    second = h.want(run, LAYOUT, SIZE)
    assert second.moves[0] == first.moves[0]
    assert [len(move.blocks) for move in h.due(0)] == [2, 1]


def test_a_run_is_wanted_up_to_the_first_block_that_is_nowhere() -> None:
    h, run = two_tiers(), run_of("a", 3)
    only_below(h, run)
    assert h.want([BlockKey(b"?"), *run], LAYOUT, SIZE).moves == []
    assert h.want([], LAYOUT, SIZE).moves == []


def test_restores_find_the_room_that_stores_must_leave() -> None:
    h, run = two_tiers(6, restore_floor=0.34), run_of("a", 2)
    only_below(h, run)
    store(h, run_of("b", 4))
    h.lease(run_of("b", 4), 1e9, 0)
    assert refused(h, run_of("c", 1), force=True) is Why.FULL
    assert h.want(run, LAYOUT, SIZE).short == 0
    carry_out(h, h.due(0))
    assert len(h.lease(run, 1, 0).keys) == 2


def test_a_want_without_room_says_how_much_is_short_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow, "MOVE_BYTES", 2 * SIZE)
    h, run = two_tiers(3), run_of("a", 3)
    only_below(h, run)
    store(h, run_of("b", 2))
    h.lease(run_of("b", 2), 1e9, 0)
    wanted = h.want(run, LAYOUT, SIZE, force=True)
    assert (wanted.moves, wanted.short, wanted.why) == ([], 3, Why.FULL)
    assert h.lookup(run) == [Held((NVME,))] * 3, "no tail comes without its head"
    other = two_tiers(3)
    only_below(other, run)
    store(other, run_of("b", 3))
    assert other.want(run, LAYOUT, SIZE).why is Why.DEMOTING


def test_bringing_up_a_tail_never_costs_its_head() -> None:
    h, run = two_tiers(6), run_of("a", 6)
    only_below(h, run)
    h.want(run[:3], LAYOUT, SIZE)
    carry_out(h, h.due(0))
    store(h, run_of("b", 3))
    h.release(h.lease(run_of("b", 3), 1, 0).id)
    assert h.want(run, LAYOUT, SIZE, force=True).short == 0
    carry_out(h, h.due(0))
    assert len(h.lease(run, 1, 0).keys) == 6


def test_a_corrupt_copy_is_dropped_with_all_that_descends_from_it() -> None:
    h, run, other = two_tiers(), run_of("a", 3), run_of("b", 1)
    only_below(h, run)
    store(h, other)
    h.want(run, LAYOUT, SIZE)
    carry_out(h, h.due(0), None, Why.CORRUPT)
    assert media(h, [*run, *other]) == [(DRAM, NVME), (), (), (DRAM,)]
    assert h.usage()[1].used_bytes == SIZE
    assert h.book.counts["failed.corrupt"] == 1
    assert h.book.counts["dropped.corrupt"] == 2


@pytest.mark.parametrize("why", [Why.IO_ERROR, Why.ABSENT])
def test_an_unreadable_copy_is_not_promised_again(why: Why) -> None:
    h, run = two_tiers(), run_of("a", 1)
    only_below(h, run)
    h.want(run, LAYOUT, SIZE)
    carry_out(h, h.due(0), why)
    assert h.lookup(run) == [Absent()]


@pytest.mark.parametrize("why", [Why.DEADLINE, Why.OFFLINE])
def test_a_late_restore_is_no_reason_to_doubt_the_copy(why: Why) -> None:
    h, run = two_tiers(), run_of("a", 1)
    only_below(h, run)
    h.want(run, LAYOUT, SIZE)
    carry_out(h, h.due(0), why)
    assert h.lookup(run) == [Held((NVME,))]


def test_a_child_may_land_before_its_parent_proves_corrupt() -> None:
    h, run = two_tiers(), run_of("a", 2)
    only_below(h, run)
    h.want(run[::-1], LAYOUT, SIZE, parents=[run[0], None])
    (move,) = h.due(0)
    assert [block.key for block in move.blocks] == run[::-1]
    carry_out(h, [move], None, Why.CORRUPT)
    assert h.lookup(run) == [Absent()] * 2
    assert all(usage.used_bytes == 0 for usage in h.usage())


# -- leases -------------------------------------------------------------------------------


def test_a_lease_covers_the_leading_blocks_that_the_top_tier_holds() -> None:
    h, run = two_tiers(), run_of("a", 4)
    store(h, run[:3])
    lease = h.lease(run, 5, now=10)
    assert lease.keys == tuple(run[:3])
    assert lease.slots == tuple(h.book.blocks[key].slots[0] for key in run[:3])
    assert (lease.nbytes, lease.expires_s) == (SIZE, 15)
    assert h.lease(run[3:], 5, 0).keys == ()


def test_a_lease_ends_by_itself() -> None:
    h, run = one_tier(3), run_of("a", 3)
    store(h, run)
    lease = h.lease(run, 5, now=0)
    h.due(4.9)
    assert refused(h, run_of("b", 1)) is Why.FULL
    h.due(5)
    assert h.pending["leases"] == 0
    assert h.book.counts["leases.expired"] == 1
    store(h, run_of("b", 1))
    with pytest.raises(StaleHandle):
        h.release(lease.id)


def test_a_released_lease_leaves_nothing_behind() -> None:
    h = one_tier()
    for i in range(1000):
        h.release(h.lease([], 1e6, i).id)
        h.due(i)
    assert len(h._expiry) < 100


def test_a_forgotten_block_keeps_its_slot_until_its_reader_has_gone() -> None:
    h, run = one_tier(3), run_of("a", 3)
    store(h, run)
    first, second = h.lease(run, 5, 0), h.lease(run[2:], 9, 0)
    assert h.forget(run) == run[::-1]
    assert h.lookup(run) == [Absent()] * 3
    assert refused(h, run_of("b", 1), force=True) is Why.FULL
    h.release(first.id)
    assert reserve(h, run_of("b", 2)).slots
    assert refused(h, run_of("c", 1), force=True) is Why.FULL
    assert h.pending["buried"] == 1
    h.due(9)
    assert second.slots == reserve(h, run_of("c", 1)).slots
    check(h)


# -- forgetting, offline, owners below ----------------------------------------------------


def test_a_block_with_descendants_is_not_forgotten() -> None:
    h, run = one_tier(), run_of("a", 3)
    store(h, run)
    assert h.forget(run[:2]) == []
    assert h.forget([*run[1:], *run[1:]]) == run[:0:-1]
    assert media(h, run) == [(DRAM,), (), ()]


def test_a_block_to_which_children_will_be_attached_is_not_forgotten() -> None:
    h, run = one_tier(), run_of("a", 2)
    store(h, run[:1])
    reservation = reserve(h, run)
    assert h.forget(run) == []
    assert h.commit(reservation.id) == run[1:]


def test_a_block_can_be_forgotten_in_the_middle_of_a_move() -> None:
    h, run = two_tiers(), run_of("a", 2)
    store(h, run)
    h.persist(run)
    (move,) = h.due(0)
    assert h.forget(run) == run[::-1]
    assert store(h, run) == run, "and be stored again"
    carry_out(h, [move])
    assert media(h, run) == [(DRAM,)] * 2
    assert h.usage()[1].used_bytes == 0


def test_copies_of_an_offline_tier_are_misses_until_it_is_back() -> None:
    h, run = two_tiers(), run_of("a", 2)
    only_below(h, run)
    h.set_online(NVME, False)
    assert h.lookup(run) == [Absent()] * 2
    assert h.want(run, LAYOUT, SIZE).moves == []
    assert not h.usage()[1].online
    check(h)
    h.set_online(NVME, True)
    assert h.lookup(run) == [Held((NVME,))] * 2


def test_what_only_an_offline_tier_holds_can_be_stored_again() -> None:
    h, run = two_tiers(), run_of("a", 3)
    only_below(h, run[:2])
    h.set_online(NVME, False)
    reservation = reserve(h, run)
    assert reservation.keys == tuple(run)
    assert h.commit(reservation.id, [7, 8, 9]) == run
    check(h)
    h.set_online(NVME, True)
    assert media(h, run) == [(DRAM,)] * 3, "the old copies may differ in their last bits"
    assert [h.book.blocks[key].checksum for key in run] == [7, 8, 9]


def test_an_offline_tier_never_stops_progress() -> None:
    h, run = two_tiers(6, high=0.9, low=0.5), run_of("a", 6)
    store(h, run)
    persisted(h, run)
    h.set_online(NVME, False)
    for i in range(10):
        store(h, run_of(f"b{i}", 2))
        assert h.due(i) == []
        assert h.usage()[0].used_bytes <= 0.9 * 6 * SIZE
    h.set_online(NVME, True)
    assert media(h, run) == [(NVME,)] * 6, "their lower copies have waited"
    check(h)


def test_while_a_tier_is_offline_blocks_leave_in_the_order_of_their_use() -> None:
    h, old, new = two_tiers(6), run_of("a", 6), run_of("b", 3)
    store(h, old)
    persisted(h, old)
    h.set_online(NVME, False)
    store(h, new)
    assert media(h, old) == [(DRAM,)] * 3 + [()] * 3
    store(h, run_of("c", 3))
    assert media(h, old + new) == [()] * 6 + [(DRAM,)] * 3, "old ones first, new ones later"
    assert h.book.counts["dropped.pressure"] == 0


def test_a_demotion_into_a_tier_that_went_offline_keeps_the_upper_copy() -> None:
    h, run = two_tiers(6, high=0.5, low=0.4), run_of("a", 4)
    store(h, run)
    moves = h.due(0)
    h.set_online(NVME, False)
    carry_out(h, moves)
    assert media(h, run) == [(DRAM,)] * 4


def test_a_gpu_hands_down_to_the_node_and_asks_it_for_what_it_lacks() -> None:
    h, run = gpu(6, high=0.5, low=0.4), run_of("a", 4)
    store(h, run)
    (move,) = h.due(0)
    assert (move.kind, move.source, move.target, move.targets) == (
        MoveKind.DEMOTE, HBM, HOST, ()
    )  # fmt: skip
    carry_out(h, [move])
    left = [key for key, held in zip(run, media(h, run), strict=True) if not held]
    assert left == run[2:]
    wanted = h.want(run, LAYOUT, SIZE)
    assert h.lookup(run) == [Held((HBM,))] * 2 + [Coming(HBM)] * 2
    restore, *_ = h.due(0)
    assert restore.id == wanted.moves[0]
    assert [(b.key, b.parent) for b in restore.blocks] == [(run[2], run[1]), (run[3], run[2])]
    carry_out(h, [restore], None, Why.ABSENT)
    assert media(h, run) == [(HBM,)] * 3 + [()]


def test_a_gpu_may_hold_a_child_without_its_parent() -> None:
    h, run = gpu(), run_of("a", 3)
    store(h, run)
    h.book.drop(h.book.blocks[run[0]])
    check(h)
    assert media(h, run) == [(), (HBM,), (HBM,)]
    assert store(h, run) == run[:1]


def test_a_gpu_without_its_node_drops_and_asks_for_nothing() -> None:
    h, run = gpu(6, high=0.5, low=0.4), run_of("a", 4)
    store(h, run)
    h.set_online(HOST, False)
    assert h.due(0) == []
    assert media(h, run) == [(HBM,)] * 2 + [()] * 2
    assert h.book.counts["dropped.pressure"] == 2
    assert h.want(run, LAYOUT, SIZE).moves == []
    assert h.persist(run) == []


# -- layouts ------------------------------------------------------------------------------


def test_two_layouts_compete_for_slabs() -> None:
    h, small = one_tier(6), run_of("a", 6)
    store(h, small)
    answer = h.reserve(run_of("big", 2), OTHER, 6, "ada")
    assert isinstance(answer, Reservation)
    assert h.commit(answer.id) == run_of("big", 2)
    check(h)
    assert media(h, small) == [(DRAM,)] * 3 + [()] * 3
    store(h, run_of("b", 6))
    assert not any(media(h, run_of("big", 2)))


def test_a_slab_with_a_leased_block_is_not_taken_from_its_layout() -> None:
    h, small = one_tier(6), run_of("a", 6)
    store(h, small)
    h.lease(small[5:], 1e9, 0)  # the other slab has only what it descends from
    answer = h.reserve(run_of("big", 1), OTHER, 6, "ada", force=True)
    assert isinstance(answer, Refused)
    assert answer.why is Why.FULL


def test_a_slab_that_another_layout_has_emptied_is_taken_before_anything_leaves() -> None:
    h = one_tier(6)
    store(h, run_of("a", 3))
    big = h.reserve(run_of("big", 2), OTHER, 6, "ada")
    assert isinstance(big, Reservation)
    h.abort(big.id)
    store(h, run_of("b", 3))
    assert len(h.book.blocks) == 6
    assert h.book.counts["evicted.dram"] == 0


# -- restarting ---------------------------------------------------------------------------


def row(run: Sequence[BlockKey], i: int, slot: int, **changes: object) -> Located:
    made = Located(run[i], run[i - 1] if i else None, slot * SIZE, SIZE, LAYOUT, checksum=i)
    return made._replace(**changes)  # type: ignore[arg-type]


def test_a_restart_finds_what_the_disk_holds() -> None:
    h, run = two_tiers(), run_of("a", 3)
    rows = [row(run, 2, 5), row(run, 0, 7), row(run, 1, 0)]
    assert h.adopt(NVME, rows) == run
    check(h)
    assert media(h, run) == [(NVME,)] * 3
    assert [h.book.blocks[key].checksum for key in run] == [0, 1, 2]
    h.want(run, LAYOUT, SIZE)
    (move,) = h.due(0)
    assert [block.slot for block in move.blocks] == [7 * SIZE, 0, 5 * SIZE]


def test_rows_that_cannot_be_true_are_left_out() -> None:
    h, run, other = two_tiers(), run_of("a", 4), run_of("b", 3)
    rows = [
        row(run, 0, 0),
        row(run, 1, 0),  # the slot of another row
        row(run, 2, 1),  # its parent is left out
        row(other, 0, 2, checksum=None),
        row(other, 0, 0)._replace(slot=5),  # on no boundary
        row(other, 1, 4),  # an orphan
        row(other, 2, 999),
        row(run_of("c", 1), 0, 5, nbytes=0),
        row(run_of("d", 1), 0, 5, nbytes=SLAB + 1),
        row(run_of("e", 1), 0, 6, parent=run_of("e", 1)[0]),  # its own parent
        row(run_of("f", 1), 0, -3),
    ]
    assert h.adopt(NVME, rows) == run[:1]
    assert h.usage()[1].used_bytes == SIZE
    assert h.book.counts["dropped.orphaned"] == len(rows) - 1
    check(h)


def test_adopting_again_adds_only_what_is_new() -> None:
    h, run = two_tiers(), run_of("a", 2)
    assert h.adopt(NVME, [row(run, 0, 0)]) == run[:1]
    assert h.adopt(NVME, [row(run, 0, 1), row(run, 1, 0)]) == []
    assert h.adopt(NVME, [row(run, 1, 1)]) == run[1:]
    check(h)


def test_after_a_restart_the_oldest_writes_leave_first_and_tails_before_heads() -> None:
    h, old, new = two_tiers(), run_of("a", 3), run_of("b", 2)
    rows = [row(old, 0, 0), row(old, 1, 1), row(old, 2, 2), row(new, 0, 3), row(new, 1, 4)]
    h.adopt(NVME, rows)
    order = h.book.tier(NVME).policy.victims(9, lambda _: True)
    assert order == [*old[::-1], *new[::-1]]
    fork = BlockKey(b"fork")
    again = two_tiers()
    again.adopt(NVME, [*rows, row(old, 0, 5, key=fork, parent=old[0])])
    order = again.book.tier(NVME).policy.victims(9, lambda _: True)
    assert order == [old[2], old[1], *new[::-1], fork, old[0]], "a head is as new as its fork"


# -- more than two tiers -------------------------------------------------------------------


def test_what_moves_between_lower_tiers_is_not_said_to_be_coming() -> None:
    h = Hierarchy([spec(HBM, 3), spec(DRAM, 3), spec(NVME, 6)])
    run = run_of("a", 3)
    store(h, run)
    h.persist(run)
    carry_out(h, h.due(0))
    h.abort(reserve(h, run_of("x", 3)).id)
    assert media(h, run) == [(DRAM,)] * 3
    h.book.tier(DRAM).wanted[SIZE] = 1
    (move,) = h.due(0)
    assert (move.source, move.target) == (DRAM, NVME)
    assert h.lookup(run) == [Held((DRAM,))] * 3
    wanted = h.want(run, LAYOUT, SIZE)
    assert wanted.moves == [move.id]
    assert wanted.short == 3, "ask again when it has landed"
    carry_out(h, [move])
    assert h.want(run, LAYOUT, SIZE).short == 0


def test_a_run_that_goes_down_in_several_moves_leaves_from_its_tail_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = two_tiers(dram=8, nvme=8)
    run = run_of("long", 6)
    store(h, run)
    monkeypatch.setattr(flow, "MOVE_BYTES", 2 * next(iter(h.book.blocks.values())).nbytes)
    persisted(h, run)
    nvme = h.book.tier(Medium.NVME)
    assert nvme.policy.victims(6, lambda key: True) == run[::-1]


def test_what_the_node_below_refuses_as_an_orphan_is_dropped_and_gets_out_of_the_way() -> None:
    h = gpu(slots=6)
    run = run_of("torn", 4)
    store(h, run)
    h.persist(run[:2])
    carry_out(h, h.due(0.0))
    assert h.forget(run) == run[::-1]
    parents = [run[1], run[2]]
    held = h.reserve(run[2:], LAYOUT, SIZE, "engine", parents)  # their head is nowhere any more
    assert isinstance(held, Reservation)
    h.commit(held.id)
    h.persist(run[2:])
    (move,) = h.due(0.0)
    carry_out(h, [move], *[Why.ORPHANED] * len(move.blocks))
    assert h.lookup(run) == [Absent()] * 4
    assert h.book.counts["dropped.orphaned"] == 2
    check(h)


def test_an_orphan_below_whose_parent_is_here_stays_for_the_next_try() -> None:
    h = gpu(slots=6)
    run = run_of("whole", 3)
    store(h, run)
    h.persist(run)
    (move,) = h.due(0.0)
    carry_out(h, [move], None, Why.ORPHANED, Why.ORPHANED)
    assert media(h, run) == [(HBM,)] * 3
    check(h)
