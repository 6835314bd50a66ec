"""Placement policies: pure, repeatable, and not herding."""

from collections import Counter

import pytest

from tiered_kv.errors import UnknownName
from tiered_kv.policies.placement import PLACEMENT, Candidate, placement

GB = 1 << 30


def node(name, used=0, sessions=0, capacity=10 * GB):
    return Candidate(name, capacity, used, sessions)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match="'warmest' is not one of least_loaded, rendezvous"):
        placement("warmest")


@pytest.mark.parametrize("name", sorted(PLACEMENT))
def test_every_policy_answers_the_same_whatever_the_order_of_candidates(name):
    nodes = [node(f"n{i}", used=i * GB, sessions=7 - i) for i in range(7)]
    for i in range(50):
        one = placement(name).choose(f"s{i}", nodes)
        assert one is placement(name).choose(f"s{i}", nodes[::-1])
        assert one in nodes


def test_least_loaded_takes_the_emptiest_node():
    assert (
        placement("least_loaded").choose("s", [node("a", 5 * GB), node("b", 3 * GB)]).node_id == "b"
    )


def test_least_loaded_spreads_a_burst_over_nodes_that_are_equally_full():
    nodes = [node(f"n{i}", used=int(8.5 * GB) + i) for i in range(4)]
    placed = Counter()
    for i in range(40):
        name = placement("least_loaded").choose(f"s{i}", nodes).node_id
        placed[name] += 1
        nodes = [
            Candidate(n.node_id, n.capacity_bytes, n.used_bytes, placed[n.node_id]) for n in nodes
        ]
    assert placed == {f"n{i}": 10 for i in range(4)}


def test_least_loaded_gives_a_node_twice_as_large_twice_as_many_sessions():
    sizes = {"large": 20 * GB, "small": 10 * GB}
    placed = Counter()
    for i in range(90):
        nodes = [node(n, sessions=placed[n], capacity=size) for n, size in sizes.items()]
        placed[placement("least_loaded").choose(f"s{i}", nodes).node_id] += 1
    assert placed == {"large": 60, "small": 30}


def test_rendezvous_moves_only_the_sessions_of_a_node_that_leaves():
    choose = placement("rendezvous").choose
    nodes = [node(f"n{i}") for i in range(5)]
    before = {f"s{i}": choose(f"s{i}", nodes).node_id for i in range(500)}
    after = {s: choose(s, nodes[1:]).node_id for s in before}
    assert {s for s in before if before[s] != after[s]} == {s for s in before if before[s] == "n0"}


def test_rendezvous_gives_every_node_a_fair_share():
    choose = placement("rendezvous").choose
    placed = Counter(
        choose(f"s{i}", [node(f"n{k}") for k in range(4)]).node_id for i in range(4000)
    )
    assert all(850 < n < 1150 for n in placed.values())
