"""Asking the directory never keeps a request waiting, and prefetching never fails one."""

import threading
from collections import Counter
from typing import Any

import pytest

from tiered_kv.directory import Member
from tiered_kv.errors import UnknownSession, Unreachable
from tiered_kv.integrations.ray_serve import companion, whereabouts
from tiered_kv.integrations.ray_serve.companion import MAX_WAITING, Companion
from tiered_kv.integrations.ray_serve.view import Placed
from tiered_kv.integrations.ray_serve.whereabouts import Whereabouts
from tiered_kv.residence import Residence
from tiered_kv.sessions import session_id
from tiered_kv.types import Medium

SOON_S = 30.0


class Cluster:
    """A directory whose one session is on Ray node abc; it answers when `gate` is open."""

    host = "here"
    config: Any = None

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []

    def where(self, session: str) -> Member | None:
        assert self.gate.wait(SOON_S)
        self.asked.append(session)
        return Member("id", 1, "node-abc", self.host) if session == "known" else None

    def resident(self, member: Member, session: str) -> Residence:
        assert (member.actor, session) == ("node-abc", "known")
        return Residence(100, 80, {Medium.NVME: 5}, 0.25)

    def members(self) -> list[Member]:
        return [Member("id", 1, "node-xyz", "elsewhere"), Member("id", 1, "node-abc", self.host)]

    def link(self, member: Member) -> Any:
        return Node(member.actor)


class Node:
    """A node actor; `fails` is what the next calls raise."""

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self.fails: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def call(self, verb: str, session: str, timeout_s: float) -> int:
        assert (verb, timeout_s > 0) == ("prefetch", True)
        assert self.gate.wait(SOON_S)
        if self.fails is not None:
            raise self.fails
        return 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    one = Cluster()
    monkeypatch.setattr(whereabouts, "connect", lambda *args, **kwargs: one)
    monkeypatch.setattr(companion, "connect", lambda *args, **kwargs: one)
    return one


async def test_an_answer_in_time_is_used_and_kept(cluster: Cluster):
    asking = Whereabouts("kv", ask_s=SOON_S)
    for _ in range(3):
        assert await asking.find("known") == Placed("abc", 80, 0.25)
        assert await asking.find("unknown") is None
    assert cluster.asked == ["known", "unknown"]


async def test_a_late_answer_serves_the_next_request(cluster: Cluster):
    cluster.gate.clear()
    asking = Whereabouts("kv", ask_s=0.001)
    assert await asking.find("known") is None
    assert await asking.find("known") is None  # asked only once
    cluster.gate.set()
    asking._pool.shutdown(wait=True)
    assert await asking.find("known") == Placed("abc", 80, 0.25)
    assert cluster.asked == ["known"]


async def test_a_service_that_is_away_is_not_asked_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
):
    tried: list[str] = []

    def away(*args: Any, **kwargs: Any) -> Any:
        tried.append("connect")
        raise Unreachable("no service runs")

    monkeypatch.setattr(whereabouts, "connect", away)
    asking = Whereabouts("kv", ask_s=SOON_S)
    for session in ("a", "b", "c"):
        assert await asking.find(session) is None
    assert tried == ["connect"]


async def test_a_failure_that_nobody_expects_is_no_answer_and_the_next_request_asks_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    asking = Whereabouts("kv", ask_s=SOON_S)
    monkeypatch.setattr(whereabouts, "FRESH_S", 0.0)
    monkeypatch.setattr(cluster, "where", lambda session: 1 / 0)
    assert await asking.find("known") is None
    monkeypatch.undo()
    monkeypatch.setattr(whereabouts, "FRESH_S", 0.0)
    assert await asking.find("known") == Placed("abc", 80, 0.25)


def joined(cluster: Cluster) -> tuple[Companion, Counter[str]]:
    counts: Counter[str] = Counter()
    one = Companion("abc", counts)
    there = threading.Event()
    one.start(there.set)
    assert there.wait(SOON_S)
    return one, counts


def test_sessions_are_brought_up_by_the_node_of_this_host(cluster: Cluster):
    one, counts = joined(cluster)
    node: Any = one._node
    assert node.actor == "node-abc"
    one.prefetch(session_id("s"))
    one._pool.shutdown(wait=True)
    assert counts == {"prefetch.asked": 1}


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (UnknownSession("no session 's' is held here"), "prefetch.unknown"),
        (Unreachable("gone"), "prefetch.failed"),
        (RuntimeError("nobody expects this"), "prefetch.failed"),
    ],
)
def test_what_goes_wrong_is_counted(cluster: Cluster, error: Exception, counted: str):
    one, counts = joined(cluster)
    node: Any = one._node
    node.fails = error
    one.prefetch(session_id("s"))
    one._pool.shutdown(wait=True)
    assert counts == {counted: 1}


def test_a_slow_node_is_not_asked_for_more_than_it_can_answer(cluster: Cluster):
    one, counts = joined(cluster)
    node: Any = one._node
    node.gate.clear()
    for _ in range(MAX_WAITING + 3):
        one.prefetch(session_id("s"))
    assert counts == {"prefetch.dropped": 3}
    node.gate.set()
    one._pool.shutdown(wait=True)
    assert counts == {"prefetch.dropped": 3, "prefetch.asked": MAX_WAITING}


def test_before_there_is_a_node_and_after_the_end_nothing_is_asked():
    counts: Counter[str] = Counter()
    one = Companion("abc", counts)
    one.prefetch(session_id("s"))
    one.close()
    one.close()
    one.prefetch(session_id("s"))
    assert counts == {"prefetch.no_node": 2}
