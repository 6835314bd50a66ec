"""Golden numbers: hit ratios of a public trace through the real hierarchy.

A change that moves one of them must say so. They agree with independent replays of the same trace
(conversations of the Mooncake paper, 512 tokens a block, one tier).
"""

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

from tiered_kv.hierarchy import Hierarchy, TierSpec, check
from tiered_kv.policies import eviction
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.types import BlockKey, Fingerprint, Medium, Reservation

BLOCK = 1 << 20
LAYOUT = Fingerprint(b"golden layout...")


@pytest.fixture(scope="module")
def runs(traces_folder: Path) -> list[list[BlockKey]]:
    """The blocks of each request of the trace, in prefix order."""
    path = traces_folder / "mooncake" / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    ids = [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]
    keys = {
        i: BlockKey(hashlib.blake2b(str(i).encode(), digest_size=16).digest())
        for run in ids
        for i in run
    }
    return [[keys[i] for i in run] for run in ids]


def replay(runs: list[list[BlockKey]], policy: str, capacity_blocks: int) -> float:
    """Percent of the blocks that were found, each run being read and then stored."""
    spec = TierSpec(Medium.DRAM, capacity_blocks * BLOCK, BLOCK, high=1.0, low=1.0, policy=policy)
    h = Hierarchy([spec])
    hits = 0
    for now, run in enumerate(runs):
        lease = h.lease(run, 1e9, now)
        hits += len(lease.keys)
        if len(lease.keys) < len(run):
            reservation = h.reserve(run, LAYOUT, BLOCK, "replay")
            if isinstance(reservation, Reservation):
                h.commit(reservation.id)
        h.release(lease.id)
        h.due(now)
    check(h)
    assert len(h.book.blocks) == capacity_blocks
    return 100 * hits / sum(map(len, runs))


def is_not_in(run: set[BlockKey], key: BlockKey) -> bool:
    return key not in run


def replay_order(runs: list[list[BlockKey]], policy: EvictionPolicy, capacity_blocks: int) -> float:
    """The same with nothing but the policy's order: whoever is not in the request may leave."""
    here: set[BlockKey] = set()
    hits = 0
    for run in runs:
        held = [key for key in run if key in here]
        hits += next((i for i, key in enumerate(run) if key not in here), len(run))
        policy.use(held)
        policy.admit([key for key in run if key not in here], held)
        here.update(run)
        victims = policy.victims(len(here) - capacity_blocks, partial(is_not_in, set(run)))
        policy.remove(victims)
        here.difference_update(victims)
    return 100 * hits / sum(map(len, runs))


@pytest.mark.parametrize(
    ("policy", "capacity_blocks", "percent"),
    [
        ("lru", 1_000, 4.45),
        ("lru", 3_000, 6.53),
        ("lru", 10_000, 21.16),
        ("fifo", 1_000, 4.45),
        ("fifo", 3_000, 6.99),
        ("fifo", 10_000, 19.98),  # that heads outlive their tails is worth two points to FIFO
    ],
)
def test_the_hit_ratio_of_a_public_trace_stays(
    runs: list[list[BlockKey]], policy: str, capacity_blocks: int, percent: float
) -> None:
    assert replay(runs, policy, capacity_blocks) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("policy", "capacity_blocks", "percent"),
    [("lru", 3_000, 6.53), ("lru", 10_000, 21.16), ("fifo", 3_000, 6.32), ("fifo", 10_000, 18.14)],
)
def test_the_bare_order_hits_what_published_replays_hit(
    runs: list[list[BlockKey]], policy: str, capacity_blocks: int, percent: float
) -> None:
    made = eviction(policy, capacity_blocks)
    assert replay_order(runs, made, capacity_blocks) == pytest.approx(percent, abs=0.05)
