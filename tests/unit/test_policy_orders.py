"""Who leaves first under each policy, in the cases that its paper is about."""

import random

from tiered_kv.policies import eviction
from tiered_kv.policies.adaptive import Adaptive
from tiered_kv.policies.arc import ARC
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.belady import MIN, future_of
from tiered_kv.policies.gdsf import GDSF
from tiered_kv.policies.lru2 import LRU2
from tiered_kv.policies.lru_head_first import HeadFirstLRU
from tiered_kv.policies.s3fifo import S3FIFO
from tiered_kv.policies.sieve import Sieve
from tiered_kv.policies.stamps import Stamps
from tiered_kv.policies.wtinylfu import Sketch, WTinyLFU
from tiered_kv.testing.policies import block_keys
from tiered_kv.types import BlockKey


def order(policy: EvictionPolicy) -> list[BlockKey]:
    return policy.victims(10**6, lambda _: True)


def evict(policy: EvictionPolicy, n: int) -> list[BlockKey]:
    gone = policy.victims(n, lambda _: True)
    policy.remove(gone)
    return gone


def test_head_first_lru_lets_the_head_of_a_run_go_before_its_tail() -> None:
    policy, run = HeadFirstLRU(10), block_keys(4)
    policy.admit(run, ())
    policy.use(run)
    assert order(policy) == run


def test_lru2_lets_go_of_what_was_used_once_however_lately() -> None:
    policy, old, new = LRU2(10), block_keys(2, "old"), block_keys(2, "new")
    policy.admit(old, ())
    policy.use(old)
    policy.admit(new, ())
    assert order(policy) == [*new[::-1], *old[::-1]]


def test_lru2_orders_by_the_last_use_but_one() -> None:
    policy, a, b = LRU2(10), block_keys(1, "a"), block_keys(1, "b")
    policy.admit(a, ())
    policy.admit(b, ())
    policy.use(b)  # its last use but one is its admission, later than that of a
    policy.use(a)
    assert order(policy) == [*a, *b]
    policy.use(a)
    assert order(policy) == [*b, *a]


def test_lru2_knows_again_what_it_had_to_evict() -> None:
    policy, once, back = LRU2(3), block_keys(2, "once"), block_keys(1, "back")
    policy.admit(back, ())
    assert evict(policy, 1) == back
    policy.admit(back, ())
    policy.admit(once, ())
    assert order(policy) == [*once[::-1], *back]


def test_arc_protects_what_was_used_twice_from_a_scan() -> None:
    policy, hot = ARC(10), block_keys(4, "hot")
    policy.admit(hot, ())
    policy.use(hot)
    for i in range(20):
        policy.admit(block_keys(2, f"scan{i}-"), ())
        evict(policy, max(0, len(policy) - 10))
    assert set(hot) <= set(order(policy))


def test_arc_gives_recency_room_when_its_ghosts_are_asked_for() -> None:
    policy, hot, late = ARC(8), block_keys(4, "hot"), block_keys(4, "late")
    policy.admit(hot, ())
    policy.use(hot)
    policy.admit(late, ())
    assert evict(policy, 2) == late[:-3:-1]  # the target is 0: recency pays
    policy.admit(late[2:], late[:2])  # missed, and remembered
    assert order(policy)[0] in hot  # now the target is 2, which is what recency has


def test_s3fifo_sifts_out_what_is_not_used_twice_and_knows_it_again() -> None:
    policy, hot, cold = S3FIFO(20), block_keys(10, "hot"), block_keys(10, "cold")
    policy.admit(hot, ())
    policy.use(hot)
    policy.use(hot)
    policy.admit(cold, ())
    assert evict(policy, 5) == cold[:5]
    policy.admit(cold[:5], ())  # remembered: these enter the main queue
    assert evict(policy, 3) == cold[5:8]


def test_s3fifo_gives_used_blocks_another_round_in_the_main_queue() -> None:
    policy, run = S3FIFO(4), block_keys(4)
    policy.admit(run, ())
    for _ in range(3):
        policy.use(run)
    assert evict(policy, 1) == run[:1]  # all were promoted, and start there with nothing
    policy.use(run[1:2])
    assert evict(policy, 1) == run[2:3]


def test_sieve_takes_marks_away_and_stops_at_the_first_block_without_one() -> None:
    policy = Sieve(10)
    a, b, c, d = ([key] for key in block_keys(4))
    for one in (a, b, c):
        policy.admit(one, ())
    policy.use(a)
    assert evict(policy, 1) == b  # a lost its mark, the hand stands before c
    policy.admit(d, ())
    policy.use(c)
    assert evict(policy, 1) == d  # c lost its mark
    assert evict(policy, 1) == a  # a new lap


def test_sieve_stays_the_same_when_nobody_leaves() -> None:
    policy, run = Sieve(10), block_keys(6)
    policy.admit(run, ())
    policy.use(run[3:])
    assert policy.victims(2, lambda _: True) == policy.victims(2, lambda _: True)
    assert order(policy) == [*run[2::-1], *run[:2:-1]]


def test_gdsf_keeps_what_costs_more_to_compute_again() -> None:
    policy, short, deep = GDSF(10), block_keys(2, "short"), block_keys(2, "deep")
    policy.admit(deep, block_keys(300, "before"))
    policy.admit(short, ())
    assert set(order(policy)[:2]) == set(short)


def test_gdsf_forgets_old_fame() -> None:
    policy, famous = GDSF(10), block_keys(1, "famous")
    policy.admit(famous, ())
    for _ in range(5):
        policy.use(famous)
    for i in range(200):
        policy.admit(block_keys(1, f"later{i}-"), ())
        if len(policy) > 4 and evict(policy, 1) == famous:
            break
    else:
        raise AssertionError("it stayed for ever")


def test_wtinylfu_lets_no_newcomer_replace_what_is_used_more_often() -> None:
    policy, hot = WTinyLFU(100), block_keys(90, "hot")
    policy.admit(hot, ())
    policy.use(hot)
    for i in range(50):
        policy.admit(block_keys(2, f"scan{i}-"), ())
        gone = evict(policy, max(0, len(policy) - 100))
        assert not set(gone) & set(hot)


def test_a_sketch_counts_and_halves() -> None:
    sketch, (often, once, never) = Sketch(10), block_keys(3)
    for _ in range(9):
        sketch.add(often)
    sketch.add(once)
    assert (sketch.count(often), sketch.count(once), sketch.count(never)) == (9, 1, 0)
    for _ in range(90):
        sketch.add(once)
    assert sketch.count(often) == 4
    assert sketch.count(once) <= 15


def test_min_lets_go_of_what_is_needed_last_and_of_a_run_its_end() -> None:
    soon, late, never = block_keys(2, "soon"), block_keys(2, "late"), block_keys(2, "never")
    runs = [never, soon, late, soon, late]
    policy = MIN(10, future_of(runs))
    for run in runs[:3]:
        policy.admit(run, ())
    assert order(policy) == [*never[::-1], *late[::-1], *soon[::-1]]
    policy.use(soon)
    assert order(policy)[-2:] == late[::-1]


def test_stamps_come_in_order_and_can_be_left_and_taken_up_again() -> None:
    stamps, run = Stamps(), block_keys(6)
    for key, stamp in zip(run, (3, 1, 2, 1, 3, 1), strict=True):
        stamps.put(key, stamp)
    wanted = [run[i] for i in (1, 3, 5, 2, 0, 4)]
    assert next(iter(stamps)) == wanted[0]
    assert list(stamps) == wanted
    stamps.take(run[2])
    stamps.put(run[2], 2)
    stamps.put(run[1], 4)
    assert list(stamps) == [run[i] for i in (3, 5, 2, 0, 4, 1)]


def test_adaptive_is_lru_until_it_has_learned() -> None:
    policy, lru = Adaptive(100), eviction("lru", 100)
    one, two = block_keys(5, "a"), block_keys(5, "b")
    for each in (policy, lru):
        each.admit(one, ())
        each.admit(two[:3], ())
        each.use(one[:2])
        each.admit(two[3:], two[:3])
    assert order(policy)[:3] == order(lru)[:3] == one[:1:-1]
    assert set(order(policy)) == set(order(lru))


def hits(policy: EvictionPolicy, capacity: int, seed: int, requests: int) -> int:
    """A few prompts that come back beside many that never do."""
    rng, here, found = random.Random(seed), set[BlockKey](), 0
    for i in range(requests):
        name = f"kept{rng.randrange(12)}-" if rng.random() < 0.3 else f"once{i}-"
        run = block_keys(10, name)
        held = [key for key in run if key in here]
        found += len(held)
        policy.use(held)
        short = len(here) + len(run) - len(held) - capacity
        gone = policy.victims(short, lambda key, mine=set(run): key not in mine)
        policy.remove(gone)
        here -= set(gone)
        policy.admit(run[len(held) :], held)
        here |= set(run)
    policy.check(here)
    return found


def test_adaptive_learns_that_what_came_once_does_not_come_back() -> None:
    assert hits(Adaptive(200), 200, 1, 4000) > 2 * hits(eviction("lru", 200), 200, 1, 4000)


def test_adaptive_finds_the_capacity_out_when_the_hint_is_wrong() -> None:
    right = hits(Adaptive(200), 200, 2, 4000)
    for hint in (2, 20_000):
        assert abs(hits(Adaptive(hint), 200, 2, 4000) - right) < right / 10


def test_adaptive_follows_runs_that_branch_and_end_anywhere() -> None:
    rng, policy, here = random.Random(5), Adaptive(60), set[BlockKey]()
    for _ in range(1500):
        branch = rng.randrange(6)
        stem, leaf = block_keys(12), block_keys(14, f"branch{branch}-")
        run = (stem[: 4 + branch] + leaf)[: rng.randrange(1, 18)]
        held = [key for key in run if key in here]
        if rng.random() < 0.1:
            held = held[rng.randrange(len(held) + 1) :]  # not from the beginning
            policy.use(held)
            continue
        policy.use(held)
        policy.admit([key for key in run if key not in here], held)
        here |= set(run)
        gone = policy.victims(len(here) - 50, lambda key, mine=set(run): key not in mine)
        policy.remove(gone)
        here -= set(gone)
        policy.check(here)


def test_adaptive_forgets_what_it_evicted_in_the_end() -> None:
    policy = Adaptive(20)
    for i in range(5000):
        policy.admit(block_keys(5, f"{i}-"), ())
        evict(policy, len(policy) - 20)
    assert len(policy._ghosts) <= 40
    assert len(policy._forecast._eras) < 100
    assert len(policy._order) < 1000


def test_an_adaptive_order_that_was_asked_while_empty_takes_blocks_afterwards() -> None:
    policy = Adaptive(8)
    assert policy.victims(1, lambda key: True) == []
    run = [BlockKey(bytes([i]) * 16) for i in range(4)]
    policy.admit(run, [])
    policy.use(run)
    policy.admit([BlockKey(b"x" * 16)], run)
    policy.check([*run, BlockKey(b"x" * 16)])
