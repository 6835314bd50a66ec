"""Routing on public traces: ten replicas of 3M tokens each, a 70B model on 8 x H100 at 40 % MFU.

Round-robin and longest-prefix are exact definitions; what the router's own choice hits depends on
how busy the replicas are, hence landmarks.
"""

from functools import cache
from pathlib import Path

import pytest

from tiered_kv.errors import UnknownName
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.sim.fleet import Outcome, route
from tiered_kv.sim.traces import Request, Trace

PREFILL = Prefill.of_model(layers=80, d=8192, flops=8 * 989e12 * 0.4)
EXACT = {
    ("conversation", "round_robin"): 10.4,
    ("conversation", "longest_prefix"): 13.6,
    ("synthetic", "round_robin"): 16.8,
    ("synthetic", "longest_prefix"): 64.0,
}


@pytest.fixture(scope="module")
def traces(traces_folder: Path) -> Path:
    folder = traces_folder / "mooncake"
    for name in ("conversation", "synthetic"):
        if not (folder / f"{name}_trace.jsonl").is_file():
            pytest.skip(f"no {folder / name}_trace.jsonl")
    return folder


@cache
def requests(folder: Path, trace: str) -> tuple[Request, ...]:
    return tuple(Trace(folder / f"{trace}_trace.jsonl", "mooncake"))


@cache
def outcome(folder: Path, trace: str, choice: str) -> Outcome:
    return route(requests(folder, trace), choice, PREFILL)


@pytest.mark.parametrize(("trace", "choice"), EXACT)
def test_simple_ways_of_routing_hit_what_they_hit_elsewhere(traces: Path, trace: str, choice: str):
    assert 100 * outcome(traces, trace, choice).hit_ratio == pytest.approx(
        EXACT[trace, choice], abs=0.06
    )


def test_the_longest_prefix_alone_sends_everything_to_one_replica(traces: Path):
    assert outcome(traces, "conversation", "longest_prefix").imbalance == pytest.approx(10.0)


@pytest.mark.parametrize(("trace", "least"), [("conversation", 31.0), ("synthetic", 60.0)])
def test_the_routers_choice_hits_nearly_all_and_keeps_replicas_even(
    traces: Path, trace: str, least: float
):
    found = outcome(traces, trace, "shortest_finish")
    assert 100 * found.hit_ratio >= least
    assert found.imbalance <= 1.32
    for other in ("round_robin", "longest_prefix"):
        assert found.wait_s <= outcome(traces, trace, other).wait_s


def test_an_unknown_way_of_routing_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match="longest_prefix, round_robin, shortest_finish"):
        route([], "nearest", PREFILL)
