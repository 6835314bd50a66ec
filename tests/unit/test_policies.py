"""The shipped policies, by the shipped kit and against naive models."""

import random
from collections.abc import Iterable

import pytest

from tiered_kv.errors import UnknownName
from tiered_kv.policies import EVICTION, eviction
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.fifo import FIFO
from tiered_kv.policies.lru import LRU
from tiered_kv.testing.policies import PolicyTests, block_keys
from tiered_kv.types import BlockKey


@pytest.mark.parametrize("name", sorted(EVICTION), scope="class")
class TestEveryPolicy(PolicyTests):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name

    def make(self, capacity_blocks: int) -> EvictionPolicy:
        return eviction(self.name, capacity_blocks)


def order(policy: EvictionPolicy) -> list[BlockKey]:
    return policy.victims(10**6, lambda _: True)


def test_every_registered_policy_is_made_by_its_name() -> None:
    assert {"adaptive", "arc", "fifo", "lru", "lru2", "lru_head_first", "min"} <= set(EVICTION)
    assert {"gdsf", "s3fifo", "sieve", "wtinylfu"} <= set(EVICTION)
    for name, kind in EVICTION.items():
        made = eviction(name, 10)
        assert type(made) is kind
        assert made.name == name


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'clock' is not one of .*fifo.*lru"):
        eviction("clock", 10)


@pytest.mark.parametrize("name", ["adaptive", "arc", "lru", "lru2", "min", "sieve", "wtinylfu"])
def test_tails_leave_before_their_heads(name: str) -> None:
    policy, run = eviction(name, 10), block_keys(5)
    policy.admit(run, ())
    assert order(policy) == run[::-1]


def test_lru_forgets_first_what_was_used_longest_ago() -> None:
    policy, one, two = LRU(10), block_keys(3, "a"), block_keys(3, "b")
    policy.admit(one, ())
    policy.admit(two, ())
    policy.use(one[:2])
    assert order(policy) == [one[2], *two[::-1], one[1], one[0]]


def test_lru_takes_a_grown_run_as_used_from_its_head_on() -> None:
    policy, run, other = LRU(10), block_keys(4), block_keys(1, "b")
    policy.admit(run[:2], ())
    policy.admit(other, ())
    policy.admit(run[2:], run[:2])
    assert order(policy) == [*other, *run[::-1]]


def test_fifo_does_not_care_for_use() -> None:
    policy, one, two = FIFO(10), block_keys(3, "a"), block_keys(3, "b")
    policy.admit(one, ())
    policy.admit(two, one)
    policy.use(one)
    assert order(policy) == one + two


def sessions(seed: int, n: int) -> Iterable[list[BlockKey]]:
    """Conversations that grow turn by turn, with a shared beginning, in random order."""
    rng = random.Random(seed)
    lengths: dict[int, int] = {}
    for _ in range(n):
        session = min(rng.randrange(12), rng.randrange(12))
        lengths[session] = lengths.get(session, 3) + rng.randrange(3)
        shared = block_keys(3, "system")
        yield shared + block_keys(lengths[session] - 3, f"s{session}-")


@pytest.mark.parametrize("capacity", [5, 20, 60])
def test_lru_hits_what_a_naive_list_hits(capacity: int) -> None:
    policy = LRU(capacity)
    here: set[BlockKey] = set()
    naive: list[BlockKey] = []  # oldest first
    hits = expected = 0
    for run in sessions(3, 300):
        run = run[:capacity]
        new = [key for key in run if key not in here]
        held = [key for key in run if key in here]
        hits += len(held)
        policy.use(held)
        free = here - set(run)
        victims = policy.victims(len(here) + len(new) - capacity, free.__contains__)
        policy.remove(victims)
        policy.admit(new, held)
        here = (here | set(new)) - set(victims)

        expected += sum(key in naive for key in run)
        naive = [key for key in naive if key not in run] + run[::-1]
        naive = naive[-capacity:]
        assert set(naive) == here
        assert order(policy) == naive
    assert hits == expected > 300


@pytest.mark.parametrize("capacity", [20, 60])
def test_fifo_hits_what_a_naive_queue_hits(capacity: int) -> None:
    policy = FIFO(capacity)
    naive: list[BlockKey] = []
    for run in sessions(5, 300):
        new = [key for key in run[:capacity] if key not in naive]
        policy.admit(new, [key for key in run if key in naive])
        naive += new
        victims = policy.victims(len(naive) - capacity, lambda _: True)
        assert victims == naive[: max(0, len(naive) - capacity)]
        policy.remove(victims)
        naive = naive[len(victims) :]
        assert order(policy) == naive
