"""What is expected of sessions, and what prefetching them wasted."""

import math

import pytest

from tiered_kv.outlooks import Outlooks
from tiered_kv.policies.prefetch import NoPrefetch, OnPredictedWake, OnRequest, Wasted
from tiered_kv.types import BlockKey, SessionId

A, B = SessionId("a"), SessionId("b")


def key(n):
    return BlockKey(n.to_bytes(16, "big"))


KEYS = [key(i) for i in range(4)]


@pytest.fixture
def outlooks():
    return Outlooks(OnPredictedWake())


def test_the_policy_says_whether_an_arrival_is_brought_up():
    assert Outlooks(OnRequest()).arrived(A, 0.0)
    assert not Outlooks(NoPrefetch()).arrived(A, 0.0)


def test_a_stop_reason_is_learned_from(outlooks):
    for i in range(400):
        outlooks.stopped(A, "lunch", None, 10_000.0 * i)
        outlooks.arrived(A, 10_000.0 * i + 3600)
    assert outlooks.stopped(B, "lunch", None, 1e7) == pytest.approx(3600, rel=0.2)


def test_a_pause_that_is_known_counts_for_more_than_what_was_learned(outlooks):
    assert outlooks.stopped(A, "tool_use", 120.0, 0.0) == 120.0
    assert outlooks.due(117.0) == []
    assert outlooks.due(118.5) == [A]


def test_a_session_of_higher_priority_is_taken_to_be_back_sooner(outlooks):
    outlooks.prioritise(A, 2)
    outlooks.prioritise(B, -1)
    assert outlooks.stopped(A, None, 100.0, 0.0) == 25.0
    assert outlooks.stopped(B, None, 100.0, 0.0) == 200.0
    outlooks.ended(A)
    assert outlooks.stopped(A, None, 100.0, 0.0) == 100.0


def test_a_session_that_ended_is_not_brought_up(outlooks):
    outlooks.stopped(A, "end_turn", 60.0, 0.0)
    outlooks.ended(A)
    assert outlooks.due(1e6) == []
    assert outlooks.retention.outlook(A, 1e6).return_s == math.inf


def test_what_was_brought_and_read_was_used_and_what_had_left_was_wasted(outlooks):
    outlooks.brought(A, KEYS, 100)
    outlooks.brought(A, KEYS, 100)  # again: they are on their way
    assert outlooks.wasted() == Wasted(brought=400, used=0, wasted=0, pending=400)
    outlooks.read([key(9), *KEYS], lambda key: key != KEYS[3])
    assert outlooks.wasted() == Wasted(brought=400, used=300, wasted=100, pending=0)
    outlooks.read(KEYS, lambda key: True)
    assert outlooks.wasted().used == 300


def test_what_leaves_before_it_is_read_is_wasted(outlooks):
    outlooks.brought(A, KEYS[:2], 100)
    outlooks.brought(B, KEYS[2:], 100)
    outlooks.sweep(lambda key: key == KEYS[0], sessions=1)
    assert outlooks.wasted().wasted == 100
    outlooks.sweep(lambda key: key == KEYS[0], sessions=1)
    assert outlooks.wasted() == Wasted(brought=400, used=0, wasted=300, pending=100)
    outlooks.brought(B, KEYS[2:], 100)  # it may come again
    assert outlooks.wasted().brought == 600


def test_what_was_brought_for_a_session_that_ends_is_wasted(outlooks):
    outlooks.brought(A, KEYS, 1)
    outlooks.ended(A)
    assert outlooks.wasted() == Wasted(brought=4, used=0, wasted=4, pending=0)


def test_memory_is_bounded(outlooks, monkeypatch):
    monkeypatch.setattr("tiered_kv.outlooks.MAX_BROUGHT", 3)
    monkeypatch.setattr("tiered_kv.outlooks.MAX_SESSIONS", 3)
    for i in range(10):
        outlooks.brought(SessionId(f"s{i}"), [key(i)], 1)
        outlooks.prioritise(SessionId(f"s{i}"), 1)
    assert outlooks.wasted() == Wasted(brought=10, used=0, wasted=7, pending=3)
    assert (len(outlooks._brought), len(outlooks._whose), len(outlooks._priority)) == (3, 3, 3)
