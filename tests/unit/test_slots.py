"""Slots of a tier: never two owners, never lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.errors import BadInput, BadLayout
from tiered_kv.slots import MIN_SLAB_BYTES, SlotPool, slab_bytes_for

SIZES = (3, 4, 5, 12)


class Model:
    """Which size owns which bytes, kept naively."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}  # slot -> size

    def take(self, nbytes: int, slots: list[int]) -> None:
        for slot in slots:
            assert all(
                slot + nbytes <= other or other + size <= slot for other, size in self.used.items()
            ), f"{slot} overlaps"
            self.used[slot] = nbytes


steps = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give", "reclaim"]), st.sampled_from(SIZES),
              st.integers(0, 9)),
    max_size=60,
)  # fmt: skip


@settings(deadline=None, print_blob=True, max_examples=200)
@given(steps=steps, stripes=st.sampled_from([1, 2, 3]))
def test_no_byte_ever_has_two_owners(steps: list[tuple[str, int, int]], stripes: int) -> None:
    pool, model = SlotPool(5 * 12 * stripes + 1, 12 * stripes, stripes), Model()
    for verb, nbytes, n in steps:
        mine = [slot for slot, size in model.used.items() if size == nbytes]
        if verb == "take":
            room, others = pool.room(nbytes), {s: pool.room(s) for s in SIZES if s != nbytes}
            slots = pool.take(nbytes, n)
            if slots is None:
                assert room < n
                assert all(pool.room(size) >= before for size, before in others.items())
            else:
                assert len(slots) == n
                model.take(nbytes, slots)
        elif verb == "give" and mine:
            pool.give(nbytes, mine[:n])
            for slot in mine[:n]:
                del model.used[slot]
        elif verb == "reclaim":
            before = pool.room(nbytes)
            assert pool.reclaim(nbytes) == (pool.room(nbytes) > before)
        pool.check(list(model.used))
        for size in SIZES:
            assert pool.used(size) == list(model.used.values()).count(size)
            assert 0 <= pool.room(size) <= pool.total(size)
        places = {pool.place(slot, size) for slot, size in model.used.items()}
        assert len(places) == len(model.used)
        assert pool.used_cost == pytest.approx(sum(pool.cost(size) for size in model.used.values()))
        assert pool.used_cost <= pool.capacity_bytes + 1e-6


@given(nbytes=st.integers(1, 24), stripes=st.integers(1, 4), slabs=st.integers(1, 4))
@settings(deadline=None, print_blob=True)
def test_places_on_devices_never_overlap_and_stay_inside(
    nbytes: int, stripes: int, slabs: int
) -> None:
    per_stripe = 24
    pool = SlotPool(slabs * per_stripe * stripes, per_stripe * stripes, stripes)
    slots = pool.take(nbytes, pool.total(nbytes))
    assert slots is not None
    taken: set[tuple[int, int]] = set()
    for slot in slots:
        stripe, offset = pool.place(slot, nbytes)
        cells = {(stripe, at) for at in range(offset, offset + nbytes)}
        assert 0 <= stripe < stripes
        assert offset >= 0
        assert offset + nbytes <= slabs * per_stripe
        assert not cells & taken
        taken |= cells
    assert {stripe for stripe, _ in taken} == set(range(stripes))


def test_neighbours_lie_on_different_devices() -> None:
    pool = SlotPool(96, 48, stripes=4)
    slots = pool.take(6, 8)
    assert slots is not None
    assert [pool.place(slot, 6).stripe for slot in slots] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_fresh_slots_come_in_ascending_order_so_that_copies_are_large() -> None:
    assert SlotPool(40, 20).take(5, 8) == [0, 5, 10, 15, 20, 25, 30, 35]


def test_take_gives_nothing_and_changes_nothing_when_there_are_too_few() -> None:
    pool = SlotPool(36, 12)
    assert pool.take(4, 4) is not None
    assert pool.take(4, 6) is None
    assert pool.used(4) == 4
    assert pool.room(6) == 2, "the spare slab is still anybody's"


def test_an_empty_slab_moves_to_the_size_that_needs_it() -> None:
    pool = SlotPool(24, 12)
    slots = pool.take(4, 6)
    assert slots is not None
    assert pool.take(6, 1) is None
    pool.give(4, [s for s in slots if s >= 12])
    assert pool.take(6, 2) == [12, 18]
    assert pool.take(6, 1) is None
    assert pool.used_by_slab(6) == {0: 3}
    assert pool.slabs_of(6) == {1}


def test_the_end_of_a_slab_is_charged_to_its_slots() -> None:
    pool = SlotPool(24, 12)
    assert pool.take(5, 4) is not None
    assert pool.used_cost == pool.capacity_bytes == 24
    assert pool.room(5) == 0


@settings(deadline=None, print_blob=True)
@given(
    used=st.integers(0, 9),
    named=st.lists(st.integers(-12, 50), max_size=12),
    nbytes=st.sampled_from([3, 4, 6]),
)
def test_adopting_takes_exactly_the_free_slots_of_its_size(
    used: int, named: list[int], nbytes: int
) -> None:
    pool, model = SlotPool(36, 12), Model()
    taken = pool.take(4, used)
    assert taken is not None
    model.take(4, taken)
    could = {
        slot
        for slot in range(36)
        if slot % 12 % nbytes == 0
        and slot % 12 + nbytes <= 12
        and slot not in taken
        and (nbytes == 4 or slot // 12 not in pool.slabs_of(4))
    }
    answers = pool.adopt(nbytes, named)
    adopted = [slot for slot, good in zip(named, answers, strict=True) if good]
    assert len(set(adopted)) == len(adopted)
    assert set(adopted) == set(named) & could
    model.take(nbytes, adopted)
    pool.check(list(model.used))
    rest = pool.take(nbytes, pool.room(nbytes))
    assert rest is not None
    model.take(nbytes, rest)


def test_adopting_twice_never_gives_a_slot_a_second_owner() -> None:
    pool = SlotPool(24, 12)
    assert pool.adopt(4, [4]) == [True]
    assert pool.adopt(4, [4, 8]) == [False, True]
    assert pool.adopt(6, [6, 12]) == [False, True]
    pool.check([4, 8, 12])


@pytest.mark.parametrize("nbytes", [13, 0, -4])
def test_a_block_that_cannot_be_in_a_slab_is_refused(nbytes: int) -> None:
    pool = SlotPool(24, 12)
    for verb in (pool.per_slab, pool.cost, pool.total, pool.room):
        with pytest.raises(BadLayout, match=f"block of {nbytes} bytes"):
            verb(nbytes)
    with pytest.raises(BadLayout):
        pool.take(nbytes, 1)
    with pytest.raises(BadLayout):
        pool.adopt(nbytes, [0])
    pool.check()
    assert pool.sizes() == []


@pytest.mark.parametrize(("capacity", "slab", "stripes"), [(11, 12, 1), (24, 1, 2), (24, 12, 0)])
def test_a_pool_without_room_for_a_slab_is_refused(capacity: int, slab: int, stripes: int) -> None:
    with pytest.raises(BadInput, match=f"capacity {capacity}"):
        SlotPool(capacity, slab, stripes)


@given(capacity=st.integers(MIN_SLAB_BYTES * 4, 1 << 44), stripes=st.integers(1, 4))
@settings(deadline=None, print_blob=True)
def test_slabs_are_a_power_of_two_a_stripe_and_about_a_sixteenth(
    capacity: int, stripes: int
) -> None:
    slab = slab_bytes_for(capacity, stripes)
    per_stripe, rest = divmod(slab, stripes)
    assert rest == 0
    assert per_stripe.bit_count() == 1
    assert MIN_SLAB_BYTES <= per_stripe <= 1 << 30
    assert per_stripe == MIN_SLAB_BYTES or slab <= capacity // 16
    assert SlotPool(capacity, slab, stripes).slabs >= 1
