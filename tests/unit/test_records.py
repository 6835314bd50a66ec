"""Sessions as bytes: a round trip for all of them, and one kind of error for all other bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv import records
from tiered_kv.errors import BadInput
from tiered_kv.sessions import Session, check_session
from tiered_kv.types import BlockKey, Fingerprint, SessionId

NAMES = st.from_regex(r"[A-Za-z0-9_:@+=~-]{1,128}", fullmatch=True)


@st.composite
def sessions(draw):
    run = draw(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=20))
    n_tokens = draw(st.integers(len(run), len(run) * 256)) if run else 0
    with_tokens = draw(st.booleans())
    tokens = draw(st.binary(min_size=16, max_size=16)) * (n_tokens // 4 + 1)
    return Session(
        SessionId(draw(NAMES)),
        Fingerprint(draw(st.binary(min_size=16, max_size=16))),
        tuple(map(BlockKey, run)),
        n_tokens,
        bool(run) and draw(st.booleans()),
        draw(st.floats(0.0, 1e11)),
        tokens[: 4 * n_tokens] if with_tokens else b"",
    )


ONE = Session(
    SessionId("chat"), Fingerprint(b"L" * 16), (BlockKey(b"k" * 16),), 3, True, 1.5, bytes(12)
)


def made_of(header, rest=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + text + rest


def header_of(record):
    size = int.from_bytes(record[:4], "little")
    return json.loads(record[4 : 4 + size]), record[4 + size :]


@given(sessions())
def test_every_session_comes_back_as_it_was(session):
    assert records.load(records.dump(session)) == session


@given(sessions(), st.data())
def test_a_torn_record_is_refused(session, data):
    whole = records.dump(session)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadInput):
        records.load(whole[:cut])
    with pytest.raises(BadInput):
        records.load(whole + b"x")


@given(st.binary(max_size=400))
def test_garbage_is_refused(data):
    with pytest.raises(BadInput):
        records.load(data)


@given(sessions(), st.data())
def test_a_record_with_one_wrong_byte_is_refused_or_is_a_sound_session(session, data):
    record = bytearray(records.dump(session))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    try:
        found = records.load(bytes(record))
    except BadInput:
        return
    assert check_session(found) is found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2), ("version", None), ("blocks", -1), ("blocks", 1.0), ("blocks", True),
        ("token_bytes", -12), ("token_bytes", "12"), ("n_tokens", "3"), ("n_tokens", 10**30),
        ("n_tokens", -3), ("tail", 1), ("tail", None), ("used_s", float("nan")),
        ("used_s", float("inf")), ("used_s", "1"), ("used_s", -1.0), ("layout", "zz"),
        ("layout", "00"), ("layout", 7), ("id", "../x"), ("id", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(field, value):
    header, rest = header_of(records.dump(ONE))
    assert records.load(made_of(header, rest)) == ONE
    with pytest.raises(BadInput):
        records.load(made_of(header | {field: value}, rest))
    del header[field]
    with pytest.raises(BadInput):
        records.load(made_of(header, rest))


def test_counts_that_cancel_each_other_out_are_refused():
    header, rest = header_of(records.dump(ONE))
    assert len(rest) == 16 + 12
    with pytest.raises(BadInput):
        records.load(made_of(header | {"blocks": -1, "token_bytes": 16 + 28}, rest))


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b"[]", b"7", b"\xff", b'{"version": 1}', b"1" * 5000], ids=len
)
def test_a_header_that_is_no_object_is_refused(header):
    with pytest.raises(BadInput):
        records.load(made_of(header))
