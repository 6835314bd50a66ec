"""Golden numbers of two tiers on public traces, through the real hierarchy.

A change that moves one of them must say so. Skipped where the traces are absent.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.lru import LRU
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU
from tiered_kv.sim.traces import Trace
from tiered_kv.sim.two_tier import Counts, TwoTier
from tiered_kv.types import BlockKey, Run

DRAM_BLOCKS, NVME_BLOCKS = 2_000, 14_000
TIGHT = 1e-3  # 0.1 points


@pytest.fixture(scope="module")
def agents(traces_folder: Path) -> list[Run]:
    """Runs of all requests of the Claude Code sessions, merged by time, 512 tokens a block."""
    path = traces_folder / "claude_code" / "sessions.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return list(Trace(path, "claude-code").runs())


def replayed(runs: Sequence[Run], admission: str) -> Counts:
    tiers = TwoTier(DRAM_BLOCKS, NVME_BLOCKS, admission=admission)
    counts = tiers.replay(runs)
    tiers.check()
    return counts


def test_the_trace_is_the_one_that_the_numbers_belong_to(agents: list[Run]) -> None:
    assert len(agents) == 24_015
    assert sum(map(len, agents)) == 5_872_170
    assert len({key for run in agents for key in run}) == 211_333


def test_two_tiers_spare_the_drive_and_hit_as_much_as_one_large_tier(agents: list[Run]) -> None:
    """At most 0.05 writes an access at 95.4 % hits and more; exclusive tiers write 0.495 (for
    95.64 %). DRAM alone hits exactly what an LRU of 2,000 blocks hits."""
    counts = replayed(agents, "on_demotion")
    assert counts.writes_per_access <= 0.05
    assert counts.hit_ratio >= 0.954
    assert counts.writes_per_access == pytest.approx(0.0453, abs=TIGHT)
    assert counts.hit_ratio == pytest.approx(0.9546, abs=TIGHT)
    assert counts.dram_hit_ratio == pytest.approx(0.5047, abs=5e-4)


@pytest.mark.parametrize(
    ("admission", "hits", "dram_hits", "writes"),
    [
        ("on_demotion", 0.9564, 0.6475, 0.0434),
        ("write_behind", 0.9563, 0.6475, 0.0437),
        ("second_use", 0.9455, 0.6475, 0.0396),
    ],
)
def test_what_each_admission_hits_and_writes(
    agents: list[Run], admission: str, hits: float, dram_hits: float, writes: float
) -> None:
    """The first sixth of the trace, in the course of which the drive fills up."""
    counts = replayed(agents[:4_000], admission)
    assert counts.hit_ratio == pytest.approx(hits, abs=TIGHT)
    assert counts.dram_hit_ratio == pytest.approx(dram_hits, abs=5 * TIGHT)
    assert counts.writes_per_access == pytest.approx(writes, abs=TIGHT)


def tail_misses(runs: Sequence[Run], policy: EvictionPolicy, capacity: int) -> tuple[float, float]:
    """Percent of blocks that hit, and of requests that have more than 16 blocks to compute."""
    here: set[BlockKey] = set()
    hits = late = 0
    for run in runs:
        hit = next((i for i, key in enumerate(run) if key not in here), len(run))
        hits += hit
        late += len(run) - hit > 16
        held = [key for key in run if key in here]
        policy.use(held)
        policy.admit([key for key in run if key not in here], held)
        here.update(run)
        victims = policy.victims(len(here) - capacity, here.difference(run).__contains__)
        policy.remove(victims)
        here.difference_update(victims)
    return 100 * hits / sum(map(len, runs)), 100 * late / len(runs)


@pytest.mark.parametrize(
    ("trace", "lru", "tail_optimised"),
    [
        ("synthetic", (42.39, 32.03), (42.21, 30.55)),
        ("conversation", (21.16, 34.47), (20.58, 33.82)),
    ],
)
def test_the_price_of_tail_optimised_lru_is_what_it_says(
    traces_folder: Path, trace: str, lru: tuple[float, float], tail_optimised: tuple[float, float]
) -> None:
    path = traces_folder / "mooncake" / f"{trace}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    ids = [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]
    runs = [[BlockKey(i.to_bytes(16, "little")) for i in run] for run in ids]
    assert tail_misses(runs, LRU(10_000), 10_000) == pytest.approx(lru, abs=0.05)
    assert tail_misses(runs, TailOptimisedLRU(10_000), 10_000) == pytest.approx(
        tail_optimised, abs=0.05
    )
    for wanted in (lru[1], tail_optimised[1]):
        assert f"{wanted:.1f}" in TailOptimisedLRU.price
