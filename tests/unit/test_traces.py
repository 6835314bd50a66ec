"""Trace files of all formats, small ones made here: what is read from them, and what is refused."""

import gzip
import io
import json
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.recorded import HEADER, Recorder
from tiered_kv.sim import claude_code
from tiered_kv.sim.replay import replay
from tiered_kv.sim.traces import Request, Trace
from tiered_kv.testing.policies import block_keys
from tiered_kv.types import BlockKey


def mooncake_line(at_ms: Any, ids: Any) -> str:
    line = {"timestamp": at_ms, "input_length": 1, "output_length": 1, "hash_ids": ids}
    return json.dumps(line) + "\n"


def session(start_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A coding session with a shared prompt of two whole blocks of 512 tokens."""
    return {"id": "s", "start_s": start_s, "bs": 64, "tool": 512, "sys": 512, "reqs": [], **fields}


def request(at_s: float, *runs: list[int], model: str = "m") -> list[Any]:
    return [at_s, 0, 0, 0.0, 0.0, "end_turn", model, list(runs)]


def write(file: Path, *sessions: dict[str, Any]) -> Trace:
    text = "".join(json.dumps(one) + "\n" for one in sessions)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return Trace(file, "claude-code")


def test_mooncake_ids_are_the_same_key_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(mooncake_line(1000, [1, 2, 3]) + mooncake_line(1500, [1, 2, 7]))
    one, two = Trace(file, "mooncake")
    assert (one.at_s, two.at_s) == (0.0, 0.5)
    assert one.run[:2] == two.run[:2]
    assert one.run[2] != two.run[2]
    assert {len(key) for key in one.run} == {16}


def test_a_trace_can_be_read_twice_and_tells_its_size_and_name(tmp_path: Path) -> None:
    file = tmp_path / "hour.of.chat.jsonl"
    file.write_text("".join(mooncake_line(i, [i]) for i in range(5)))
    trace = Trace(file, "mooncake")
    assert list(trace) == list(trace)
    assert [request.run for request in trace] == list(trace.runs())
    assert trace.size() == 5
    assert trace.name == "hour"


def test_a_stream_is_read_no_further_than_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(mooncake_line(i, [i]) for i in range(20_000)) + "garbage\n")
    assert len(list(islice(Trace(file, "mooncake"), 10_000))) == 10_000


@pytest.mark.parametrize("form", ["mooncake", "recorded"])
def test_a_long_stream_is_replayed_in_the_memory_of_its_cache(tmp_path: Path, form: str) -> None:
    file, requests, blocks = tmp_path / "t.jsonl", 8_000, 50
    with file.open("w") as out:
        recorder = Recorder(out) if form == "recorded" else None
        for i in range(requests):
            ids = range(i * blocks, (i + 1) * blocks)
            if recorder is None:
                out.write(mooncake_line(i, list(ids)))
            else:
                recorder.write(float(i), [BlockKey(j.to_bytes(16, "big")) for j in ids], 1)
    tracemalloc.start()
    try:
        found = replay(Trace(file, form), "lru", 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.requests, found.accesses) == (requests, requests * blocks)
    assert peak < file.stat().st_size / 3, "400,000 keys would take 20 MB"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("garbage\n", "not JSON"),
        ("[1]\n", "a request has timestamp"),
        ('{"timestamp": 1}\n', "a request has timestamp"),
        (mooncake_line(-1, [1]), "timestamp -1 is no time"),
        (mooncake_line("1", [1]), "timestamp '1' is no time"),
        (mooncake_line(0, "12"), "hash_ids must be a list"),
        (mooncake_line(9, [1, -2]), "hash_ids must be a list"),
        (mooncake_line(9, [1, 1.5]), "hash_ids must be a list"),
        (mooncake_line(4, [1]), "before that of the line before"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(mooncake_line(5, [1]) + mooncake_line(6, [2]) + line)
    with pytest.raises(BadInput, match=rf"^{file}:3: .*{why}"):
        list(Trace(file, "mooncake"))


def test_a_block_that_is_named_twice_in_a_request_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(mooncake_line(5, [1]) + mooncake_line(6, [2, 3, 2]))
    with pytest.raises(BadInput, match=r"request 2 names a block twice"):
        list(Trace(file, "mooncake"))


@pytest.mark.parametrize("form", ["mooncake", "claude-code"])
def test_a_file_without_a_request_is_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "t").write_text("\n")
    with pytest.raises(BadInput, match="no request in it"):
        list(Trace(tmp_path / "t", form))


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="'csv' is not one of mooncake, claude-code, recorded"):
        Trace(tmp_path / "t", "csv")


def test_small_blocks_are_put_together_and_an_incomplete_tail_is_dropped(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", session(reqs=[request(1.0, [1, 16], [40, 15])]))
    (found,) = trace
    assert found.at_s == 1.0
    assert len(found.run) == (16 + 15) // 8


def test_equal_ids_are_equal_keys_only_after_the_same_prefix(tmp_path: Path) -> None:
    reqs = [request(0, [1, 40]), request(1, [1, 48]), request(2, [1, 24], [100, 8], [33, 16])]
    first, grown, edited = (r.run for r in write(tmp_path / "t", session(reqs=reqs)))
    assert list(grown[:5]) == list(first)
    assert list(edited[:3]) == list(first[:3])
    assert not set(edited[3:]) & set(grown)


def test_sessions_share_their_prompt_and_nothing_else(tmp_path: Path) -> None:
    ids = request(0, [1, 32])
    trace = write(
        tmp_path / "t.gz",
        session(0.0, id="a", reqs=[ids]),
        session(1.0, id="b", reqs=[ids, request(5, [1, 32], model="other")]),
        session(2.0, id="c", reqs=[ids], sys=0),
    )
    a, b, c, other = (r.run for r in trace)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert not set(a) & set(c)
    assert not set(b) & set(other)


def test_requests_of_sessions_and_sub_agents_come_in_order_of_time(tmp_path: Path) -> None:
    agent = {"t": 10.0, "tool": 0, "sys": 0, "reqs": [request(3.0, [1, 8]), request(30.0, [1, 8])]}
    trace = write(
        tmp_path / "t",
        session(100.0, id="late", reqs=[request(0.0, [1, 8]), agent, request(20.0, [1, 8])]),
        session(50.0, id="early", reqs=[request(0.0, [1, 8]), request(70.0, [1, 8])]),
    )
    found = list(trace)
    assert [r.at_s for r in found] == [50.0, 100.0, 113.0, 120.0, 120.0, 140.0]
    assert trace.size() == claude_code.count(tmp_path / "t") == 6
    assert found[2].run == found[5].run  # the sub-agent's own
    assert found[2].run != found[3].run


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in session().items() if k != field}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[]", "a line is a JSON object"),
        (json.dumps(without("tool")), "no 'tool'"),
        (json.dumps(session(bs=100)), "bs 100 does not divide 512"),
        (json.dumps(session(bs=0)), "bs 0 does not divide 512"),
        (json.dumps(session(start_s=-1.0)), "start_s is -1.0"),
        (json.dumps(session(reqs=[request(-1.0, [1, 8])])), "the time of a request is -1.0"),
        (json.dumps(session(reqs=[request(0.0, [1, -8])])), "a count is -8"),
        (json.dumps(session(reqs=[request(0.0, [1, 10**12])])), "more than"),
        (json.dumps(session(reqs=[request(0.0, [1])])), "not a session"),
        (json.dumps(session(reqs=[[0.0]])), "not a session"),
        (json.dumps(session(reqs=[7])), "not a session"),
        (json.dumps(session(reqs=7)), "not a session"),
    ],
)
def test_a_bad_session_is_named_with_file_and_number(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "t"
    file.write_text(json.dumps(session(reqs=[request(0, [1, 8])])) + "\n" + line + "\n")
    with pytest.raises(BadInput, match=rf"^{file}:2: .*{why}"):
        list(Trace(file, "claude-code"))


def test_a_damaged_archive_is_told_with_the_line_where_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "t.gz"
    write(file, *(session(reqs=[request(i, [i, 8])], id=f"{i}{i * i}") for i in range(500)))
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(BadInput, match=rf"^{file}:\d+: the file is damaged"):
        list(Trace(file, "claude-code"))


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    run = [BlockKey(key.ljust(16, b"\0")) for key in block_keys(5)]
    with file.open("w") as out:
        recorder = Recorder(out)
        recorder.write(1.5, run, 1 << 20)
        recorder.write(2.0, run[:2], 1 << 20)
        recorder.write(2.0, (), 1 << 20)
    wanted = [Request(1.5, run), Request(2.0, run[:2]), Request(2.0, [])]
    assert list(Trace(file, "recorded")) == wanted


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("?", "not JSON"),
        ("[]", "a JSON object"),
        ('{"t": -1, "keys": ""}', "t -1 is no time"),
        ('{"t": 4, "keys": ""}', "t 4 is no time in seconds from 5 on"),
        ('{"keys": ""}', "t None is no time"),
        ('{"t": 6}', "keys must be hex digits"),
        ('{"t": 6, "keys": "xy"}', "keys must be hex digits"),
        ('{"t": 6, "keys": "abcd"}', "32 hex digits a block"),
    ],
)
def test_a_bad_recorded_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "t"
    out = io.StringIO()
    Recorder(out).write(5.0, (), 1)
    file.write_text(out.getvalue() + line + "\n")
    with pytest.raises(BadInput, match=rf"^{file}:3: .*{why}"):
        list(Trace(file, "recorded"))


def test_a_recording_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(json.dumps(HEADER | {"version": 2}) + "\n")
    with pytest.raises(BadInput, match=r":1: not a recorded trace of version 1"):
        list(Trace(tmp_path / "t", "recorded"))
