import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from cli_kit import (
    PACKAGE,
    call,
    files_of,
    gone,
    interrupt,
    process,
    running,
    wait_for_line,
)

from tiered_kv import machine
from tiered_kv.bench import (
    churn,
    engine,
    engine_contenders,
    engine_sessions,
    hierarchy,
    io,
    load_or_recompute,
    replay,
)
from tiered_kv.bench.report import Result
from tiered_kv.cli import checks, checks_disk, tables
from tiered_kv.cli import demo as demo_command
from tiered_kv.cli.failures import Stopped, line_of, stoppable
from tiered_kv.cli.options import Options
from tiered_kv.cli.output import Pace, Screen, size
from tiered_kv.cli.root import cli
from tiered_kv.config import Config
from tiered_kv.errors import BadInput
from tiered_kv.folder import Folder
from tiered_kv.gpus import Gpu
from tiered_kv.local import local
from tiered_kv.settings import load
from tiered_kv.sim.traces import Trace


def walk(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from walk(command, *above, name)


ALL = dict(walk(cli))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nothing listens, and RAY_ADDRESS with it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    return address


@pytest.fixture
def small(tmp_path: Path, shm_folder: Path) -> list[str]:
    """Options for a service of a few MB in folders of the test's own."""
    fields = {
        "hbm.bytes": "2MiB", "hbm.device": "cpu", "dram.bytes": "4MiB",
        "dram.folder": str(shm_folder), "nvme.bytes": "8MiB", "nvme.folder": f"{tmp_path}/nvme",
        "nvme.engine": "threads", "nvme.free_floor_bytes": "1MiB",
    }  # fmt: skip
    return [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]


def config_of(small: list[str]) -> Config:
    overrides: dict[str, dict[str, str]] = {}
    for text in small[1::2]:
        name, _, value = text.partition("=")
        section, _, key = name.partition(".")
        overrides.setdefault(section, {})[key] = value
    return load(overrides=overrides, environ={})


# Help and options


@pytest.mark.parametrize("path", [(), ("demo",), ("bench", "churn"), ("sessions", "wake")])
def test_help_imports_neither_torch_nor_ray(path: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom tiered_kv.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit: print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *path, "--help"]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: tiered-kv")
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_arguments_the_program_shows_its_commands() -> None:
    ended = process()
    assert (ended.code, ended.err) == (0, "")
    for name in cli.commands:
        assert f"\n  {name} " in ended.out


@pytest.mark.parametrize("path", [path for path in ALL if path != ("bench",)], ids=" ".join)
def test_every_command_takes_a_configuration_and_debug(path: tuple[str, ...]) -> None:
    options = {name for param in ALL[path].params for name in param.opts}
    assert {"--config", "--set", "--debug"} <= options
    assert call(*path, "--help").code == 0


def test_overrides_win_over_the_file_and_hold_elsewhere_in_the_process_only_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_KV_DRAM_LOW", "0.5")
    monkeypatch.delenv("TIERED_KV_CONFIG", raising=False)
    file = tmp_path / "kv.toml"
    file.write_text('[dram]\nbytes = "3MiB"\npolicy = "fifo"')
    options = Options(str(file), {"dram": {"bytes": "2MiB", "low": "0.25"}})
    with options.exported():
        dram = load().dram
        assert (dram.bytes, dram.policy, dram.low) == (2 << 20, "fifo", 0.25)
        assert dram == options.config().dram
    assert load().dram.low == 0.5
    assert load().dram.policy == "adaptive"


# Errors


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (("stats",), 2, "No such command 'stats'"),
        (("status", "--frobnicate"), 2, "No such option"),
        (("sessions", "wake"), 2, "Missing argument 'ID'"),
        (("sessions", "--limit", "3", "wake", "a"), 2, "options go behind 'wake'"),
        (("bench",), 2, "io, hierarchy, churn"),
        (("bench", "--out", "x", "io"), 2, "options go behind 'io'"),
        (("demo", "--sessions", "0"), 2, "--sessions"),
        (("doctor", "--set", "dram.bytes"), 2, "'dram.bytes' is not like dram.bytes=8GiB"),
        (("doctor", "--set", "dram.size=3"), 1, "no field dram.size; there are bytes, high"),
        (("status", "--set", "ram.bytes=3"), 1, "no section 'ram'; there are dram, hbm"),
        (("up", "--set", "dram.bytes=3XB"), 1, "'3XB' is not a size like"),
        (("demo", "--set", "hbm.high=2"), 1, "need 0 < low <= high <= 1"),
        (("down", "--config", "no-such-file.toml"), 1, "no-such-file.toml: No such file"),
        (("status", "--address", "nonsense"), 1, "'nonsense' is not an address like"),
        (("bench", "io", "--sizes", "1MB"), 1, "do not hold 4 x n blocks of 1000000 bytes"),
        (("bench", "io", "--legs", "up"), 1, "leg 'up' is not one of dram-to-nvme"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_one_line_on_stderr(
    args: tuple[str, ...], code: int, part: str
) -> None:
    ended = call(*args)
    assert part in ended.failed(code)
    if args[0] != "up":
        assert ended.out == ""


def test_a_file_that_is_no_toml_is_named_with_the_place_in_it(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text("[dram]\nbytes 3")
    line = process("doctor", "--config", str(file)).failed()
    assert str(file) in line
    assert "line 2" in line


def test_debug_shows_the_traceback_before_the_line() -> None:
    ended = call("doctor", "--debug", "--set", "dram.bytes=3XB")
    assert ended.code == 1
    assert ended.err.startswith("Traceback (most recent call last)")
    assert ended.err.splitlines()[-1].startswith("tiered-kv: overrides: dram.bytes:")


@pytest.mark.parametrize("debug", [(), ("--debug",)], ids=["plain", "debug"])
def test_a_defect_is_one_line_unless_debug_asks_for_more(debug: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom tiered_kv.cli import main, status\n"
        "def joined(*args): raise RuntimeError('two\\nlines')\n"
        "status.joined = joined\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "status", *debug]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    if debug:
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith("RuntimeError: two\nlines\n")
    else:
        expected = "tiered-kv: RuntimeError: two lines (not expected; --debug shows where)\n"
        assert done.stderr == expected


def test_a_long_error_in_colours_becomes_one_bearable_line() -> None:
    line = line_of(BadInput(f"\x1b[36mred\x1b[39m\n{'word ' * 1000}"))
    assert line.startswith("red word word")
    assert len(line) < 600


def test_a_json_file_that_cannot_be_written_is_told_before_the_work_begins(
    tmp_path: Path, small: list[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for target in (tmp_path, in_the_way / "report.json"):
        ended = call("doctor", *small, "--json", str(target))
        assert str(in_the_way if target != tmp_path else tmp_path) in ended.failed()
        assert ended.out == ""


# Finding a cluster


@pytest.mark.parametrize("command", ["status", "sessions", "down", "up"])
def test_a_cluster_that_does_not_answer_is_one_line_that_says_what_to_do(
    command: str, nowhere: str
) -> None:
    line = call(command).failed()
    assert nowhere in line
    assert "ray start --head" in line
    assert "--address" in line


def test_status_without_a_cluster_ends_as_a_process_with_one_line(nowhere: str) -> None:
    ended = process("status", "--json")
    assert nowhere in ended.failed()
    assert ended.out == ""


def test_a_ray_start_that_has_gone_is_named(
    nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(nowhere)
    assert f"made {nowhere}, which is gone" in call("status").failed()


# doctor


def test_doctor_tells_all_in_one_document_and_leaves_nothing_behind(
    small: list[str], tmp_path: Path, shm_folder: Path
) -> None:
    found = process("doctor", *small, "--json").document()
    rows = {row["what"]: row for row in found["rows"]}
    assert {"processor", "memory", "shared memory", "io_uring", "Ray"} <= set(rows)
    assert rows["shared memory budget"]["state"] == "ok"
    assert "GB/s written" in rows["disk speed"]["says"]
    assert "engine threads" in rows["disk speed"]["says"]
    assert found["config"]["dram"]["bytes"] == 4 << 20
    assert found["machine"]["memory"]["total_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    assert list(shm_folder.iterdir()) == []


def test_doctor_fails_only_for_a_service_that_could_not_start(small: list[str]) -> None:
    table = call("doctor", *small)
    assert (table.code, table.err) == (0, "")
    assert "note" in table.out
    assert "problem" not in table.out

    ended = call("doctor", *small, "--set", "dram.bytes=900TiB", "--json")
    assert "DRAM tier 900 TiB" in ended.err
    assert ended.code == 1
    states = {row["what"]: row["state"] for row in json.loads(ended.out)["rows"]}
    assert states["shared memory budget"] == states["memory budget"] == "problem"
    assert states["disk budget"] == "ok"


def test_doctor_writes_its_document_into_a_file_beside_the_table(
    small: list[str], tmp_path: Path
) -> None:
    ended = call("doctor", *small, "--json", f"{tmp_path}/new/report.json")
    assert "shared memory budget" in ended.out
    assert json.loads((tmp_path / "new" / "report.json").read_text())["counts"]["ok"] > 3


def test_a_disk_without_room_is_a_problem_with_its_numbers(small: list[str]) -> None:
    config = config_of([*small, "--set", "nvme.bytes=900TiB"])
    (row,) = [r for r in checks_disk.check(config, None) if r.state == "problem"]
    assert row.what == "disk budget"
    assert "900 TiB for the tier, 0 B of it there" in row.says


def test_a_service_that_runs_has_its_budgets_already(small: list[str], tmp_path: Path) -> None:
    config = config_of([*small, "--set", "nvme.bytes=900TiB", "--set", "dram.bytes=900TiB"])
    assert checks_disk.holder(config) is None
    folder = Folder.open(tmp_path / "nvme")
    try:
        held_by = checks_disk.holder(config)
        assert held_by is not None
        assert f"pid {os.getpid()}" in held_by
        rows = [
            *checks.budgets(config, machine.facts(), held_by),
            *checks_disk.check(config, held_by),
        ]
        assert [row.says for row in rows if row.state == "problem"] == []
    finally:
        folder.close()


def test_small_pages_come_with_the_command_that_changes_them() -> None:
    facts = machine.facts()
    assert facts.shm is not None
    for huge, state in [("never", "note"), ("advise", "ok"), ("always", "ok")]:
        rows = checks.machine(load(environ={}), replace(facts, shm=replace(facts.shm, huge=huge)))
        (row,) = [row for row in rows if row.what == "huge pages"]
        assert row.state == state
        assert ("mount -o remount,huge=advise /dev/shm" in row.says) == (state == "note")


@pytest.mark.parametrize(
    ("engine", "nbytes", "state"),
    [("io_uring", "1GiB", "problem"), ("auto", "1GiB", "note"), ("io_uring", "0", "note")],
)
def test_io_uring_matters_only_to_who_insists_on_it(engine: str, nbytes: str, state: str) -> None:
    config = load(overrides={"nvme": {"engine": engine, "bytes": nbytes}}, environ={})
    facts = replace(machine.facts(), io_uring="not permitted")
    (row,) = [row for row in checks.machine(config, facts) if row.what == "io_uring"]
    assert row.state == state


@pytest.mark.parametrize(
    ("device", "free", "states"),
    [
        ("auto", 1 << 30, ["ok", "ok"]),
        ("auto", 1 << 20, ["problem", "problem"]),
        ("cuda:1", 1 << 30, ["ok"]),
        ("cuda:2", 1 << 30, ["problem"]),
        ("cpu", 1 << 20, []),
    ],
)
def test_the_hbm_budget_is_compared_with_the_gpus_that_are_used(
    device: str, free: int, states: list[str]
) -> None:
    gpus = tuple(Gpu(i, "a GPU", 2 << 30, free, None, None, None, None, None) for i in range(2))
    config = load(overrides={"hbm": {"device": device, "bytes": "512MiB"}}, environ={})
    rows = checks.budgets(config, replace(machine.facts(), gpus=gpus), None)
    assert [row.state for row in rows if row.what == "HBM budget"] == states
    stand_in = [row for row in rows if "HBM stand-in" in row.says]
    assert bool(stand_in) == (device == "cpu")


# Benchmarks and demo


def test_bench_io_prints_one_document_and_removes_its_files(tmp_path: Path) -> None:
    found = process(
        "bench", "io", "--bytes", "1MiB", "--sizes", "256KiB", "--rounds", "1", "--legs",
        "dram-to-nvme", "--engines", "threads", "--folder", str(tmp_path), "--json",
    ).document()  # fmt: skip
    names = {result["name"] for result in found["results"]}
    assert "io/dram-to-nvme/threads/262144" in names
    assert found["machine"]["cpu"]["cores"] > 0
    assert found["command"].endswith("--json")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """With what each benchmark was run; none is."""
    calls: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        engine_contenders, "engine_python", lambda given: Path(given or "/e/python")
    )
    for module in (io, hierarchy, churn, load_or_recompute, replay, engine, engine_sessions):
        name = module.__name__.rpartition(".")[2].removeprefix("engine_").replace("_", "-")

        def run(name: str = name, **options: Any) -> list[Result]:
            calls[name] = {**options, "dram": load().dram.bytes}
            options["progress"](*(("working",) if name == "io" else ("working", 1, 2)))
            return [Result(f"{name}/it", 1.5, "s")]

        monkeypatch.setattr(module, "run", run)
    return calls


def test_benchmarks_get_their_options_and_the_configuration(
    measured: dict[str, dict[str, Any]],
) -> None:
    changed = ("--set", "dram.bytes=9MiB")
    assert call("bench", "hierarchy", "--seconds", "3.5", *changed).code == 0
    assert call("bench", "churn", "--minutes", "0.5", "--no-ray", *changed).code == 0
    assert call("bench", "io", "--rounds", "7", "--sizes", "1MiB,2MiB", "--folder", "f").code == 0
    assert (
        call("bench", "replay", "--trace", "f", "--format", "recorded", "--blocks", "7").code == 0
    )
    assert measured["hierarchy"]["seconds"] == 3.5
    assert measured["replay"]["trace"] == Trace(Path("f"), "recorded")
    assert (measured["replay"]["policy"], measured["replay"]["blocks"]) == ("lru", 7)
    assert measured["churn"]["minutes"] == 0.5
    assert measured["churn"]["connect"] is demo_command.within
    assert measured["hierarchy"]["dram"] == measured["churn"]["dram"] == 9 << 20
    assert (measured["io"]["rounds"], measured["io"]["folder"]) == (7, Path("f"))
    peers = ("--peers", "vllm-fs", "--tokens", "64,128", "--rounds", "2", "--folder", "f")
    assert call("bench", "engine", "--engine-python", "/x/python", *peers).code == 0
    plan = measured["engine"]["plan"]
    assert (plan.peers, plan.sizes, plan.rounds) == (("vllm-fs",), (64, 128), 2)
    assert (plan.pythons.engine, plan.folder, plan.model) == (Path("/x/python"), Path("f"), None)
    assert [str(s) for s in measured["io"]["sizes"]] == ["1048576", "2097152"]
    assert measured["io"]["legs"] == io.LEGS


def test_all_benchmarks_leave_a_file_each(
    measured: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    ended = call("bench", "--out", str(tmp_path / "results"))
    assert ended.code == 0
    files = sorted((tmp_path / "results").iterdir())
    assert [file.name for file in files] == [
        "churn.json", "engine.json", "hierarchy.json", "io.json", "load-or-recompute.json",
        "replay.json", "sessions.json",
    ]  # fmt: skip
    for file in files:
        (result,) = json.loads(file.read_text())["results"]
        assert result["name"] == f"{file.stem}/it"
        assert result["name"] in ended.out
    assert measured["churn"]["connect"] is demo_command.embedded


REPORT: dict[str, Any] = {
    "sessions": 3, "hbm_only_sessions": 1, "identical": 3, "out_of_memory": 0, "checks_failed": 0,
    "wake_ms": {"dram": {"p50": 20.0, "p99": 30.0, "count": 3}},
    "recompute_ms": {"p50": 400.0, "p99": 500.0},
    "blocks_moved": {"hbm-host": 7}, "bytes_moved": {"hbm-host": 7 << 20}, "tokens": 3000,
    "wall_s": 1.0,
}  # fmt: skip


def test_the_demo_ends_with_a_table_of_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "_run", lambda *args: REPORT)
    ended = call("demo")
    assert (ended.code, ended.err) == (0, "")
    for fact in (
        "3, with HBM alone 1", "3 of 3", "woken from dram", "p50 20.0 ms, p99 30.0 ms, 3 sessions",
        "20 times as fast", "p50 400 ms", "moved hbm to host", "7 blocks, 7 MiB",
    ):  # fmt: skip
        assert fact in ended.out


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("identical", 1, "2 of 3 answers differ"),
        ("checks_failed", 4, "4 blocks failed their check"),
        ("out_of_memory", 1, "memory ran out 1 times"),
    ],
)
def test_the_demo_fails_when_something_went_wrong_and_still_reports(
    field: str, value: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {**REPORT, field: value}
    monkeypatch.setattr(demo_command, "_run", lambda *args: report)
    ended = call("demo", "--json")
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == f"tiered-kv: {line}"
    assert json.loads(ended.out) == report


# Being stopped


def test_an_interrupted_benchmark_leaves_no_file_in_shared_memory_or_on_disk(
    tmp_path: Path,
) -> None:
    with running(
        "bench", "io", "--bytes", "64MiB", "--sizes", "1MiB", "--rounds", "100000", "--seconds",
        "600", "--legs", "dram-to-nvme", "--engines", "threads", "--folder", str(tmp_path),
    ) as child:  # fmt: skip
        wait_for_line(child, "O_DIRECT")
        shared = files_of(child.pid, "/dev/shm/")
        assert shared
        assert list(tmp_path.iterdir())
        ended = interrupt(child)
    assert ended.failed(130) == "tiered-kv: interrupted\n"
    assert list(tmp_path.iterdir()) == []
    assert gone(shared)


def test_the_first_signal_stops_and_the_second_lets_the_cleanup_finish(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    cleaned: list[str] = []

    def interrupted_work() -> None:
        with stoppable():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned.append("all")

    with pytest.raises(Stopped) as stopped:
        interrupted_work()
    assert cleaned == ["all"]
    assert stopped.value.number == signal.SIGINT
    assert "still cleaning up" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


# What is shown


def test_pace_counts_from_where_a_row_of_steps_began() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.step(2, 10)
    assert pace.describe() == ""
    now[0] += 4.0
    assert not pace.step(4, 10)
    assert pace.describe() == "0.5/s, 12 s left"
    assert pace.step(0, 10)
    assert pace.describe() == ""


def test_progress_is_plain_lines_beside_the_results_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Screen() as screen:
        screen.step("reading [bold]x[/]", 0, 2)
        screen.say("[red]a result[/] that is as long as it is" + "." * 200)
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first == "[0/2] reading [bold]x[/]"
    assert second == "[red]a result[/] that is as long as it is" + "." * 200
    assert err == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (3 << 20, "3 MiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_have_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_status_tables_show_tiers_sessions_misses_and_what_is_wrong(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with local(config_of(small)) as kv:
        host, gpu = kv.nodes()
    host["offline"] = {"nvme": "files were removed"}
    host["misses"], host["hits"] = {"absent": 3, "deadline": 2}, 11
    host["sessions"]["idle"] = 4
    host["errors"] = [{"at_s": 0.0, "times": 9, "text": "nvme is taken out"}]
    host["moves"] = [{"from": "dram", "to": "nvme", "blocks": 5, "bytes": 1 << 30, "seconds": 0.5,
                      "failed": 1}]  # fmt: skip
    long = "5c1c4f937429d53d4a505d769d25ab1e6dc9349fe8d131ea83a16ba1"
    status = {
        "coordinator": {"problem": "Unreachable: it hangs"},
        "nodes": {f"node-{long}": host},
        "gpus": {f"gpu-{long}-0": gpu},
    }
    with Screen() as screen:
        for table in tables.everything(status):
            screen.show(table)
    out = capsys.readouterr().out
    assert long not in out
    for part in (
        "Unreachable: it hangs", "gpu-5c1c4f93-0", "75% to 85%", "OFFLINE: files were removed",
        "4 idle", "3 absent, 2 deadline", "dram to nvme", "2.15 GB/s", "nvme is taken out",
        str(os.getpid()), "CPU stand-in",
    ):  # fmt: skip
        assert part in out
