"""Hints about sessions on real nodes: ends, pauses, predicted returns, wasted bytes, expiry."""

import asyncio
import math
import time
from dataclasses import replace

import pytest
from service_kit import (
    LAYOUT,
    LONG_S,
    Slow,
    Speaker,
    at_rest,
    inside,
    service,
    tokens,
    until,
)

from tiered_kv import node_hints
from tiered_kv.client import Client
from tiered_kv.errors import BadInput, BadSession, UnknownSession
from tiered_kv.types import Held, Medium
from tiered_kv.wire import Ask

STEP, NBYTES = LAYOUT.block_tokens, LAYOUT.block_bytes


def call(link, verb, *args, **kwargs):
    return link.call(verb, *args, timeout_s=LONG_S, **kwargs)


def serving(**sections):
    return service(gpu=False, **sections)


def speaker(one):
    made = Speaker(Client(one))
    for name in ("a", "b"):
        assert made.save(name, tokens(name, 6 * STEP), durable=True).why is None
    return made


def run_of(one, sid):
    return inside(one.host, lambda node: node.keeper.table.get(sid).run)


def sleep(one, sid):
    """Only NVMe has the session's blocks afterwards."""
    run = run_of(one, sid)

    def lose(node):
        book = node.hierarchy.book
        for block in reversed(book.live(run)):
            if block.mask & book.top.bit:
                book.lose(block, book.top)

    inside(one.host, lose)
    return run


def in_pool(one, run):
    return [
        isinstance(a, Held) and a.tiers[0] is Medium.DRAM for a in call(one.to_host, "lookup", run)
    ]


def status(one):
    return call(one.to_host, "status")


def heard(one):
    """What the tiers' policies are told of returns from now on."""
    told = []

    def watch(node):
        expect = node.hierarchy.expect

        def expecting(run, return_s):
            told.append((tuple(run), return_s))
            expect(run, return_s)

        node.hierarchy.expect = expecting

    inside(one.host, watch)
    return told


def test_a_session_that_ended_is_forgotten_and_its_blocks_are_the_first_to_leave():
    with serving(dram={"policy": "adaptive"}) as one:
        who = speaker(one)
        run, other = run_of(one, "a"), run_of(one, "b")
        assert who.wake("a", tokens("a", 6 * STEP)).missed == 0  # the one used last
        told = heard(one)
        who.client.hint("a", ended=True)
        assert told == [(run, math.inf)]
        with pytest.raises(UnknownSession, match="'a'"):
            call(one.to_host, "session", "a")
        assert in_pool(one, run) == [True] * 6
        first = inside(one.host, lambda n: n.hierarchy.book.top.policy.victims(6, bool))
        assert set(first) == set(run)
        assert set(first).isdisjoint(other)
        assert status(one)["counts"]["sessions.ended"] == 1
        one.host.stop()
        one.host.start()
        with pytest.raises(UnknownSession, match="'a'"):
            call(one.to_host, "session", "a")
        assert who.wake("b", tokens("b", 6 * STEP)).missed == 0


def test_a_session_that_ended_stays_as_long_as_somebody_reads_it():
    with serving() as one:
        who = speaker(one)
        inside(one.host, lambda node: node.keeper.table.enter("a"))
        who.client.hint("a", ended=True)
        assert inside(one.host, lambda node: node.keeper.table.find("a")) is not None
        inside(one.host, lambda node: node.keeper.table.leave("a"))
        until(lambda: inside(one.host, lambda n: n.keeper.table.find("a")) is None, "it goes")


@pytest.mark.parametrize("again", ["wake", "save"])
def test_a_session_that_comes_back_although_it_ended_stays(again):
    with serving() as one:
        who = speaker(one)
        inside(one.host, lambda node: node.keeper.table.enter("a"))
        who.client.hint("a", ended=True)
        if again == "wake":
            assert who.wake("a", tokens("a", 6 * STEP)).missed == 0
        else:
            assert who.save("a", tokens("a", 7 * STEP)).why is None
        inside(one.host, lambda node: (node.keeper.table.leave("a"), node._close_leaving()))
        assert inside(one.host, lambda node: node.keeper.table.find("a")) is not None


def test_the_policies_hear_when_a_session_is_expected_back():
    with serving() as one:
        who = speaker(one)
        told = heard(one)
        run = run_of(one, "a")
        who.client.hint("a", stopped="tool_use")
        who.client.hint("a", pause_s=40.0)
        who.client.hint("a", priority=1)
        who.client.hint("a", stopped="end_turn", pause_s=40.0)
        assert [r for r, _ in told] == [run] * 3
        assert 0 < told[0][1] < 60
        assert [s for _, s in told[1:]] == [40.0, 20.0]


def test_a_session_that_is_expected_is_brought_up_before_it_is_asked_for():
    with serving(service={"prefetch": "on_predicted_wake"}) as one:
        who = speaker(one)
        run = sleep(one, "a")
        who.client.hint("a", stopped="tool_use", pause_s=100.0)
        assert in_pool(one, run) == [False] * 6
        inside(one.host, lambda node: setattr(node, "_now", lambda: time.monotonic() + 99.0))
        until(lambda: all(in_pool(one, run)), "it is brought up")
        found = status(one)
        assert found["counts"]["prefetch.predicted"] == 1
        assert found["prefetch"] == {
            "policy": "on_predicted_wake", "brought": 6 * NBYTES, "used": 0, "wasted": 0,
            "pending": 6 * NBYTES,
        }  # fmt: skip
        assert who.wake("a", tokens("a", 6 * STEP)).found == (Medium.DRAM,) * 6
        assert status(one)["prefetch"]["used"] == 6 * NBYTES


def test_what_was_prefetched_is_used_by_a_find_too():
    with serving() as one:
        speaker(one)
        run = sleep(one, "a")
        assert call(one.to_host, "prefetch", "a") > 0
        until(lambda: all(in_pool(one, run)), "it is brought up")
        asked = [Ask(LAYOUT.fingerprint, tuple(run))]
        found = call(one.to_host, "find", asked, 0, 0)
        call(one.to_host, "release", found.leases[0].id)
        assert status(one)["prefetch"]["used"] == 6 * NBYTES


def test_what_leaves_before_it_is_read_is_counted_as_wasted():
    with serving() as one:
        speaker(one)
        run = sleep(one, "a")
        call(one.to_host, "prefetch", "a")
        until(lambda: all(in_pool(one, run)), "it is brought up")
        at_rest(one.host)
        sleep(one, "a")
        until(lambda: status(one)["prefetch"]["wasted"] == 6 * NBYTES, "counted")


def test_a_prefetch_that_finds_no_room_at_once_is_counted_when_it_came():
    with serving() as one:
        who = speaker(one)
        run = sleep(one, "a")
        disk = Slow(one.host.node.parts.nvme)
        for i in range(6):
            assert who.save(f"fill{i}", tokens(f"fill{i}", 5 * STEP)).why is None
        call(one.to_host, "prefetch", "a")
        until(lambda: all(in_pool(one, run)), "it is brought up")
        until(lambda: status(one)["prefetch"]["brought"] == 6 * NBYTES, "all of it is counted")
        assert disk.blocks["read"] == 6


def test_without_prefetching_blocks_come_when_they_are_read():
    with serving(service={"prefetch": "none"}) as one:
        who = speaker(one)
        run = sleep(one, "a")
        assert who.client.prefetch("a") == 0
        assert in_pool(one, run) == [False] * 6
        assert who.wake("a", tokens("a", 6 * STEP)).missed == 0
        assert status(one)["prefetch"]["brought"] == 0


def test_sessions_that_nobody_used_for_long_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr(node_hints, "SWEEP_S", 0.05)
    with serving(service={"session_ttl_s": 1000.0}) as one:
        speaker(one)

        def age(node):
            table = node.keeper.table
            for sid in ("a", "b"):
                old = table.get(sid)
                table._sessions[sid] = replace(old, used_s=old.used_s - 2000.0)
            table.enter("b")

        run = run_of(one, "a")
        inside(one.host, age)
        until(lambda: status(one)["counts"].get("sessions.expired") == 1, "a has expired")
        assert [row["id"] for row in call(one.to_host, "list_sessions")] == ["b"]
        assert in_pool(one, run) == [True] * 6
        inside(one.host, lambda node: node.keeper.table.leave("b"))
        until(lambda: status(one)["counts"]["sessions.expired"] == 2, "b has expired")


def test_without_a_time_to_live_sessions_stay(monkeypatch):
    monkeypatch.setattr(node_hints, "SWEEP_S", 0.01)
    with serving(service={"session_ttl_s": 0}) as one:
        speaker(one)

        def age(node):
            old = node.keeper.table.get("a")
            node.keeper.table._sessions["a"] = replace(old, used_s=1.0)

        inside(one.host, age)
        call(one.to_host, "flush")
        asyncio.run_coroutine_threadsafe(
            one.host.node._expire_sessions(), one.host.runner._loop
        ).result(LONG_S)
        assert len(call(one.to_host, "list_sessions")) == 2


def test_a_gpus_node_passes_hints_on_and_takes_them_to_heart():
    with service() as one:
        client = Client(one)
        who = Speaker(client)
        who.save("a", tokens("a", 3 * STEP))
        told = []
        inside(one.gpu, lambda node: setattr(
            node.hierarchy, "expect", lambda run, s: told.append((len(run), s))))  # fmt: skip
        client.hint("a", stopped="tool_use", pause_s=7.0)
        client.hint("a", ended=True)
        assert told == [(3, 7.0), (3, math.inf)]
        with pytest.raises(UnknownSession):
            client.hint("a", priority=1)
        at_rest(one.gpu)


@pytest.mark.parametrize(
    ("error", "says", "hint"),
    [
        (UnknownSession, "'nobody'", {"sid": "nobody"}),
        (BadSession, "'a/b'", {"sid": "a/b"}),
        (BadInput, "ended .* not 1", {"ended": 1}),
        (BadInput, "stopped .* not ''", {"stopped": ""}),
        (BadInput, "stopped .* not 7", {"stopped": 7}),
        (BadInput, "stopped .* characters, not 'xxx", {"stopped": "x" * 100}),
        (BadInput, "pause_s .* not -1", {"pause_s": -1}),
        (BadInput, "pause_s .* not nan", {"pause_s": math.nan}),
        (BadInput, "priority .* not 9", {"priority": 9}),
        (BadInput, "priority .* not 0.5", {"priority": 0.5}),
    ],
)
def test_a_bad_hint_names_its_value_and_changes_nothing(hinted, error, says, hint):
    one, told = hinted
    with pytest.raises(error, match=says) as caught:
        call(one.to_host, "hint", **({"sid": "a"} | hint))
    assert type(caught.value) is error
    assert told == []
    assert len(call(one.to_host, "list_sessions")) == 2


@pytest.fixture(scope="module")
def hinted():
    with serving() as one:
        speaker(one)
        yield one, heard(one)
