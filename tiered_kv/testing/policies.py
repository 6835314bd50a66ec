"""Tests that every eviction policy must pass. Subclass `PolicyTests` and fill `make`.

    class TestMine(PolicyTests):
        def make(self, capacity_blocks: int) -> EvictionPolicy:
            return Mine(capacity_blocks)

Needs pytest. A policy decides who leaves first and nothing else, so these tests ask for no order;
tests of a particular order belong beside the policy.
"""

import random

import pytest

from tiered_kv.policies.base import EvictionPolicy, Expecting
from tiered_kv.types import BlockKey


def block_keys(n: int, name: str = "") -> list[BlockKey]:
    """`n` different keys, for instance a run."""
    return [BlockKey(f"{name}{i:06d}".encode()) for i in range(n)]


class PolicyTests:
    """One instance of a policy, told what a tier would tell it."""

    CAPACITY = 64

    def make(self, capacity_blocks: int) -> EvictionPolicy:
        """A fresh policy for a tier of about this many blocks."""
        raise NotImplementedError

    def test_a_fresh_policy_is_empty(self) -> None:
        policy = self.make(self.CAPACITY)
        assert len(policy) == 0
        assert policy.victims(5, lambda _: True) == []
        policy.check([])

    def test_it_orders_exactly_the_residents(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(9)
        policy.admit(run, ())
        assert len(policy) == 9
        policy.check(run)
        for wrong in (run[:-1], [*run, BlockKey(b"stranger")], run[1:] + block_keys(1, "x")):
            with pytest.raises(AssertionError):
                policy.check(wrong)

    def test_every_resident_is_a_candidate_once(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run[:10], ())
        policy.admit(run[10:], run[:10])
        policy.use(run[:15])
        asked: list[BlockKey] = []

        def refuse(key: BlockKey) -> bool:
            asked.append(key)
            return False

        assert policy.victims(3, refuse) == []
        assert sorted(asked) == run

    def test_it_stops_asking_when_it_has_enough(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run, ())
        agreed: list[BlockKey] = []

        def agree(key: BlockKey) -> bool:
            agreed.append(key)
            return True

        assert policy.victims(4, agree) == agreed
        assert len(agreed) == 4
        assert policy.victims(0, agree) == policy.victims(-1, agree) == []
        assert len(agreed) == 4

    def test_victims_are_only_those_that_can_leave(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run, ())
        free = set(run[::3])
        assert set(policy.victims(50, free.__contains__)) == free

    def test_asking_for_victims_removes_nothing(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run, ())
        first = policy.victims(7, lambda _: True)
        policy.check(run)
        assert policy.victims(7, lambda _: True) == first

    def test_what_was_removed_is_never_a_candidate_again(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run, ())
        policy.remove(run[5:9])
        policy.check(run[:5] + run[9:])
        assert not set(policy.victims(50, lambda _: True)) & set(run[5:9])
        policy.admit(run[5:9], run[:5])  # and it may come back
        policy.check(run)

    def test_the_blocks_before_new_ones_need_not_be_here(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run[:5], ())
        policy.admit(run[15:], run[:15])
        policy.check(run[:5] + run[15:])

    def test_empty_batches_change_nothing(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(8)
        policy.admit(run, ())
        order = policy.victims(8, lambda _: True)
        policy.admit((), ())
        policy.use(())
        policy.remove(())
        assert policy.victims(8, lambda _: True) == order

    def test_hints_neither_add_nor_take_blocks(self) -> None:
        policy, run = self.make(self.CAPACITY), block_keys(20)
        policy.admit(run, ())
        if isinstance(policy, Expecting):
            for return_s in (5.0, float("inf"), 0.0, 1e9):
                policy.expect(run[:15], return_s)
                policy.expect(block_keys(3, "stranger"), return_s)
                policy.expect((), return_s)
        policy.check(run)
        assert set(policy.victims(50, lambda _: True)) == set(run)

    def test_it_follows_a_random_tier_for_long(self) -> None:
        """Far beyond the hinted capacity, as its ghosts and counters must bear too."""
        rng, policy = random.Random(7), self.make(self.CAPACITY)
        here: dict[BlockKey, None] = {}
        names = block_keys(6 * self.CAPACITY)
        for _ in range(2000):
            start = rng.randrange(len(names))
            run = names[start : start + rng.randrange(12)]
            held = [key for key in run if key in here]
            new = [key for key in run if key not in here]
            policy.use(held)
            policy.admit(new, held)
            here.update(dict.fromkeys(new))
            victims = policy.victims(len(here) - self.CAPACITY, lambda key: key in here)
            assert len(victims) == max(0, len(here) - self.CAPACITY)
            assert len(set(victims)) == len(victims)
            policy.remove(victims)
            for key in victims:
                del here[key]
            assert len(policy) == len(here)
        policy.check(list(here))
