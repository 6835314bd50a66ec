"""Prefetch policies, and what becomes of the bytes that they move."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.errors import UnknownName
from tiered_kv.policies.prefetch import PREFETCH, OnPredictedWake, Waste, Wasted, prefetch
from tiered_kv.policies.retention import Outlook, Retention
from tiered_kv.sim.workload import generate
from tiered_kv.types import SessionId

A, B = SessionId("a"), SessionId("b")


def wakes_in(seconds: float) -> Outlook:
    return Outlook("tool_use", 2 * seconds, seconds, 0.5)


def test_every_policy_is_made_by_its_name() -> None:
    assert sorted(PREFETCH) == ["none", "on_predicted_wake", "on_request"]
    for name in PREFETCH:
        assert prefetch(name).name == name
    with pytest.raises(UnknownName, match=r"'always' is not one of none, on_predicted"):
        prefetch("always")


@pytest.mark.parametrize(("name", "asks"), [("none", False), ("on_request", True)])
def test_policies_without_foresight_are_never_due(name: str, asks: bool) -> None:
    policy = prefetch(name)
    policy.stopped(A, wakes_in(10), 0.0)
    assert policy.due(1e9) == []
    assert policy.arrived(A, 0.0) is asks
    policy.ended(A)


def test_a_session_is_due_shortly_before_it_is_expected_and_once() -> None:
    policy = OnPredictedWake()
    policy.stopped(A, wakes_in(20), 100.0)
    policy.stopped(B, wakes_in(10), 100.0)
    assert policy.due(107.9) == []
    assert policy.due(120.0) == [B, A]
    assert policy.due(1e9) == []


@pytest.mark.parametrize("seconds", [0.0, 1.0, 7_200.0, math.inf])
def test_who_is_back_at_once_or_nobody_knows_when_is_left_alone(seconds: float) -> None:
    policy = OnPredictedWake()
    policy.stopped(A, wakes_in(seconds), 0.0)
    assert policy.due(1e9) == []


def test_who_has_ended_or_come_back_is_not_due_any_more() -> None:
    policy = OnPredictedWake()
    policy.stopped(A, wakes_in(20), 0.0)
    policy.stopped(B, wakes_in(20), 0.0)
    policy.ended(A)
    assert policy.arrived(B, 1.0)
    assert policy.due(1e9) == []


def test_the_last_stop_decides() -> None:
    policy = OnPredictedWake()
    policy.stopped(A, wakes_in(20), 0.0)
    policy.stopped(A, wakes_in(50), 10.0)
    assert policy.due(30.0) == []
    assert policy.due(60.0) == [A]


def test_stops_without_end_leave_no_heap_behind() -> None:
    policy = OnPredictedWake()
    for i in range(10_000):
        policy.stopped(SessionId(f"s{i % 7}"), wakes_in(20), float(i))
    assert len(policy._heap) <= 64 + 2 * 7 + 1


def test_bytes_are_used_wasted_or_still_waiting() -> None:
    waste = Waste()
    waste.brought(A, 100)
    waste.brought(B, 50)
    assert waste.total() == Wasted(150, 0, 0, 150)
    waste.lost(A, 30)
    waste.used(A)
    assert waste.total() == Wasted(150, 70, 30, 50)
    waste.used(B, 20)
    assert waste.total() == Wasted(150, 90, 60, 0)
    waste.used(B)
    waste.lost(A)
    assert waste.total() == Wasted(150, 90, 60, 0)


def test_who_waits_longest_is_given_up_when_there_are_too_many() -> None:
    waste = Waste(max_sessions=2)
    for i in range(5):
        waste.brought(SessionId(f"s{i}"), 10)
    assert waste.total() == Wasted(50, 0, 30, 20)


steps = st.lists(
    st.tuples(
        st.sampled_from(["brought", "used", "lost", "used all", "lost all"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1_000),
    )
)


@given(steps)
def test_no_byte_is_counted_twice_or_lost(done: list[tuple[str, str, int]]) -> None:
    waste = Waste(max_sessions=2)
    for what, sid, nbytes in done:
        verb, _, whole = what.partition(" ")
        getattr(waste, verb)(SessionId(sid), *(() if whole else (nbytes,)))
        total = waste.total()
        assert total.brought == total.used + total.wasted + total.pending
        assert min(total.used, total.wasted, total.pending) >= 0


def test_most_prefetched_sessions_of_agents_come_back_within_ten_minutes() -> None:
    """The policy with what it learns by itself, over generated agents."""
    watch, policy, waste = Retention(), OnPredictedWake(), Waste()
    brought: dict[SessionId, float] = {}
    stops: list[tuple[float, SessionId, str]] = []
    in_time = asked = 0
    requests = list(generate("agent", 40, seed=3))
    reasons: dict[int, str] = {}
    following = {}
    for request in reversed(requests):
        following[id(request)] = reasons.get(request.session, "")
        reasons[request.session] = request.after
    rng = Random(0)
    for request in requests:
        sid = SessionId(str(request.session))
        for due in policy.due(request.at_s):
            waste.brought(due, 1)
            brought[due] = request.at_s
        asked += 1
        if sid in brought:
            in_time += 1
            late = request.at_s - brought.pop(sid) > 600
            (waste.lost if late else waste.used)(sid)
        watch.arrived(sid, request.at_s)
        policy.arrived(sid, request.at_s)
        ends_s = request.at_s + rng.uniform(3, 10)
        if reason := following[id(request)]:
            stops.append((ends_s, sid, reason))
            watch.stopped(sid, reason, ends_s)
            policy.stopped(sid, watch.outlook(sid, ends_s), ends_s)
        else:
            watch.ended(sid)
            policy.ended(sid)
    total = waste.total()
    assert in_time > 0.15 * asked
    assert total.used > 3 * (total.wasted + total.pending)
