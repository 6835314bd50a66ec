"""A node records its own trace, which `tiered-kv replay` reads; and tells block events."""

import json

import pytest
from cli_kit import call as cli
from service_kit import LAYOUT, LONG_S, Speaker, inside, service, tokens, until

from tiered_kv import recording
from tiered_kv.client import Client
from tiered_kv.errors import BadInput
from tiered_kv.recorded import Recorder
from tiered_kv.recording import Recording
from tiered_kv.sim.traces import Trace
from tiered_kv.types import Medium
from tiered_kv.wire import Ask

STEP, NBYTES = LAYOUT.block_tokens, LAYOUT.block_bytes


def call(link, verb, *args, **kwargs):
    return link.call(verb, *args, timeout_s=LONG_S, **kwargs)


def status(one):
    return call(one.to_host, "status")


def run_of(one, sid):
    return inside(one.host, lambda node: node.keeper.table.get(sid).run)


def test_a_recording_has_each_request_and_can_be_replayed(tmp_path):
    file = tmp_path / "trace.jsonl"
    with service(gpu=False, service={"record": str(file)}) as one:
        who = Speaker(Client(one))
        who.save("a", tokens("secret words", 4 * STEP))
        who.wake("a", tokens("secret words", 4 * STEP))
        run = run_of(one, "a")
        found = call(one.to_host, "find", [Ask(LAYOUT.fingerprint, run)], 0, 0)
        call(one.to_host, "release", found.leases[0].id)
        one.host.stop()
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert [line["verb"] for line in lines] == ["save", "wake", "find"]
    assert {line["block_bytes"] for line in lines} == {NBYTES}
    assert [tuple(request.run) for request in Trace(file, "recorded")] == [run] * 3
    ended = cli("replay", str(file), "--format", "recorded", "--policy", "lru", "--blocks", "100",
                "--json", str(tmp_path / "out.json"))  # fmt: skip
    assert ended.code == 0, ended.err
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["value"] == pytest.approx(100 * 8 / 12)


def test_a_running_node_writes_every_second_and_status_says_what(tmp_path):
    file = tmp_path / "trace"
    with service(gpu=False, service={"record": str(file)}) as one:
        Speaker(Client(one)).save("a", tokens("a", STEP))
        until(lambda: status(one)["recording"]["requests"] == 1, "written")
        assert len(file.read_text().splitlines()) == 2
        assert status(one)["recording"] == {
            "file": str(file), "on": True, "requests": 1, "left_out": 0
        }  # fmt: skip


def test_the_next_life_does_not_write_over_the_recording_of_the_last(tmp_path):
    file = tmp_path / "trace"
    with service(gpu=False, service={"record": str(file)}) as one:
        for _ in range(2):
            Speaker(Client(one)).save("a", tokens("a", STEP))
            one.host.stop()
            one.host.start()
        one.host.stop()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["trace", "trace.1"]
    assert all(len(list(Trace(f, "recorded"))) == 1 for f in tmp_path.iterdir())


def test_a_folder_that_is_not_there_ends_the_recording_and_nothing_else():
    ends_with_one_remark("/nowhere/at/all/trace")


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    def full(self):
        self._file = open("/dev/full", "w")  # noqa: SIM115
        self._recorder = Recorder(self._file)
        return self._recorder

    monkeypatch.setattr(Recording, "_open", full)
    ends_with_one_remark(str(tmp_path / "trace"))


def ends_with_one_remark(path):
    with service(gpu=False, service={"record": path}) as one:
        who = Speaker(Client(one))
        who.save("a", tokens("a", STEP))
        until(lambda: not status(one)["recording"]["on"], "it has ended")
        remarks = [e for e in status(one)["errors"] if "recording to" in e["text"]]
        assert [remark["times"] for remark in remarks] == [1]
        assert who.wake("a", tokens("a", STEP)).missed == 0
        one.host.stop()


def test_requests_that_cannot_be_kept_are_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_KEYS", 3)
    with service(gpu=False, service={"record": str(tmp_path / "trace")}) as one:
        Speaker(Client(one)).save("a", tokens("a", 4 * STEP))
        assert status(one)["recording"]["left_out"] == 1


def test_nothing_is_recorded_unless_it_is_asked_for():
    with service(gpu=False) as one:
        Speaker(Client(one)).save("a", tokens("a", STEP))
        assert status(one)["recording"] == {
            "file": "", "on": False, "requests": 0, "left_out": 0
        }  # fmt: skip


def test_what_a_gpu_demotes_is_no_request_of_its_host(tmp_path):
    file = tmp_path / "trace"
    with service(service={"record": str(file)}) as one:
        who = Speaker(Client(one))
        who.save("a", tokens("a", 3 * STEP), durable=True)
        one.gpu.stop()
        one.host.stop()
    (written,) = tmp_path.iterdir()  # the host was asked for nothing
    assert len(list(Trace(written, "recorded"))) == 1


# -- block events ---------------------------------------------------------------------------


def test_a_node_tells_which_blocks_came_and_left():
    with service(gpu=False) as one:
        who = Speaker(Client(one))
        who.save("a", tokens("a", 2 * STEP), durable=True)
        run = run_of(one, "a")
        first = call(one.to_host, "events", 0)
        assert first.first == first.next > 0
        assert {(e.key, e.medium) for e in first.items} == {
            (key, medium) for key in run for medium in (Medium.DRAM, Medium.NVME)
        }
        assert all(e.stored for e in first.items)
        call(one.to_host, "close_session", "a")
        then = call(one.to_host, "events", first.next)
        assert then.first == first.next
        assert [e.number for e in then.items] == list(range(then.first, then.next))
        gone = {(e.key, e.medium) for e in then.items if not e.stored}
        assert gone == {(e.key, e.medium) for e in first.items}
        one.host.stop()
        one.host.start()
        assert call(one.to_host, "events", then.next).first > then.next
        for bad in (-1, 1.5, "x", None):
            with pytest.raises(BadInput, match="since"):
                call(one.to_host, "events", bad)


def test_events_cost_nothing_until_somebody_asks():
    with service(gpu=False) as one:
        assert inside(one.host, lambda node: node.hierarchy.book.watch) is None
