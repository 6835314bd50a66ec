"""The session table: supersession, forks, closing, states; and what a session id may be."""

from dataclasses import replace

import pytest

from tiered_kv.errors import BadInput, BadSession, UnknownSession
from tiered_kv.sessions import Session, SessionTable, State, check_session, session_id
from tiered_kv.types import BlockKey, Fingerprint, SessionId

LAYOUT = Fingerprint(b"L" * 16)
STEP = 4


def keys_of(*numbers):
    return tuple(BlockKey(n.to_bytes(16, "big")) for n in numbers)


def session(name, *numbers, tail=False, used_s=100.0):
    run = keys_of(*numbers)
    n_tokens = STEP * len(run) - (1 if tail else 0)
    return Session(SessionId(name), LAYOUT, run, n_tokens, tail, used_s, bytes(4 * n_tokens))


@pytest.fixture
def table():
    return SessionTable(recent_s=60.0)


@pytest.mark.parametrize("good", ["a", "A-z_0:9@x+y=~", "x" * 128])
def test_ordinary_names_are_session_ids(good):
    assert session_id(good) == good


@pytest.mark.parametrize(
    "bad",
    [
        "", ".", "..", "a/b", "/etc/passwd", "../../x", "a.b", "a\0b", "a\n", "a b", "é",
        "\N{GRINNING FACE}" * 2560, "x" * 129, None, 7, b"a", ["a"],
    ],
    ids=lambda bad: repr(bad)[:12],
)  # fmt: skip
def test_other_names_are_refused_with_a_short_message_that_shows_them(bad):
    with pytest.raises(BadSession, match="is not 1 to 128 of the characters") as caught:
        session_id(bad)
    assert repr(bad)[:20] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_turn_supersedes_the_incomplete_block_of_the_turn_before(table):
    assert table.save(session("s", 1, 2, 30, tail=True)) == []
    assert table.save(session("s", 1, 2, 3, 40, tail=True)) == list(keys_of(30))
    assert table.get("s").run == keys_of(1, 2, 3, 40)


def test_a_complete_last_block_is_never_superseded(table):
    table.save(session("s", 1, 2))
    assert table.save(session("s", 1, 5)) == []


def test_an_incomplete_block_that_the_new_turn_still_has_is_kept(table):
    table.save(session("s", 1, 20, tail=True))
    assert table.save(session("s", 1, 20, tail=True)) == []


def test_an_incomplete_block_that_a_fork_ends_with_is_not_superseded(table):
    table.save(session("s", 1, 20, tail=True))
    table.fork("s", "f", 200.0)
    assert table.save(session("s", 1, 2, 30, tail=True)) == []
    assert table.save(session("f", 1, 2, 31, tail=True)) == list(keys_of(20))


def test_a_fork_has_the_same_run_and_a_name_that_was_free(table):
    table.save(session("s", 1, 2))
    assert table.fork("s", "f", 200.0) == replace(table.get("s"), id="f", used_s=200.0)
    with pytest.raises(BadInput, match="session 'f' exists already"):
        table.fork("s", "f", 201.0)
    with pytest.raises(UnknownSession, match="no session 'nobody' is held here"):
        table.fork("nobody", "g", 201.0)
    assert sorted(s.id for s in table) == ["f", "s"]


def test_closing_gives_up_what_no_other_session_ends_with(table):
    table.save(session("long", 1, 2, 3, 4))
    table.save(session("short", 1, 2))
    assert table.close("long") == list(keys_of(3, 4))
    assert table.close("short") == list(keys_of(1, 2))
    assert len(table) == 0


def test_closing_one_of_two_equal_sessions_gives_up_nothing(table):
    table.save(session("s", 1, 2))
    table.fork("s", "f", 200.0)
    assert table.close("s") == []
    assert table.close("f") == list(keys_of(1, 2))


def test_closing_an_unknown_session_changes_nothing(table):
    table.save(session("s", 1))
    with pytest.raises(UnknownSession):
        table.close("t")
    assert table.close("s") == list(keys_of(1))


def test_saving_again_does_not_count_a_last_block_twice(table):
    for _ in range(3):
        table.save(session("s", 1, 2))
    assert table.close("s") == list(keys_of(1, 2))


def test_states_follow_use_and_activity(table):
    table.save(session("s", 1, used_s=100.0))
    assert table.state(table.get("s"), 159.0) is State.RECENT
    assert table.state(table.get("s"), 160.0) is State.IDLE
    table.enter("s")
    table.enter("s")
    table.leave("s")
    assert table.state(table.get("s"), 999.0) is State.ACTIVE
    table.leave("s")
    assert table.state(table.get("s"), 999.0) is State.IDLE
    assert table.state(table.use("s", 998.0), 999.0) is State.RECENT


def test_leaving_after_a_close_is_harmless(table):
    table.save(session("s", 1))
    table.enter("s")
    table.close("s")
    table.leave("s")
    table.save(session("s", 1, used_s=0.0))
    assert table.state(table.get("s"), 999.0) is State.IDLE


def test_an_empty_session_has_no_last_block(table):
    table.save(session("s"))
    assert table.close("s") == []


def test_adopting_takes_over_everything(table):
    table.adopt([session("a", 1, 2), session("b", 1)])
    assert table.close("a") == list(keys_of(2))


def test_a_session_that_fits_together_passes_the_check():
    for good in (session("s"), session("s", 1), session("s", 1, 2, tail=True)):
        assert check_session(good) is good
    assert check_session(replace(session("s", 1), tokens=b"")).tokens == b""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "../x"}, "session id '../x'"),
        ({"run": [b"short"]}, "b'short'"),
        ({"run": keys_of(1, 1)}, "named twice"),
        ({"run": "abc"}, "'abc'"),
        ({"n_tokens": -8}, "-8"),
        ({"n_tokens": 0}, "0 tokens are not 2 blocks"),
        ({"n_tokens": 1}, "1 tokens are not 2 blocks"),
        ({"n_tokens": 8.0}, r"8\.0"),
        ({"tail": 1}, "tail 1"),
        ({"run": (), "n_tokens": 0, "tokens": b"", "tail": True}, "tail True"),
        ({"tokens": bytes(31)}, "4 bytes for each of 8"),
        ({"layout": b"x"}, "fingerprint"),
        ({"used_s": float("nan")}, "nan"),
        ({"used_s": float("inf")}, "inf"),
        ({"used_s": "now"}, "'now'"),
    ],
    ids=str,
)
def test_a_session_that_does_not_is_refused_with_the_value(change, says):
    with pytest.raises(BadInput, match=says):
        check_session(replace(session("s", 1, 2), **change))


def test_what_is_no_session_is_refused():
    with pytest.raises(BadInput, match="a session must be a Session, not 'x'"):
        check_session("x")
