"""When sessions come back: learned online, by stop reason and by session."""

import math
from random import Random

import pytest

from tiered_kv.errors import BadInput
from tiered_kv.policies.retention import END_TURN, MAX_REASONS, OTHER, TOOL, Gaps, Retention
from tiered_kv.sim.workload_shapes import AGENT
from tiered_kv.types import SessionId

A, B = SessionId("a"), SessionId("b")


def taught(n: int = 3_000, seed: int = 1) -> Retention:
    """Has seen many sessions stop and return as the agents of a public trace do."""
    rng, watch, now = Random(seed), Retention(), 0.0
    for i in range(n):
        sid = SessionId(f"s{i % 200}")
        tool = rng.random() < 0.9
        watch.stopped(sid, TOOL if tool else END_TURN, now)
        now += (AGENT.tool_think_s if tool else AGENT.turn_think_s).draw(rng)
        watch.arrived(sid, now)
    return watch


def test_before_anything_was_seen_the_prior_is_that_of_the_trace() -> None:
    watch = Retention()
    watch.stopped(A, TOOL, 0.0)
    watch.stopped(B, END_TURN, 0.0)
    assert watch.outlook(A, 0.0).return_s == pytest.approx(9, rel=0.25)
    assert watch.outlook(B, 0.0).return_s == pytest.approx(210, rel=0.35)
    assert watch.outlook(A, 0.0).soon > 2 * watch.outlook(B, 0.0).soon


def test_gaps_are_learned_for_each_stop_reason() -> None:
    watch = taught()
    assert watch.typical_s(TOOL) == pytest.approx(9, rel=0.15)
    assert watch.typical_s(TOOL, 0.9) == pytest.approx(71, rel=0.3)
    assert watch.typical_s(END_TURN) == pytest.approx(210, rel=0.35)


def test_a_workload_that_changes_is_followed() -> None:
    watch = taught()
    for i in range(8_000):
        watch.stopped(A, TOOL, 100.0 * i)
        watch.arrived(A, 100.0 * i + 40)
    assert watch.typical_s(TOOL) == pytest.approx(40, rel=0.2)


def test_the_longer_a_session_is_quiet_the_longer_it_will_be() -> None:
    watch = taught()
    watch.stopped(A, TOOL, 0.0)
    looks = [watch.outlook(A, waited) for waited in (0.0, 10.0, 60.0, 600.0)]
    assert sorted(looks, key=lambda look: look.return_s) == looks
    assert sorted(looks, key=lambda look: -look.soon) == looks


def test_a_session_that_is_slower_than_others_is_expected_later() -> None:
    watch, now = taught(), 0.0
    for _ in range(20):
        watch.stopped(A, TOOL, now)
        now += 90.0
        watch.arrived(A, now)
    watch.stopped(A, TOOL, now)
    watch.stopped(B, TOOL, now)
    assert watch.outlook(A, now).return_s > 3 * watch.outlook(B, now).return_s


def test_a_running_tool_brings_a_session_back_sooner_than_its_stop_reason_says() -> None:
    watch = taught()
    watch.stopped(A, END_TURN, 0.0)
    late = watch.outlook(A, 0.0).return_s
    watch.tool_running(A, 0.0)
    assert watch.outlook(A, 0.0).reason == TOOL
    assert watch.outlook(A, 0.0).return_s < late / 5


def test_an_ended_session_is_expected_never_and_may_be_back_all_the_same() -> None:
    watch = taught()
    watch.stopped(A, END_TURN, 0.0)
    watch.ended(A)
    look = watch.outlook(A, 1.0)
    assert (look.return_s, look.wake_s, look.soon) == (math.inf, math.inf, 0.0)
    watch.arrived(A, 2.0)
    assert watch.outlook(A, 2.0).soon == 1.0


def test_sessions_that_end_make_others_less_likely_to_return() -> None:
    watch = taught()
    watch.stopped(A, END_TURN, 0.0)
    before = watch.outlook(A, 0.0).soon
    for i in range(3_000):
        watch.stopped(SessionId(f"gone{i}"), END_TURN, 0.0)
        watch.ended(SessionId(f"gone{i}"))
    assert watch.outlook(A, 0.0).soon < before / 2
    assert watch.outlook(A, 0.0).return_s == math.inf


def test_a_session_that_nobody_knows_is_expected_never() -> None:
    assert Retention().outlook(A, 0.0).soon == 0.0


def test_predicted_chances_are_met() -> None:
    """Calibration: of the sessions that are said to be back within a minute with a chance of
    about p, about p are."""
    watch, rng, now = taught(), Random(9), 1e6
    said: dict[int, list[bool]] = {}
    for i in range(4_000):
        sid = SessionId(f"s{i % 200}")
        tool = rng.random() < 0.7
        gap = (AGENT.tool_think_s if tool else AGENT.turn_think_s).draw(rng)
        watch.stopped(sid, TOOL if tool else END_TURN, now)
        waited = rng.choice([0.0, 5.0, 30.0])
        if gap > waited:
            chance = watch.outlook(sid, now + waited).soon
            said.setdefault(round(chance * 5), []).append(gap - waited <= 60.0)
        now += gap
        watch.arrived(sid, now)
    for fifth, came in said.items():
        if len(came) >= 200:
            assert sum(came) / len(came) == pytest.approx(fifth / 5, abs=0.12)
    assert len(said) >= 3


def test_memory_is_bounded_in_sessions_and_in_reasons() -> None:
    watch = Retention(max_sessions=50)
    for i in range(500):
        watch.stopped(SessionId(f"s{i}"), f"reason{i}", float(i))
    assert len(watch) == len(list(watch)) == 50
    assert SessionId("s499") in list(watch)
    watch.stopped(A, "one more", 500.0)
    assert watch.outlook(A, 500.0).reason == OTHER
    assert MAX_REASONS >= 3


def test_clocks_that_go_backwards_do_no_harm() -> None:
    watch = Retention()
    watch.stopped(A, TOOL, 100.0)
    assert watch.outlook(A, 50.0).return_s > 0
    watch.arrived(A, 50.0)
    assert watch.typical_s(TOOL) > 0


def test_a_histogram_keeps_its_chances_between_0_and_1_for_ever() -> None:
    gaps = Gaps(9, 71, memory=10)
    rng = Random(2)
    for _ in range(2_000):
        gaps.add(rng.expovariate(0.01) if rng.random() < 0.9 else None)
    for waited in (0.0, 0.1, 5.0, 1e4, 1e9):
        for more in (0.0, 1.0, 1e3, 1e9):
            assert 0.0 <= gaps.within(waited, more) <= 1.0
    assert gaps.quantile(0.0, 0.1) < gaps.quantile(0.0, 0.5) < gaps.quantile(0.0, 0.8)


def test_impossible_percentiles_and_bounds_are_refused() -> None:
    with pytest.raises(BadInput, match="must grow"):
        Gaps(10, 5)
    with pytest.raises(BadInput, match="not 0"):
        Retention(0)
