"""LRU that frees the ends of runs first."""

from tiered_kv.policies import eviction
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU
from tiered_kv.testing.policies import PolicyTests, block_keys
from tiered_kv.types import BlockKey

TAIL = TailOptimisedLRU.TAIL_BLOCKS


class TestTailOptimisedLRU(PolicyTests):
    def make(self, capacity_blocks: int) -> EvictionPolicy:
        return TailOptimisedLRU(capacity_blocks)


def order(policy: EvictionPolicy) -> list[BlockKey]:
    return policy.victims(10**6, lambda _: True)


def test_the_last_blocks_of_every_run_leave_before_any_other() -> None:
    policy, old, new = eviction("lru_tail_optimised", 99), block_keys(6, "a"), block_keys(6, "b")
    policy.admit(old, ())
    policy.admit(new, ())
    tails = old[-TAIL:][::-1] + new[-TAIL:][::-1]
    assert order(policy) == tails + old[:-TAIL][::-1] + new[:-TAIL][::-1]


def test_what_was_the_end_of_a_run_is_none_when_the_run_has_grown() -> None:
    policy, run = TailOptimisedLRU(99), block_keys(6 + TAIL)
    policy.admit(run[:6], ())
    policy.use(run[:6])
    policy.admit(run[6:], run[:6])
    assert order(policy) == run[::-1]
    assert policy.victims(TAIL, lambda key: key in run[:6]) == run[6 - TAIL : 6][::-1]
    assert set(policy._rest) == set(run[:6])


def test_a_run_that_grew_by_little_keeps_some_of_its_former_end_as_its_end() -> None:
    policy, run = TailOptimisedLRU(99), block_keys(7)
    policy.admit(run[:6], ())
    policy.admit(run[6:], run[:6])
    assert set(policy._tails) == set(run[-TAIL:])


def test_a_run_shorter_than_an_end_is_all_end() -> None:
    policy, run = TailOptimisedLRU(99), block_keys(TAIL - 1)
    policy.admit(run, ())
    policy.use(run)
    assert set(policy._tails) == set(run)


def test_its_price_has_numbers() -> None:
    assert "instead of" in TailOptimisedLRU.price
