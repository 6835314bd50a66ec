"""Replays through the real hierarchy, and the command that runs them."""

import json
from pathlib import Path

import pytest
from cli_kit import call

from tiered_kv.bench.hierarchy import reference, workload
from tiered_kv.cli import plots
from tiered_kv.cli import replay as replay_command
from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.hierarchy import check
from tiered_kv.policies import EVICTION
from tiered_kv.sim.replay import BY_THE_BLOCK, OneTier, Replayed, replay
from tiered_kv.sim.sweep import Task, sweep, tasks_of
from tiered_kv.sim.traces import Trace
from tiered_kv.testing.policies import block_keys
from tiered_kv.types import Run

BLOCKS = 400


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return workload(500, seed=3, chats=40)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Thirty requests that grow by a block each, in three sessions."""
    file = tmp_path / "three.jsonl"
    lines = [
        {"timestamp": i, "input_length": 1, "output_length": 1,
         "hash_ids": [1000 * (i % 3) + j for j in range(3 + i // 3)]}
        for i in range(30)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_lru_hits_what_a_plain_ordered_dict_hits(runs: list[Run]) -> None:
    assert replay(runs, "lru", BLOCKS).hits == reference(runs, BLOCKS)


@pytest.mark.parametrize("name", sorted(EVICTION))
def test_no_policy_breaks_the_hierarchy_or_passes_min(runs: list[Run], name: str) -> None:
    tier = OneTier(name, BLOCKS)
    if name == "min":
        tier.foresee(runs)
    step = tier.request_by_the_block if name in BY_THE_BLOCK else tier.request
    hits = 0
    for number, run in enumerate(runs):
        hits += step(run)
        if number % 50 == 0:
            check(tier.hierarchy)
    check(tier.hierarchy)
    assert len(tier.hierarchy.book.blocks) == BLOCKS
    assert not any(tier.hierarchy.pending.values())
    assert hits == replay(runs, name, BLOCKS).hits
    assert 0 < hits <= replay(runs, "min", BLOCKS).hits


def test_everything_that_came_before_hits_when_nothing_must_leave(runs: list[Run]) -> None:
    seen: set[bytes] = set()
    wanted = 0
    for run in runs:
        wanted += sum(key in seen for key in run)
        seen.update(run)
    for name in ("lru", "fifo", "min", "adaptive"):
        assert replay(runs, name, len(seen)).hits == wanted


def test_a_run_longer_than_the_tier_hits_as_far_as_the_tier_goes() -> None:
    run = block_keys(50)
    for name in ("lru", "fifo", "lru_head_first", "min", "adaptive"):
        found = replay([run, run, run], name, 20)
        assert (found.hits, found.accesses, found.requests) == (40, 150, 3)


def test_the_middle_of_a_prefix_leaves_only_under_policies_that_go_by_the_block() -> None:
    # 12 blocks of room; the second run pushes out four of the first one
    one, two = block_keys(8, "one"), block_keys(8, "two")
    assert replay([one, two, one], "lru", 12).hits == 4  # the tail left
    assert replay([one, two, one], "lru_head_first", 12).hits == 0  # the head left


def test_replaying_nothing_is_no_division_by_zero() -> None:
    assert replay([], "lru", 10).hit_percent == 0.0


def test_a_wrong_policy_or_size_is_told_before_anything_is_read() -> None:
    with pytest.raises(UnknownName, match="'magic' is not one of adaptive"):
        tasks_of(["lru", "magic"], [10])
    for size in (0, -5):
        with pytest.raises(BadInput, match=f"1 block or more, not {size}"):
            tasks_of(["lru"], [size])
        with pytest.raises(BadInput, match=f"1 block or more, not {size}"):
            replay([], "lru", size)
    assert tasks_of(["lru", "lru"], [5, 5]) == [Task("lru", 5)]


def test_replays_side_by_side_find_the_same_in_the_same_order(trace: Path) -> None:
    tasks = tasks_of(["lru", "min"], [10, 30])
    told: list[tuple[str, int, int]] = []
    apart = sweep(Trace(trace, "mooncake"), tasks, 2, lambda *step: told.append(step))
    along = sweep(Trace(trace, "mooncake"), tasks, 1)
    assert [(r.policy, r.blocks, r.hits) for r in apart] == [
        (r.policy, r.blocks, r.hits) for r in along
    ]
    assert told
    assert all(0 <= done <= total == 120 for _, done, total in told)


def test_a_bad_line_ends_replays_side_by_side_with_its_number(trace: Path) -> None:
    trace.write_text(trace.read_text() + "garbage\n")
    with pytest.raises(BadInput, match=":31: not JSON"):
        sweep(Trace(trace, "mooncake"), tasks_of(["lru", "fifo"], [10, 30]), 2)


def test_the_command_names_its_results_by_file_policy_and_size(trace: Path) -> None:
    out, table = trace.with_suffix(".json"), trace.with_suffix(".csv")
    done = call("replay", str(trace), "--policy", "lru,adaptive", "--blocks", "10,30",
                "--jobs", "1", "--json", str(out), "--csv", str(table))  # fmt: skip
    assert done.code == 0, done
    found = {result["name"]: result for result in json.loads(out.read_text())["results"]}
    assert list(found) == [
        f"replay/three/{policy}/{blocks}" for policy in ("lru", "adaptive") for blocks in (10, 30)
    ]
    wanted = replay(Trace(trace, "mooncake"), "lru", 30).hit_percent
    assert found["replay/three/lru/30"]["value"] == wanted
    assert found["replay/three/lru/30"]["unit"] == "%"
    rows = [line.split(",")[:2] for line in table.read_text().splitlines()]
    assert rows[:2] == [["policy", "blocks"], ["lru", "10"]]


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("sizes", "panels"), [("10,30", 2), ("10", 1)])
def test_the_plot_shows_curves_and_what_two_tiers_held(
    trace: Path, sizes: str, panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[plots.Tiers | None] = []
    draw = plots.draw

    def keep(to: str, title: str, found: list[Replayed], tiers: plots.Tiers | None) -> None:
        drawn.append(tiers)
        draw(to, title, found, tiers)

    monkeypatch.setattr(plots, "draw", keep)
    for suffix, begin in ((".png", PNG), (".svg", b"<?xml")):
        picture = trace.with_suffix(suffix)
        done = call("replay", str(trace), "--policy", "fifo,adaptive", "--blocks", sizes,
                    "--jobs", "1", "--plot", str(picture), "--block-bytes", "1MiB")  # fmt: skip
        assert done.code == 0, done
        assert picture.read_bytes().startswith(begin)
    tiers = drawn[0]
    assert (tiers is not None) == (panels == 2)
    if tiers is not None:
        assert (tiers.policy, tiers.dram_blocks, tiers.nvme_blocks) == ("fifo", 10, 30)
        assert int(tiers.block_bytes) == 1 << 20
        assert [fill.at_s for fill in tiers.fills] == [i / 1000 for i in range(30)]
        assert tiers.fills[0][1:] == (3, 0)
        assert all(fill.dram_blocks <= 10 and fill.nvme_blocks <= 30 for fill in tiers.fills)
        assert tiers.fills[-1].dram_blocks == 10


def test_a_plot_that_cannot_be_drawn_is_refused_before_any_work(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not end in .pdf, .png, .svg" in call("replay", str(trace), "--plot", "x").failed(2)
    monkeypatch.setattr(replay_command, "find_spec", lambda name: None)
    ended = call("replay", str(trace), "--plot", "x.png")
    assert "--plot needs matplotlib: pip install 'tiered-kv[plot]'" in ended.failed(2)


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a.jsonl", "a"), ("a.jsonl.gz", "a"), ("a", "a"), (".a.jsonl", "a"), ("...", "...")],
)
def test_results_are_named_by_the_file_without_all_of_its_suffixes(name: str, stem: str) -> None:
    assert Trace(Path("some.folder") / name, "mooncake").name == stem


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--policy", "magic"], "'magic' is not one of adaptive"),
        (["--blocks", "many"], "'many' is not a whole number"),
        (["--blocks", "0"], "1 block or more, not 0"),
        (["--format", "csv"], "'csv' is not one of"),
        (["--format", "claude-code"], ":1: not a session: no 'bs'"),
        (["--format", "recorded"], ":1: not a recorded trace"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_a_line(
    trace: Path, options: list[str], line: str
) -> None:
    done = call("replay", str(trace), *options, "--jobs", "1")
    assert line in done.failed(done.code)
    assert done.code in (1, 2)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "none: No such file" in call("replay", str(tmp_path / "none")).failed()
