"""Generated workloads: the same for a seed, in constant memory, and shaped like the traces."""

import io
import json
import tracemalloc
from itertools import islice, pairwise
from random import Random

import pytest
from cli_kit import call

from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.sim.workload import KINDS, generate, write_mooncake
from tiered_kv.sim.workload_sessions import BLOCK_TOKENS, Request
from tiered_kv.sim.workload_shapes import AGENT, Spread
from tiered_kv.sim.workload_stats import Shape, percentile, shape


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    """Agents without incomplete blocks, as their sessions' trace is counted."""
    return {
        "chat": shape(generate("chat", 5_000, seed=1)),
        "rag": shape(generate("rag", 2_500, seed=1)),
        "agent": shape(generate("agent", 200, seed=1), whole=True),
    }


# What the traces have, in blocks of 512 tokens, and how near the generated ones must come.
@pytest.mark.parametrize(
    ("kind", "blocks_a_request", "ideal_hits", "used_once"),
    [("chat", 24.0, 0.366, 0.76), ("rag", 30.5, 0.640, 0.58), ("agent", 244.5, 0.964, 0.06)],
)
def test_reuse_is_that_of_the_traces(
    shapes: dict[str, Shape],
    kind: str,
    blocks_a_request: float,
    ideal_hits: float,
    used_once: float,
) -> None:
    made = shapes[kind]
    assert made.blocks_a_request == pytest.approx(blocks_a_request, rel=0.15)
    assert made.ideal_hit_ratio == pytest.approx(ideal_hits, abs=0.04)
    assert made.once_ratio == pytest.approx(used_once, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "blocks", "seconds"),
    [
        ("chat", (8_356, 31_589), (114, 519)),
        ("rag", (6_264, 20_392), (59, 282)),
        ("agent", (2_092, 5_117), (20, 127)),
    ],
)
def test_blocks_come_back_about_when_they_do_in_the_traces(
    shapes: dict[str, Shape], kind: str, blocks: tuple[int, int], seconds: tuple[int, int]
) -> None:
    made = shapes[kind]
    for percent, distance, time_s in zip((50, 90), blocks, seconds, strict=True):
        assert percentile(made.distances, percent) == pytest.approx(distance, rel=0.35)
        assert percentile(made.reuse_s, percent) == pytest.approx(time_s, rel=0.25)


def test_agents_think_as_long_as_those_of_the_trace(shapes: dict[str, Shape]) -> None:
    tool, turn = (shapes["agent"].think_s[reason] for reason in ("tool_use", "end_turn"))
    assert percentile(tool, 50) == pytest.approx(9, rel=0.1)
    assert percentile(tool, 90) == pytest.approx(71, rel=0.15)
    assert percentile(turn, 50) == pytest.approx(210, rel=0.25)
    assert percentile(turn, 90) == pytest.approx(2_977, rel=0.35)
    assert sum(gap > 300 for gap in turn) / len(turn) == pytest.approx(0.435, abs=0.06)


def test_a_spread_has_the_percentiles_that_it_names() -> None:
    rng, spread = Random(3), AGENT.turn_think_s
    values = [spread.draw(rng) for _ in range(20_000)]
    for percent, wanted in ((10, spread.p10), (50, spread.p50), (90, spread.p90)):
        assert percentile(values, percent) == pytest.approx(wanted, rel=0.08)
    assert sum(v > 300 for v in values) / len(values) == pytest.approx(0.435, abs=0.02)


def test_a_spread_stays_within_its_bounds() -> None:
    rng, spread = Random(1), Spread(1, 100, 10_000, least=5, most=300)
    values = [spread.whole(rng) for _ in range(1_000)]
    assert min(values) == 5
    assert max(values) == 300


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_requests(kind: str) -> None:
    one, two, other = (list(islice(generate(kind, 40, seed), 400)) for seed in (7, 7, 8))
    assert one == two
    assert one != other


@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_in_order_of_time_and_have_a_block_for_every_512_tokens(kind: str) -> None:
    last = 0.0
    for request in islice(generate(kind, 60, seed=5), 1_500):
        assert request.at_s >= last
        assert request.input_length >= 1
        assert request.output_length >= 1
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        last = request.at_s


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ids_mean_an_equal_whole_prefix(kind: str) -> None:
    before: dict[int, int] = {}
    for request in islice(generate(kind, 60, seed=6), 1_500):
        parents = (-1, *request.hash_ids)
        for parent, key in zip(parents, request.hash_ids, strict=False):
            assert before.setdefault(key, parent) == parent


def test_every_session_of_a_kind_is_made() -> None:
    first = [r for r in generate("mix", 300, seed=2) if not r.after]
    assert {r.kind for r in first} == {"chat", "agent", "rag"}
    assert len({r.session for r in first}) == len(first) >= 300  # and some sub-agents


def test_agents_share_prompts_start_sub_agents_and_compact() -> None:
    by_session: dict[int, list[Request]] = {}
    for request in generate("agent", 60, seed=4):
        by_session.setdefault(request.session, []).append(request)
    heads = [requests[0].hash_ids[0] for requests in by_session.values()]
    assert len(set(heads)) < 0.9 * len(heads)
    assert len(by_session) > 60
    shrunk = [
        (a, b)
        for requests in by_session.values()
        for a, b in pairwise(requests)
        if b.input_length < a.input_length
    ]
    assert shrunk
    assert all(a.hash_ids[0] == b.hash_ids[0] for a, b in shrunk)  # the prompt stays


def test_memory_does_not_grow_with_the_number_of_sessions() -> None:
    peaks = []
    for sessions in (2_000, 8_000):
        tracemalloc.start()
        for _ in generate("chat", sessions, seed=1):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.6 * peaks[0]
    assert peaks[1] < 4 << 20


def test_what_is_written_is_the_format_of_mooncake() -> None:
    out = io.StringIO()
    requests = list(generate("chat", 5, seed=1))
    assert write_mooncake(requests, out) == len(requests)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [list(line) for line in lines] == [
        ["timestamp", "input_length", "output_length", "hash_ids"]
    ] * len(requests)
    assert [line["timestamp"] for line in lines] == [round(r.at_s * 1000) for r in requests]
    assert [tuple(line["hash_ids"]) for line in lines] == [r.hash_ids for r in requests]


def test_unknown_kinds_and_impossible_numbers_are_refused_before_anything_is_made() -> None:
    with pytest.raises(UnknownName, match=r"'video' is not one of chat, agent, rag, mix"):
        generate("video", 1)
    with pytest.raises(BadInput, match="not -1"):
        generate("chat", -1)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BadInput, match="positive rate"):
            generate("chat", 1, per_s=rate)
    assert list(generate("chat", 0)) == []


def test_a_higher_rate_brings_sessions_closer_together() -> None:
    spans = [
        max(r.at_s for r in generate("chat", 400, 1, per_s=rate) if not r.after) for rate in (1, 10)
    ]
    assert spans[0] == pytest.approx(400, rel=0.2)
    assert spans[1] == pytest.approx(40, rel=0.2)


def test_the_command_writes_a_file_and_says_what_is_in_it(tmp_path) -> None:
    file = tmp_path / "trace.jsonl"
    ended = call("workload", "--kind", "rag", "--sessions", "20", "--seed", "3", "--out", str(file))
    assert ended.code == 0
    lines = file.read_text().splitlines()
    assert f"{len(lines)} requests of 20 rag sessions" in ended.out
    assert len(lines) == sum(1 for _ in generate("rag", 20, 3))


def test_the_command_writes_to_stdout_and_nothing_else_there() -> None:
    ended = call("workload", "--kind", "chat", "--sessions", "4", "--out", "-")
    assert ended.code == 0
    assert [json.loads(line)["hash_ids"][0] for line in ended.out.splitlines()]
    assert "requests of 4 chat sessions" in ended.err


def test_the_command_refuses_what_it_cannot_do_in_one_line(tmp_path) -> None:
    target = str(tmp_path / "none" / "trace.jsonl")
    assert "No such file" in call("workload", "--out", target).failed()
    assert "--kind" in call("workload", "--kind", "video", "--out", "-").failed(2)
    assert "--sessions" in call("workload", "--sessions", "0", "--out", "-").failed(2)
    assert "--rate" in call("workload", "--rate", "0", "--out", "-").failed(2)
