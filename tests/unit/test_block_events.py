"""What a reader of block events knows: always what is held, whatever it missed."""

import random

import pytest

from tiered_kv.block_events import BlockEvents
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.types import BlockKey, Done, Failed, Fingerprint, Medium, Reservation, Why

MB, NBYTES = 1 << 20, 64 << 10
LAYOUT = Fingerprint(b"L" * 16)


def key(i):
    return BlockKey(i.to_bytes(16, "big"))


class Reader:
    """Follows the events of a ring, as a router would."""

    def __init__(self, ring):
        self.ring, self.number, self.known, self.started = ring, 0, set(), 0

    def poll(self):
        events = self.ring.since(self.number)
        if events.first > self.number:
            self.known.clear()
            self.started += 1
        for event in events.items:
            change = self.known.add if event.stored else self.known.remove
            change((event.key, event.medium))
        self.number = events.next
        return self.known


def held(hierarchy):
    book = hierarchy.book
    return {
        (block.key, tier.spec.medium)
        for block in book.blocks.values()
        for tier in book.tiers
        if tier.online and block.mask & tier.bit
    }


def tiers(dram=MB, nvme=2 * MB):
    return Hierarchy([TierSpec(Medium.DRAM, dram, MB), TierSpec(Medium.NVME, nvme, MB)])


def store(hierarchy, keys):
    answer = hierarchy.reserve(keys, LAYOUT, NBYTES, "o", force=True)
    if isinstance(answer, Reservation):
        hierarchy.commit(answer.id)


def test_a_reader_begins_with_what_is_held_and_follows_what_changes():
    h = tiers()
    store(h, [key(1), key(2)])
    reader = Reader(BlockEvents(h.book, 1000))
    assert reader.poll() == held(h) == {(key(1), Medium.DRAM), (key(2), Medium.DRAM)}
    store(h, [key(1), key(2), key(3)])
    h.forget([key(2), key(3)])
    assert reader.poll() == held(h) == {(key(1), Medium.DRAM)}
    assert reader.started == 1
    assert reader.ring.since(reader.number).items == ()


def test_two_readers_see_the_same_events():
    h = tiers()
    ring = BlockEvents(h.book, 1000)
    store(h, [key(1)])
    one, other = Reader(ring), Reader(ring)
    one.poll()
    store(h, [key(1), key(2)])
    assert one.poll() == other.poll() == held(h)


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_that_polls_now_and_then_always_knows_what_is_held(seed):
    rng, h = random.Random(seed), tiers()
    reader = Reader(BlockEvents(h.book, 1000, capacity=64))
    moves = []
    for step in range(600):
        match rng.randrange(7):
            case 0 | 1:
                store(h, [key(rng.randrange(20) * 100 + i) for i in range(rng.randrange(1, 6))])
            case 2:
                base = rng.randrange(20) * 100
                h.want([key(base + i) for i in range(5)], LAYOUT, NBYTES, force=True)
            case 3:
                h.persist(list(h.book.blocks)[:4])
            case 4:
                h.forget([key(rng.randrange(20) * 100 + rng.randrange(5))])
            case 5 if step % 50 == 0:
                h.set_online(Medium.NVME, not h.book.tier(Medium.NVME).online)
            case 6:
                h.distrust([key(rng.randrange(20) * 100)])
        moves += h.due(float(step))
        rng.shuffle(moves)
        while moves and rng.random() < 0.6:
            move = moves.pop()
            h.done(move, [
                Done(7) if rng.random() < 0.9 else Failed(Why.IO_ERROR) for _ in move.blocks
            ])  # fmt: skip
        if rng.random() < 0.3:
            assert reader.poll() == held(h)
    assert reader.started < 300


def test_a_reader_that_fell_behind_starts_over():
    h = tiers(dram=4 * MB)
    reader = Reader(BlockEvents(h.book, 1000, capacity=16))
    reader.poll()
    for i in range(10):
        store(h, [key(i)])
    assert reader.poll() == held(h)
    assert reader.started == 1
    for i in range(10, 40):
        store(h, [key(i)])
    h.forget([key(i) for i in range(35)])
    assert reader.poll() == held(h)
    assert reader.started == 2


def test_a_reader_of_a_former_life_starts_over_whatever_its_number():
    h = tiers()
    store(h, [key(1)])
    ring = BlockEvents(h.book, 1000)
    for number in (0, 999, 5000):
        reader = Reader(ring)
        reader.number = number
        assert reader.poll() == held(h)
        assert reader.started == 1


def test_a_tier_that_is_taken_out_makes_readers_start_over_without_it():
    h = tiers()
    reader = Reader(BlockEvents(h.book, 1000))
    store(h, [key(1)])
    h.persist([key(1)])
    for move in h.due(0.0):
        h.done(move, [Done(7)] * len(move.blocks))
    assert reader.poll() == {(key(1), Medium.DRAM), (key(1), Medium.NVME)}
    h.set_online(Medium.NVME, False)
    assert reader.poll() == {(key(1), Medium.DRAM)}
    h.set_online(Medium.NVME, True)
    assert reader.poll() == held(h)
