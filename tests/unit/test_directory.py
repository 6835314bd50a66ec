"""The directory and its members' end of the conversation, without Ray and without a clock."""

import itertools

import pytest

from tiered_kv import announcing
from tiered_kv.announcing import Announcer
from tiered_kv.directory import (
    BEAT_S,
    MAX_PROMISED,
    MISSED_BEATS,
    Announcement,
    Directory,
    GpuMember,
    Member,
)
from tiered_kv.errors import BadSession, UnknownName, Unreachable

GONE_S = BEAT_S * MISSED_BEATS


def member(node_id="a", incarnation=1, host="h1", used=0, actor=None):
    return Member(node_id, incarnation, actor or f"node-{node_id}", host, 1000, used)


def tell(directory, who, now=0.0, beat=1, added=(), gone=(), whole=True):
    return directory.announce(Announcement(who, beat, tuple(added), tuple(gone), whole), now)


class Wire:
    """A `Link` to a directory that can lose calls or their answers, or be another directory."""

    def __init__(self, directory):
        self.directory = directory
        self.lose_calls = self.lose_answers = 0
        self.calls = []

    def call(self, verb, *args, timeout_s, **kwargs):
        if self.lose_calls:
            self.lose_calls -= 1
            raise Unreachable("lost on the way there")
        self.calls.append(args)
        answer = getattr(self.directory, verb)(*args, 0.0, **kwargs)
        if self.lose_answers:
            self.lose_answers -= 1
            raise Unreachable("lost on the way back")
        return answer


def node(wire, sessions, **who):
    return Announcer(wire, lambda: (member(**who), sessions))


def test_a_session_stays_where_it_is_held():
    directory = Directory()
    tell(directory, member("a", used=900), added=["s"])
    tell(directory, member("b", used=0))
    placed = directory.place("s", 1.0)
    assert (placed.member.node_id, placed.kept) == ("a", True)
    assert directory.where("s", 1.0).node_id == "a"


def test_a_new_session_goes_to_the_least_loaded_node_and_stays_there_until_it_is_saved():
    directory = Directory()
    tell(directory, member("a", used=0))
    tell(directory, member("b", used=500))
    assert directory.place("s", 0.0).member.node_id == "a"
    tell(directory, member("a", used=900), beat=2, now=1.0)
    again = directory.place("s", 1.0)
    assert (again.member.node_id, again.kept) == ("a", True)
    assert directory.where("s", 1.0) is None


def test_a_burst_of_new_sessions_is_spread_before_any_of_them_is_announced():
    directory = Directory()
    for name in "abc":
        tell(directory, member(name))
    placed = [directory.place(f"s{i}", 0.0).member.node_id for i in range(9)]
    assert sorted(placed) == sorted("abc" * 3)


def test_a_new_session_prefers_the_callers_host_and_does_without_when_nobody_is_there():
    directory = Directory()
    tell(directory, member("a", host="h1", used=900))
    tell(directory, member("b", host="h2", used=0))
    assert directory.place("s", 0.0, host="h1").member.node_id == "a"
    assert directory.place("t", 0.0, host="h9").member.node_id == "b"


def test_a_directory_that_has_forgotten_believes_what_the_caller_remembers():
    directory = Directory()
    tell(directory, member("a", used=900))
    tell(directory, member("b", used=0))
    assert directory.place("s", 0.0, last="a").member.node_id == "a"
    assert directory.place("t", 0.0, last="dead").member.node_id == "b"


def test_an_empty_directory_says_that_nobody_is_there():
    with pytest.raises(Unreachable, match="no node has announced itself"):
        Directory().place("s", 0.0)


def test_a_bad_session_id_is_refused():
    directory = Directory()
    tell(directory, member("a"))
    with pytest.raises(BadSession, match=r"'\.\./s'"):
        directory.place("../s", 0.0)


def test_an_unknown_policy_is_refused():
    with pytest.raises(UnknownName):
        Directory("nearest")


def test_a_silent_member_is_gone_after_the_missed_beats_and_its_sessions_with_it():
    directory = Directory()
    tell(directory, member("a"), added=["s"])
    tell(directory, member("b"), now=GONE_S)
    assert [m.node_id for m in directory.members(GONE_S)] == ["a", "b"]
    assert [m.node_id for m in directory.members(GONE_S + 0.1)] == ["b"]
    assert directory.where("s", GONE_S + 0.1) is None
    placed = directory.place("s", GONE_S + 0.1)
    assert (placed.member.node_id, placed.kept) == ("b", False)


def test_a_member_that_comes_back_after_expiry_is_asked_for_everything():
    directory = Directory()
    assert tell(directory, member("a"), added=["s"]).known
    late = tell(directory, member("a"), now=GONE_S + 1, beat=2, whole=False)
    assert not late.known
    assert tell(directory, member("a"), now=GONE_S + 1, beat=3, added=["s"]).known
    assert directory.where("s", GONE_S + 1).node_id == "a"


def test_an_older_life_changes_nothing_and_is_told_so():
    directory = Directory()
    tell(directory, member("a", incarnation=2), added=["new"])
    ack = tell(directory, member("a", incarnation=1, used=777), beat=9, added=["old"])
    assert ack.superseded
    assert directory.where("old", 0.0) is None
    assert directory.members(0.0)[0].used_bytes == 0
    assert directory.status(0.0)["counts"] == {"announcements.superseded": 1}


def test_a_newer_life_begins_with_nothing_of_the_older():
    directory = Directory()
    tell(directory, member("a", incarnation=1), beat=50, added=["s", "t"])
    assert tell(directory, member("a", incarnation=2), beat=1, added=["t"]).known
    assert directory.where("s", 0.0) is None
    assert directory.where("t", 0.0).incarnation == 2


def test_a_node_without_a_disk_replaces_its_former_life_under_the_same_actor():
    directory = Directory()
    tell(directory, member("first", actor="node-x"))
    tell(directory, member("second", actor="node-x"))
    assert [m.node_id for m in directory.members(0.0)] == ["second"]


def test_a_beat_that_arrives_after_a_later_one_is_ignored():
    directory = Directory()
    tell(directory, member("a"), beat=1, added=["s"])
    tell(directory, member("a"), beat=3, gone=["s"], whole=False)
    tell(directory, member("a"), beat=2, added=["s"], whole=False)
    assert directory.where("s", 0.0) is None


def test_a_session_that_moved_is_where_it_was_announced_last():
    directory = Directory()
    tell(directory, member("a"), added=["s"])
    tell(directory, member("b"), added=["s"])
    tell(directory, member("a"), beat=2, gone=["s"], whole=False)
    assert directory.where("s", 0.0).node_id == "b"


def test_gpu_actors_belong_to_the_node_below_them_and_expire_alone():
    directory = Directory()
    tell(directory, member("a"))
    directory.announce_gpu(GpuMember("gpu-a-1", "node-a", 5, "HBM"), 0.0)
    directory.announce_gpu(GpuMember("gpu-a-0", "node-a", 5, "HBM"), 1.0)
    directory.announce_gpu(GpuMember("gpu-b-0", "node-b", 5, "HBM"), 1.0)
    assert directory.members(1.0)[0].gpus == ("gpu-a-0", "gpu-a-1")
    assert directory.announce_gpu(GpuMember("gpu-a-0", "node-a", 4, "HBM"), 1.0).superseded
    tell(directory, member("a"), beat=2, now=GONE_S)
    assert directory.members(GONE_S + 0.5)[0].gpus == ("gpu-a-0",)


def test_who_leaves_is_gone_at_once():
    directory = Directory()
    tell(directory, member("a"), added=["s"])
    directory.announce_gpu(GpuMember("gpu-a-0", "node-a", 1, "HBM"), 0.0)
    directory.place("t", 0.0)
    assert directory.leave("gpu-a-0")
    assert directory.members(0.0)[0].gpus == ()
    assert directory.leave("a")
    assert directory.members(0.0) == []
    assert not directory.leave("a")
    assert directory.status(0.0) | {"silent_s": {}, "counts": {}} == {
        "members": 0, "gpus": 0, "sessions": 0, "promised": 0, "silent_s": {}, "counts": {},
    }  # fmt: skip


def test_promises_are_bounded(monkeypatch):
    monkeypatch.setattr("tiered_kv.directory.MAX_PROMISED", 100)
    assert MAX_PROMISED > 100
    directory = Directory()
    tell(directory, member("a"))
    for i in range(300):
        directory.place(f"s{i}", 0.0)
    assert directory.status(0.0)["promised"] == 100


def test_an_announcer_tells_all_once_and_then_only_what_changed():
    wire, held = Wire(Directory()), {"s1", "s2"}
    announcer = node(wire, held)
    announcer.beat()
    held.add("s3")
    held.discard("s1")
    announcer.beat()
    announcer.beat()
    sent = [(set(news.added), set(news.gone), news.whole) for (news,) in wire.calls]
    assert sent == [({"s1", "s2"}, set(), True), ({"s3"}, {"s1"}, False), (set(), set(), False)]


def test_an_announcer_sends_a_long_list_in_bounded_batches(monkeypatch):
    monkeypatch.setattr(announcing, "BATCH", 10)
    wire = Wire(Directory())
    node(wire, {f"s{i}" for i in range(35)}).beat()
    assert [len(news.added) for (news,) in wire.calls] == [10, 10, 10, 5]
    assert [news.whole for (news,) in wire.calls] == [True, False, False, False]
    assert wire.directory.members(0.0)[0].sessions == 35


def test_a_coordinator_that_restarted_knows_everything_after_one_beat(monkeypatch):
    monkeypatch.setattr(announcing, "BATCH", 10)
    wire, held = Wire(Directory()), {f"s{i}" for i in range(25)}
    announcer = node(wire, held)
    announcer.beat()
    wire.directory = Directory()
    announcer.beat()
    assert wire.directory.members(0.0)[0].sessions == 25
    assert all(wire.directory.where(s, 0.0) for s in held)


@pytest.mark.parametrize(("calls", "answers"), [*itertools.product((0, 1, 2), (0, 1, 2))])
def test_whatever_is_lost_on_the_way_the_directory_ends_with_the_truth(monkeypatch, calls, answers):
    monkeypatch.setattr(announcing, "BATCH", 2)
    wire, held = Wire(Directory()), {"s1", "s2", "s3", "s4", "s5"}
    announcer = node(wire, held)
    wire.lose_calls, wire.lose_answers = calls, answers
    announcer.beat()
    held.symmetric_difference_update({"s1", "s2", "s9"})
    for _ in range(calls + answers + 2):
        announcer.beat()
    assert announcer.missed == calls + answers
    seen = {s for s in [f"s{i}" for i in range(12)] if wire.directory.where(s, 0.0)}
    assert seen == held


def test_an_announcer_learns_that_a_later_life_exists():
    wire = Wire(Directory())
    tell(wire.directory, member("a", incarnation=5))
    assert node(wire, set(), incarnation=4).beat()
    assert not node(wire, set(), incarnation=6).beat()
