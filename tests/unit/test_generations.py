import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv import pages
from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.generations import Generations
from tiered_kv.types import ALIGNMENT

PAGES = 16
slot_sets = st.lists(st.integers(0, PAGES - 1).map(lambda i: i * ALIGNMENT), unique=True)


def table() -> Generations:
    return Generations(np.zeros(PAGES, np.uint64))


def test_a_slot_is_odd_while_it_is_filled_and_even_when_readable():
    g = table()
    assert g.read([0, 4096]) == (0, 0)
    assert g.open([0, 4096]) == (1, 1)
    assert g.publish([4096]) == (2,)
    assert g.read([0, 4096]) == (1, 2)
    assert g.open([0]) == (3,)  # its filler died: the next one gets a generation of its own


def test_a_reader_whose_slot_was_given_away_notices_at_every_stage():
    g = table()
    g.open([8192])
    lease = g.publish([8192])
    assert g.unchanged([8192], lease)
    g.open([8192])
    assert not g.unchanged([8192], lease)
    g.publish([8192])
    assert not g.unchanged([8192], lease)


def test_a_reader_notices_that_its_large_slot_was_retired_for_small_ones():
    g = table()
    g.open([0])
    lease = g.publish([0])
    g.retire([0])  # a slot of four pages; its slab goes to slots of one page
    g.open([4096])  # inside, and the word of page 0 is not the one that is written here
    assert not g.unchanged([0], lease)


def test_publishing_a_slot_that_nobody_fills_is_refused_and_changes_nothing():
    g = table()
    g.open([0])
    with pytest.raises(StaleHandle, match="slot 4096 is not being filled: its generation is 0"):
        g.publish([0, 4096])
    assert g.read([0, 4096]) == (1, 0)


@pytest.mark.parametrize("slot", [-4096, 1, 4095, PAGES * ALIGNMENT])
def test_a_slot_outside_or_between_pages_is_refused(slot):
    g = table()
    with pytest.raises(BadInput, match=f"slot {slot} "):
        g.open([0, slot])
    assert g.read([0]) == (0,)


def test_as_many_generations_as_slots_are_wanted():
    with pytest.raises(BadInput, match="2 slots, but 1 generations"):
        table().unchanged([0, 4096], (0,))


def test_an_empty_batch_is_fine():
    g = table()
    assert g.open([]) == g.publish([]) == g.read([]) == ()
    assert g.unchanged([], ())


def test_two_views_of_the_same_words_agree():
    words = np.zeros(PAGES, np.uint64)
    owner, reader = Generations(words), Generations(words)
    owner.open([0])
    assert reader.read([0]) == (1,)


def test_the_barrier_of_other_processors_works_here_too():
    assert pages.full_barrier() is None


@given(st.lists(st.tuples(st.sampled_from(["open", "publish", "retire"]), slot_sets), max_size=20))
def test_no_generation_ever_comes_back(steps):
    g = table()
    every = [i * ALIGNMENT for i in range(PAGES)]
    seen = [{0} for _ in every]
    for verb, slots in steps:
        before = g.read(every)
        filling = all(before[s // ALIGNMENT] % 2 for s in slots)
        if verb == "publish" and not filling:
            with pytest.raises(StaleHandle):
                g.publish(slots)
            assert g.read(every) == before
            continue
        getattr(g, verb)(slots)
        for i, now in enumerate(g.read(every)):
            if i * ALIGNMENT in slots:
                assert now not in seen[i]
                assert now % 2 == (verb != "publish")
                seen[i].add(now)
            else:
                assert now == before[i]
