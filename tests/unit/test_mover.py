"""The mover against tiers that wait, fail and misbehave on command."""

import asyncio
import threading
import time

import numpy as np
import pytest

from tiered_kv.errors import TierBroken, Unreachable
from tiered_kv.generations import Generations
from tiered_kv.mover import LANE_WORKERS, Mover
from tiered_kv.types import (
    BlockKey,
    Done,
    Failed,
    Fingerprint,
    Located,
    Medium,
    Move,
    MoveKind,
    Why,
)

PATIENCE_S = 20.0
NBYTES = 4096
LAYOUT = Fingerprint(b"L" * 16)


class FakeTier:
    """Implements `Tier`. `gate` holds every copy until it is set; `answer` says how they end."""

    medium = Medium.NVME

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.began = []
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()
        self.answer = lambda blocks: [Done(7)] * len(blocks)

    def _copy(self, what, blocks):
        with self._lock:
            self.began.append((what, blocks[0].key))
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            assert self.gate.wait(PATIENCE_S)
            return self.answer(blocks)
        finally:
            with self._lock:
                self.running -= 1

    def read(self, blocks, into):
        return self._copy("read", blocks)

    def write(self, blocks, source):
        assert [b.slot for b in blocks] != source
        return self._copy("write", blocks)

    def drop(self, keys):
        pass

    def probe(self):
        raise NotImplementedError

    def close(self):
        pass


class Rig:
    """A mover above one fake tier, and what its owner was told."""

    def __init__(self, tier=None):
        self.tier = tier or FakeTier()
        self.words = np.zeros(64, np.uint64)
        self.told = []
        self.mover = Mover(
            {Medium.NVME: self.tier}, Medium.DRAM, Generations(self.words), self.done
        )
        self.ids = 0

    def done(self, move, outcomes):
        self.told.append((move.id, outcomes))

    def submit(self, kind, n=1):
        self.ids += 1
        up = kind is MoveKind.RESTORE
        blocks = tuple(
            Located(BlockKey(bytes([self.ids, i]) * 8), None, i * NBYTES, NBYTES, LAYOUT)
            for i in range(n)
        )
        move = Move(
            self.ids, kind, Medium.NVME if up else Medium.DRAM,
            Medium.DRAM if up else Medium.NVME, blocks,
            tuple((self.ids + i) * NBYTES for i in range(n)), NBYTES,
        )  # fmt: skip
        self.mover.submit(move)
        return move

    async def until(self, check):
        end = time.monotonic() + PATIENCE_S
        while not check():
            assert time.monotonic() < end
            await asyncio.sleep(0.002)

    def word(self, move, i=0):
        return int(self.words[move.targets[i] // NBYTES])


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.tier.gate.set()
    await rig.mover.close()


async def test_a_move_up_is_read_and_its_slots_become_readable_before_anybody_hears(rig):
    seen = []
    rig.done = lambda move, outcomes: seen.append(rig.word(move))
    rig.mover._done = rig.done
    move = rig.submit(MoveKind.RESTORE, 2)
    outcomes = await rig.mover.wait([move.id], PATIENCE_S)
    assert outcomes == {block.key: Done(7) for block in move.blocks}
    assert seen == [2]
    assert rig.mover.queued == 0


async def test_slots_are_odd_while_they_are_filled_and_stay_odd_where_no_block_came(rig):
    rig.tier.gate.clear()
    rig.tier.answer = lambda blocks: [Done(), Failed(Why.CORRUPT)]
    move = rig.submit(MoveKind.RESTORE, 2)
    await rig.until(lambda: rig.tier.began)
    assert (rig.word(move, 0), rig.word(move, 1)) == (1, 1)
    rig.tier.gate.set()
    await rig.mover.wait([move.id], PATIENCE_S)
    assert (rig.word(move, 0), rig.word(move, 1)) == (2, 1)


async def test_moves_down_leave_generations_alone(rig):
    move = rig.submit(MoveKind.DEMOTE)
    await rig.mover.wait([move.id], PATIENCE_S)
    assert not rig.words.any()


async def test_a_restore_does_not_wait_behind_demotions(rig):
    rig.tier.gate.clear()
    for _ in range(20):
        rig.submit(MoveKind.DEMOTE)
    await rig.until(lambda: len(rig.tier.began) == LANE_WORKERS)
    restore = rig.submit(MoveKind.RESTORE)
    await rig.until(lambda: ("read", restore.blocks[0].key) in rig.tier.began)


async def test_stores_go_before_demotions_that_wait_and_equals_in_order(rig):
    rig.tier.gate.clear()
    first = [rig.submit(MoveKind.DEMOTE) for _ in range(LANE_WORKERS)]
    await rig.until(lambda: len(rig.tier.began) == LANE_WORKERS)
    demotes = [rig.submit(MoveKind.DEMOTE) for _ in range(3)]
    stores = [rig.submit(MoveKind.STORE) for _ in range(3)]
    rig.tier.gate.set()
    every = [m.id for m in (*first, *demotes, *stores)]
    assert await rig.mover.wait(every, PATIENCE_S) is not None
    order = [key[0] for _, key in rig.tier.began]
    late = order[LANE_WORKERS:]
    assert {m.id for m in stores} == set(late[:3])
    assert {m.id for m in demotes} == set(late[3:])


async def test_no_more_than_so_many_batches_run_at_once_in_a_lane(rig):
    rig.tier.gate.clear()
    moves = [rig.submit(MoveKind.STORE) for _ in range(8)]
    await rig.until(lambda: len(rig.tier.began) == LANE_WORKERS)
    assert rig.mover.queued == 8
    rig.tier.gate.set()
    await rig.mover.wait([m.id for m in moves], PATIENCE_S)
    assert rig.tier.most <= LANE_WORKERS


async def test_a_wait_ends_with_its_time_and_the_move_goes_on(rig):
    rig.tier.gate.clear()
    move = rig.submit(MoveKind.RESTORE)
    assert await rig.mover.wait([move.id], 0.01) is None
    assert await rig.mover.wait([move.id], -1.0) is None
    assert rig.told == []
    rig.tier.gate.set()
    assert await rig.mover.wait([move.id], PATIENCE_S) == {move.blocks[0].key: Done(7)}
    assert [i for i, _ in rig.told] == [move.id]


async def test_waiting_for_moves_that_are_long_over_takes_no_time(rig):
    move = rig.submit(MoveKind.STORE)
    await rig.mover.wait([move.id], PATIENCE_S)
    assert await rig.mover.wait([move.id, 99], 0.0) == {}
    assert await rig.mover.wait([], 0.0) == {}


async def test_wait_any_ends_with_the_first_move_and_is_false_without_one(rig):
    assert await rig.mover.wait_any(PATIENCE_S) is False
    rig.tier.gate.clear()
    rig.submit(MoveKind.RESTORE)
    assert await rig.mover.wait_any(0.01) is False
    waiting = asyncio.ensure_future(rig.mover.wait_any(PATIENCE_S))
    rig.tier.gate.set()
    assert await waiting is True


async def test_a_copy_that_runs_too_long_makes_its_medium_overdue_until_it_has_ended(rig):
    rig.tier.gate.clear()
    move = rig.submit(MoveKind.DEMOTE)
    await rig.until(lambda: rig.tier.began)
    await rig.until(lambda: rig.mover.overdue(0.05) == {Medium.NVME})
    assert rig.mover.overdue(PATIENCE_S) == set()
    rig.tier.gate.set()
    await rig.mover.wait([move.id], PATIENCE_S)
    assert rig.mover.overdue(0.0) == set()


async def test_what_waits_for_a_medium_that_hangs_can_be_failed_and_what_runs_is_not(rig):
    rig.tier.gate.clear()
    running = [rig.submit(MoveKind.DEMOTE) for _ in range(LANE_WORKERS)]
    await rig.until(lambda: len(rig.tier.began) == LANE_WORKERS)
    waiting = rig.submit(MoveKind.DEMOTE, 2)
    rig.mover.give_up(Medium.NVME, "it hangs")
    assert rig.told == [(waiting.id, [Failed(Why.OFFLINE, "it hangs")] * 2)]
    assert rig.mover.queued == LANE_WORKERS
    rig.tier.gate.set()
    outcomes = await rig.mover.wait([m.id for m in running], PATIENCE_S)
    assert set(outcomes.values()) == {Done(7)}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TierBroken("gone"), Why.OFFLINE),
        (Unreachable("away"), Why.OFFLINE),
        (ZeroDivisionError("a defect"), Why.IO_ERROR),
        (MemoryError(), Why.IO_ERROR),
    ],
    ids=repr,
)
async def test_whatever_a_tier_raises_is_a_counted_failure_and_the_lane_goes_on(rig, error, why):
    def fail(blocks):
        raise error

    rig.tier.answer = fail
    for kind in MoveKind:
        for _ in range(LANE_WORKERS + 1):  # more than there are workers to lose
            move = rig.submit(kind, 2)
            outcomes = await rig.mover.wait([move.id], PATIENCE_S)
            assert [o.why for o in outcomes.values()] == [why] * 2
            assert str(error) in next(iter(outcomes.values())).detail
    rig.tier.answer = lambda blocks: [Done()] * len(blocks)
    move = rig.submit(MoveKind.RESTORE)
    assert await rig.mover.wait([move.id], PATIENCE_S) == {move.blocks[0].key: Done()}
    assert rig.mover.legs[Medium.DRAM, Medium.NVME].failed == 4 * (LANE_WORKERS + 1)


@pytest.mark.parametrize("answer", [[], [Done()] * 3, None], ids=repr)
async def test_a_tier_that_answers_for_another_number_of_blocks_has_failed_them_all(rig, answer):
    rig.tier.answer = lambda blocks: answer
    for _ in range(LANE_WORKERS + 1):
        move = rig.submit(MoveKind.RESTORE, 2)
        outcomes = await rig.mover.wait([move.id], PATIENCE_S)
        assert [o.why for o in outcomes.values()] == [Why.IO_ERROR] * 2
        assert rig.word(move) % 2 == 1


async def test_an_owner_that_fails_costs_no_worker_and_no_waiter(rig):
    def fail(move, outcomes):
        raise ZeroDivisionError("in done")

    rig.mover._done = fail
    for _ in range(LANE_WORKERS + 1):
        move = rig.submit(MoveKind.STORE)
        assert await rig.mover.wait([move.id], PATIENCE_S) == {move.blocks[0].key: Done(7)}
    assert rig.mover.queued == 0


async def test_legs_count_what_was_copied(rig):
    rig.tier.answer = lambda blocks: [Done(), Done(copied=False), Failed(Why.IO_ERROR)]
    move = rig.submit(MoveKind.STORE, 3)
    await rig.mover.wait([move.id], PATIENCE_S)
    leg = rig.mover.legs[Medium.DRAM, Medium.NVME]
    assert (leg.blocks, leg.bytes, leg.failed) == (1, NBYTES, 1)
    assert leg.seconds > 0


async def test_closing_ends_every_wait_and_waits_for_what_runs():
    rig = Rig()
    rig.tier.gate.clear()
    moves = [rig.submit(MoveKind.DEMOTE) for _ in range(LANE_WORKERS + 3)]
    await rig.until(lambda: len(rig.tier.began) == LANE_WORKERS)
    waiting = [asyncio.ensure_future(rig.mover.wait([m.id], PATIENCE_S)) for m in moves]
    any_of = asyncio.ensure_future(rig.mover.wait_any(PATIENCE_S))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(rig.mover.close())
    ended = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    assert [o.why for one in ended for o in one.values()] == [Why.OFFLINE] * len(moves)
    assert await any_of is True
    assert not closing.done()
    rig.tier.gate.set()
    await closing
    assert rig.tier.running == 0
    assert len(rig.tier.began) == LANE_WORKERS  # what waited was dropped
    assert rig.told == []


async def test_after_closing_nothing_moves_and_nobody_waits():
    rig = Rig()
    await rig.mover.close()
    move = rig.submit(MoveKind.RESTORE)
    assert await rig.mover.wait([move.id], PATIENCE_S) is None
    assert await rig.mover.wait_any(PATIENCE_S) is False
    assert rig.mover.queued == 0
    await rig.mover.close()
