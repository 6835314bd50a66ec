import json
import math
import re
from pathlib import Path

import pytest
from cli_kit import call

from tiered_kv.errors import BadInput
from tiered_kv.sim import models, profiles, reference
from tiered_kv.sim.description import Workload
from tiered_kv.sim.mooncake import requests
from tiered_kv.sim.plan import CONFIGURATIONS, Targets, cheapest, plan
from tiered_kv.sim.plan_rows import Row, document
from tiered_kv.sim.report_html import distribution, line_chart, page

WORK = Workload(sessions=60, tool_share=1.0)
QUICK = ["--sessions", "40", "--tool-share", "1", "--warm", "60", "--window", "60"]


@pytest.fixture(scope="module")
def table() -> dict[str, Row]:
    """The reference table from shorter runs: sessions are counted from the beginning on."""
    runs = {"HBM, no admission": (256, 2100.0), "HBM+DRAM": (512, 1200.0),
            "HBM+DRAM+NVMe": (1024, 2100.0)}  # fmt: skip
    return {
        name: reference.rows(names=[name], block_tokens=tokens, warm_s=warm_s, window_s=60.0)[0]
        for name, (tokens, warm_s) in runs.items()
    }


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return plan(
        profiles.load("h100"), models.model("llama-3.1-70b"), WORK, Targets(sessions=60),
        configurations=[CONFIGURATIONS[0], *CONFIGURATIONS[2:4]], warm_s=120.0, window_s=120.0,
    )  # fmt: skip


@pytest.mark.parametrize("published", reference.TABLE, ids=lambda row: row.name)
def test_the_reference_table_holds_the_published_sessions(
    table: dict[str, Row], published: reference.Published
) -> None:
    assert table[published.name].held == pytest.approx(published.sessions, rel=0.03)


def test_only_the_server_without_admission_runs_out_of_memory(table: dict[str, Row]) -> None:
    assert table["HBM, no admission"].ooms > 5
    assert table["HBM+DRAM"].ooms == table["HBM+DRAM+NVMe"].ooms == 0


def test_every_promised_number_of_the_reference_holds(table: dict[str, Row]) -> None:
    promised = [r for r in reference.results(list(table.values())) if r.holds is not None]
    assert len(promised) == 7
    assert [r.name for r in promised if not r.holds] == []


def test_other_readings_of_the_table_do_not_give_its_sessions() -> None:
    """What a session has to be: the published 64 and 256 with the published watermarks."""
    profile = profiles.load("designed-for")
    hbm = 0.90 * profile.hbm_bytes - models.model("llama-3.1-70b").weight_bytes
    dram = 0.85 * profile.dram.bytes
    readings = {"20K bf16": 20_480 * 327_680, "32K bf16": 32_768 * 327_680,
                "32K fp8": 32_768 * 163_840, "8K bf16": 8_192 * 327_680}  # fmt: skip
    fits = [
        name for name, size in readings.items()
        if abs(hbm // size / 64 - 1) < 0.03 and abs((hbm // size + dram // size) / 256 - 1) < 0.03
    ]  # fmt: skip
    assert fits == ["20K bf16"]


def test_the_cheapest_configuration_is_one_that_meets_the_targets(rows: list[Row]) -> None:
    best = cheapest(rows)
    assert best is not None
    assert not best.missed
    assert all(row.missed or row.usd_per_month >= best.usd_per_month for row in rows)


def test_no_configuration_is_chosen_where_none_meets_the_targets(rows: list[Row]) -> None:
    assert rows[0].ooms or rows[0].held < 60 or not rows[0].missed
    assert Targets(sessions=10**6).missed(rows[-1]) == ["sessions"]
    assert "TTFT" in Targets(ttft_s=1e-6).missed(rows[-1])


def test_more_nodes_hold_more_and_cost_more() -> None:
    one, two = plan(
        profiles.load("designed-for"), models.model("llama-3.1-70b"), WORK, Targets(),
        configurations=CONFIGURATIONS[3:4], nodes=(1, 2), warm_s=60.0, window_s=60.0,
    )  # fmt: skip
    assert two.name.endswith("x 2")
    assert two.usd_per_month == pytest.approx(2 * one.usd_per_month, rel=0.01)
    assert one.held == two.held == 60


def test_ten_thousand_sessions_sleep_beyond_the_node() -> None:
    work = Workload(10_000, 8192, 10_240, tool_share=0.0).slower(80.0)
    profile, model = profiles.load("designed-for"), models.model("llama-3.1-70b")
    (far,) = plan(
        profile, model, work, Targets(sessions=10_000), configurations=CONFIGURATIONS[5:],
        block_tokens=2560, warm_s=6000.0, window_s=300.0,
    )  # fmt: skip
    assert profile.nvme is not None
    node = profile.hbm_bytes + profile.dram.bytes + profile.nvme.bytes
    assert node < 0.7 * 10_000 * 8192 * model.kv_bytes
    assert far.held == 10_000
    assert not far.missed
    assert far.wake_p99_s < 2.0
    assert far.outcome.samples[-1].used_bytes["s3"] > 5e12
    assert {"remote", "s3"} & {name for name, _ in far.outcome.wakes}


def test_configurations_in_processes_of_their_own_come_to_the_same(rows: list[Row]) -> None:
    steps: list[tuple[int, int]] = []
    again = plan(
        profiles.load("h100"), models.model("llama-3.1-70b"), WORK, Targets(sessions=60),
        configurations=[CONFIGURATIONS[0], *CONFIGURATIONS[2:4]], warm_s=120.0, window_s=120.0,
        jobs=2, progress=lambda _, done, total: steps.append((done, total)),
    )  # fmt: skip
    assert again == rows
    assert steps == [(i, 3) for i in range(4)]


def test_the_document_is_plain_json_without_infinities(rows: list[Row]) -> None:
    text = json.dumps(document(rows), allow_nan=False)
    assert {"held", "wake_p99_s", "drive_years", "binds"} <= json.loads(text)[0].keys()


def test_the_report_is_one_file_that_fetches_nothing(rows: list[Row]) -> None:
    html = page("A <plan>", {"model": "m & n"}, rows, {"gpu.count": "somewhere"})
    assert "A &lt;plan&gt;" in html
    assert html.count("<svg") >= 4
    assert "m &amp; n" in html
    assert not re.search(r"<script|<link|src=|href=", html)
    assert "nan" not in "".join(re.findall(r"points='[^']*'", html))


def test_charts_take_single_points_and_nothing() -> None:
    assert "polyline" in line_chart({"one": [(1.0, 1.0)]})
    assert "svg" in line_chart({})
    assert distribution([3.0])[-1] == (3.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"sessions": -1}, "sessions = -1"), ({"wake_s": 0.0}, "wake_s = 0.0"),
     ({"ttft_s": math.nan}, "ttft_s = nan")],
)  # fmt: skip
def test_impossible_targets_name_field_and_value(fields: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Targets(**fields)  # type: ignore[arg-type]


def test_the_command_prints_a_table_and_the_cheapest_configuration() -> None:
    ended = call("plan", *QUICK, "--tiers", "hbm+dram,hbm+dram+nvme")
    assert ended.code == 0, ended
    assert "cheapest that meets the targets: HBM+DRAM" in ended.out


def test_the_command_gives_one_document_and_a_report(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    ended = call("plan", *QUICK, "--tiers", "hbm+dram", "--json", "--html", str(html))
    found = ended.document()
    assert found["plan"][0]["held"] == 40
    assert found["results"][0]["name"].startswith("plan/HBM+DRAM/")
    assert html.read_text().startswith("<!doctype html>")


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]}
    trace.write_text("\n".join(json.dumps(line | {"timestamp": 1000 * i}) for i in range(20)))
    found = call("plan", "--trace", str(trace), "--tiers", "hbm+dram", "--window", "60", "--json")
    assert found.document()["plan"][0]["hit_share"] > 0.8


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--model", "gpt-99"], 1, "model 'gpt-99' is neither"),
        (["--profile", "abacus"], 1, "profile 'abacus' is neither"),
        (["--sessions", "-3"], 1, "sessions = -3"),
        (["--tiers", "hbm+tape"], 1, "'hbm+tape' is not one of"),
        (["--nodes", "0"], 1, "nodes = [0]"),
        (["--nodes", "few"], 2, "not like 1,2,4"),
        (["--target-wake", "-1"], 1, "wake_s = -1.0"),
        (["--model", "llama-3.1-405b", "--profile", "h100"], 1, "812 GB of weights"),
        (["--block-tokens", "-1"], 1, "block_tokens = -1"),
        (["--slower", "-2"], 1, "-18.0"),
        (["--trace", "/no/such/file"], 1, "No such file"),
        (["--workload", "poetry"], 1, "'poetry' is not one of"),
        (["--workload", "chat", "--trace", "x"], 2, "not both"),
        (["--reference", "--validate"], 2, "not both"),
    ],
)
def test_bad_input_is_one_line_with_the_value(args: list[str], code: int, says: str) -> None:
    assert says in call("plan", *args).failed(code)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "a request has"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "-1"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1, "hash_ids": []}', "input_len"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-4]}', "hash_ids"),
    ],
)
def test_a_bad_line_of_a_trace_names_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}'
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(BadInput, match=rf"trace.jsonl:2: .*{says}"):
        list(requests(file))
