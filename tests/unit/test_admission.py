"""What a drive is asked to take, and when: by itself, and inside the real hierarchy."""

import hashlib
from collections.abc import Iterable

import pytest
from cluster_kit import Engine
from service_kit import LONG_S, service, until

from tiered_kv.config import Config, Nvme
from tiered_kv.errors import BadConfig, UnknownName
from tiered_kv.hierarchy import Hierarchy, TierSpec, check
from tiered_kv.policies.admission import ADMISSION, SecondUse, admission
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU
from tiered_kv.sim.two_tier import TwoTier
from tiered_kv.sim.workload import generate
from tiered_kv.testing.policies import block_keys
from tiered_kv.types import BlockKey, Done, Fingerprint, Held, Medium, MoveKind, Reservation, Run

DRAM, NVME = Medium.DRAM, Medium.NVME
LAYOUT, SIZE = Fingerprint(bytes(16)), 4


def tiers(policy: str, dram: int = 6, nvme: int = 60) -> Hierarchy:
    return Hierarchy([
        TierSpec(DRAM, dram * SIZE, SIZE, high=1.0, low=1.0),
        TierSpec(NVME, nvme * SIZE, SIZE, high=1.0, low=1.0, admission=policy),
    ])  # fmt: skip


def carry_out(h: Hierarchy) -> list[BlockKey]:
    """Carry out all that is due; the keys that were written down, in order."""
    written: list[BlockKey] = []
    while moves := h.due(0.0):
        for move in moves:
            if move.kind is not MoveKind.RESTORE:
                written += [block.key for block in move.blocks]
            h.done(move, [Done()] * len(move.blocks))
            check(h)
    return written


def store(h: Hierarchy, run: Run) -> list[BlockKey]:
    """Store a run, room being made first; what was written down meanwhile."""
    written: list[BlockKey] = []
    answer = h.reserve(run, LAYOUT, SIZE, "ada")
    if not isinstance(answer, Reservation):
        written = carry_out(h)
        answer = h.reserve(run, LAYOUT, SIZE, "ada")
    assert isinstance(answer, Reservation)
    h.commit(answer.id)
    return written + carry_out(h)


def use(h: Hierarchy, run: Run) -> None:
    lease = h.lease(run, 1.0, 0.0)
    assert lease.keys == tuple(run)
    h.release(lease.id)


def test_every_policy_is_made_by_its_name() -> None:
    assert sorted(ADMISSION) == ["on_demotion", "second_use", "write_behind"]
    for name in ADMISSION:
        assert admission(name, 10).name == name
    with pytest.raises(UnknownName, match=r"'always' is not one of on_demotion, second_use, wri"):
        admission("always", 10)


def test_the_configuration_knows_the_policies() -> None:
    assert Config(nvme=Nvme(admission="write_behind")).nvme.admission == "write_behind"
    with pytest.raises(BadConfig, match=r"nvme.admission 'never' is not one of on_demotion"):
        Config(nvme=Nvme(admission="never"))


def test_on_demotion_nothing_is_written_before_it_has_to_leave() -> None:
    h, first, second = tiers("on_demotion"), block_keys(6), block_keys(3, "b")
    assert store(h, first) == []
    written = store(h, second)
    assert set(first[3:]) <= set(written)
    assert h.lookup(first)[5] == Held((NVME,))


def test_write_behind_writes_new_blocks_at_once_heads_first_and_keeps_them_up() -> None:
    h, run = tiers("write_behind"), block_keys(4)
    assert store(h, run) == run
    assert h.lookup(run) == [Held((DRAM, NVME))] * 4
    assert carry_out(h) == []


def test_write_behind_makes_room_without_waiting_for_the_drive() -> None:
    h, run = tiers("write_behind"), block_keys(6)
    store(h, run)
    answer = h.reserve(block_keys(6, "b"), LAYOUT, SIZE, "ada")
    assert isinstance(answer, Reservation)
    assert h.lookup(run) == [Held((NVME,))] * 6


def test_write_behind_leaves_what_was_forgotten_meanwhile_alone() -> None:
    h, run = tiers("write_behind"), block_keys(4)
    answer = h.reserve(run, LAYOUT, SIZE, "ada")
    assert isinstance(answer, Reservation)
    h.commit(answer.id)
    h.forget(run[2:])
    assert carry_out(h) == run[:2]


def test_write_behind_waits_for_a_drive_that_is_offline_and_writes_on_demotion_then() -> None:
    h, run = tiers("write_behind"), block_keys(6)
    h.set_online(NVME, False)
    assert store(h, run) == []
    h.set_online(NVME, True)
    assert store(h, block_keys(2, "b"))


def test_of_second_use_only_what_two_requests_wanted_is_written() -> None:
    h, hot, cold = tiers("second_use"), block_keys(3, "hot"), block_keys(3, "cold")
    store(h, hot)
    store(h, cold)
    use(h, hot)
    written = store(h, block_keys(6, "new"))
    assert written == hot
    assert h.lookup(hot) == [Held((NVME,))] * 3
    assert not any(isinstance(answer, Held) for answer in h.lookup(cold))


def test_of_second_use_a_block_that_was_lost_and_came_back_is_written() -> None:
    h, run = tiers("second_use"), block_keys(3)
    store(h, run)
    store(h, block_keys(6, "b"))
    assert not any(isinstance(answer, Held) for answer in h.lookup(run))
    store(h, run)
    assert set(run) <= set(store(h, block_keys(6, "c")))


def test_of_second_use_an_unwanted_block_with_descendants_in_use_does_not_block_the_tier() -> None:
    h, run = tiers("second_use"), block_keys(6)
    store(h, run)
    lease = h.lease(run, 9.0, 0.0)  # all pinned: nothing can leave
    assert not isinstance(h.reserve(block_keys(2, "b"), LAYOUT, SIZE, "ada"), Reservation)
    carry_out(h)
    h.release(lease.id)
    store(h, block_keys(2, "b"))
    check(h)


def test_second_use_remembers_a_bounded_number_of_blocks_heads_longest(monkeypatch) -> None:
    monkeypatch.setattr(SecondUse, "LEAST", 1)
    policy, run = SecondUse(10), block_keys(30)
    policy.stored(run)
    policy.used(run)
    assert len(policy._seen) == 20
    assert policy.worth(run[0])
    assert not policy.worth(run[-1])


def runs(kind: str, sessions: int) -> Iterable[Run]:
    for request in generate(kind, sessions, seed=2):
        yield [
            BlockKey(hashlib.blake2b(str(i).encode(), digest_size=16).digest())
            for i in request.hash_ids
        ]


@pytest.mark.parametrize("policy", sorted(ADMISSION))
def test_invariants_hold_through_a_generated_workload(policy: str) -> None:
    tiers = TwoTier(300, 1_500, admission=policy)
    for now, run in enumerate(runs("rag", 120)):
        tiers.request(run, float(now))
        if now % 10 == 0:
            tiers.check()
    counts = tiers.counts
    assert counts.hits > 0.3 * counts.accesses
    assert counts.dram_hits <= counts.hits
    assert 0 < counts.written <= counts.accesses - counts.hits + counts.short
    assert tiers.hierarchy.pending == {"reservations": 0, "leases": 0, "moves": 0, "buried": 0}


def test_nothing_is_written_twice_while_its_copy_lives() -> None:
    tiers = TwoTier(300, 100_000)  # below nothing is ever evicted
    counts = tiers.replay(runs("chat", 300))
    assert counts.written <= len(tiers.hierarchy.book.blocks)
    assert counts.restored > 0


def test_second_use_writes_least_and_write_behind_most() -> None:
    written = {
        name: TwoTier(300, 3_000, admission=name).replay(runs("chat", 300)).written
        for name in ADMISSION
    }
    assert written["second_use"] < written["on_demotion"] <= written["write_behind"]


def test_ratios_of_an_empty_replay_are_zero() -> None:
    counts = TwoTier(8, 8).replay([[]])
    assert (counts.requests, counts.hit_ratio, counts.writes_per_access) == (1, 0.0, 0.0)
    assert counts.dram_hit_ratio == 0.0


def blocks_of(one, medium: Medium) -> int:
    tiers = one.to_host.call("status", timeout_s=LONG_S)["tiers"]
    return next(tier["blocks"] for tier in tiers if tier["medium"] == medium)


@pytest.mark.parametrize("policy", sorted(ADMISSION))
def test_a_node_writes_what_its_admission_says_with_nobody_asking(policy: str) -> None:
    with service(gpu=False, nvme={"admission": policy}) as one:
        engine = Engine(one.to_host)
        engine.attach()
        engine.save("a", 6)
        if policy == "write_behind":
            until(lambda: blocks_of(one, NVME) == 6, "all are written")
            assert blocks_of(one, DRAM) == 6
        else:
            engine.save("b", 6)
            assert blocks_of(one, NVME) == 0
        for i in range(6):  # 36 blocks more, where DRAM has room for 32
            engine.save(f"more{i}", 6)
        assert engine.wake("more5").blocks == 6
        engine.close()


def test_a_node_that_frees_the_ends_of_runs_first_says_at_what_price() -> None:
    with service(gpu=False, dram={"policy": "lru_tail_optimised"}) as one:
        notes = one.to_host.call("status", timeout_s=LONG_S)["notes"]
        assert TailOptimisedLRU.price in notes
