"""The replay benchmark: both sides are told the same, and what it measured is named."""

import json
from itertools import islice
from pathlib import Path

import pytest

from tiered_kv.bench import replay as speed
from tiered_kv.bench.hierarchy import reference, workload
from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.sim.traces import Trace

BLOCKS = 300


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Sixty requests of three sessions that grow by a block a turn."""
    file = tmp_path / "three.jsonl"
    lines = [
        {"timestamp": i, "input_length": 1, "output_length": 1,
         "hash_ids": [1000 * (i % 3) + j for j in range(3 + i // 3)]}
        for i in range(60)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace(file, "mooncake")


def test_the_peer_hits_what_a_plain_ordered_dict_hits() -> None:
    runs = workload(300, seed=5, chats=40)
    assert speed.plain_lru(runs, BLOCKS) == reference(runs, BLOCKS) > 0


def test_each_result_stands_beside_the_peer_that_hit_the_same(trace: Trace) -> None:
    told: list[str] = []
    found = speed.run(
        trace=trace, blocks=20, seconds=0, progress=lambda *step: told.append(step[0])
    )
    by_name = {result.name: result for result in found}
    assert list(by_name) == [
        f"replay/three/lru/20/{what}"
        for what in ("accesses", "hits", "whole/accesses", "whole/seconds", "whole/peak-memory")
    ]
    accesses, hits = by_name["replay/three/lru/20/accesses"], by_name["replay/three/lru/20/hits"]
    assert accesses.against == hits.against == "cachetools.LRUCache"
    assert accesses.against_value is not None
    assert accesses.ratio == pytest.approx(accesses.value / accesses.against_value)
    assert accesses.bar == 400_000
    assert hits.value == hits.against_value > 0
    memory = by_name["replay/three/lru/20/whole/peak-memory"]
    assert memory.against_value is not None
    assert 0 < memory.against_value <= memory.value
    assert told[:4] == ["lru", "cachetools.LRUCache", "lru", "cachetools.LRUCache"]


def test_without_the_peer_the_rest_is_measured_and_says_so(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    found = speed.run(trace=trace, policy="sieve", blocks=20, seconds=0)
    assert found[0].against == "cachetools.LRUCache is not installed"
    assert found[0].against_value is None
    assert not any(result.name.endswith("/hits") for result in found)


def test_what_cannot_be_replayed_is_told_before_the_first_round(trace: Trace) -> None:
    with pytest.raises(UnknownName, match="'magic' is not one of"):
        speed.run(trace=trace, policy="magic")
    trace.file.write_text("garbage\n")
    with pytest.raises(BadInput, match=":1: not JSON"):
        speed.run(trace=trace)


def test_the_made_up_agents_are_the_same_each_time() -> None:
    agents = speed.Agents(sessions=3)
    first = list(islice(agents.runs(), 50))
    assert first == list(islice(agents.runs(), 50))
    assert len({key for run in first for key in run}) < sum(map(len, first)) / 2
