"""`tiered-kv bench hierarchy`: the decisions alone, no I/O: how many block accesses a second.

An access is a block of a request, whether it hits or misses. The workload is made here, seeded:
chat sessions that share system prompts and come back with a longer prompt each turn.
"""

import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tiered_kv.bench.report import Result, compared
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.types import (
    BlockKey,
    Done,
    Fingerprint,
    Medium,
    Outcome,
    Reservation,
    Run,
)

BLOCK_BYTES = 2 << 20
CAPACITY_BLOCKS = 10_000
LAYOUT = Fingerprint(bytes(16))
ACCESSES_BAR = 400_000
LOOKUP_BLOCKS, LOOKUP_P50_US, LOOKUP_P99_US = 128, 60.0, 200.0

Progress = Callable[[str, int, int], None]


@dataclass
class Chat:
    """A session of the workload: the keys it has so far."""

    keys: list[BlockKey]


def workload(requests: int, seed: int = 1, chats: int = 400, turn_blocks: int = 6) -> list[Run]:
    """Runs of `requests` requests. About 45 blocks each; two thirds could hit in the capacity."""
    rng = random.Random(seed)
    systems = [_extend([], 8, f"system-{i}") for i in range(8)]
    open_chats: list[Chat] = []
    runs: list[Run] = []
    for number in range(requests):
        if len(open_chats) < chats or rng.random() < 0.06:
            open_chats.append(Chat(list(rng.choice(systems))))
            if len(open_chats) > chats:
                del open_chats[0]
        # recent sessions are likelier, as in real traces
        at = len(open_chats) - 1 - min(int(rng.expovariate(6 / chats)), len(open_chats) - 1)
        chat = open_chats[at]
        chat.keys = _extend(chat.keys, rng.randint(1, 2 * turn_blocks), f"{number}")
        if len(chat.keys) > 160:
            chat.keys = _extend(list(rng.choice(systems)), 4, f"compacted-{number}")
        runs.append(tuple(chat.keys))
    return runs


def _extend(keys: Sequence[BlockKey], n: int, name: str) -> list[BlockKey]:
    fresh = [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(n)]
    return [*keys, *map(BlockKey, fresh)]


def replay(hierarchy: Hierarchy, runs: Sequence[Run]) -> int:
    """Drive the real hierarchy with all runs, moves ending at once; how many blocks hit."""
    hits = 0
    top = hierarchy.book.top.spec.medium
    layout, nbytes = LAYOUT, BLOCK_BYTES
    two = len(hierarchy.book.tiers) > 1
    for now, run in enumerate(runs):
        hierarchy.lookup(run)
        if two:
            hierarchy.want(run, layout, nbytes)
            _finish(hierarchy, now)
        lease = hierarchy.lease(run, 1e9, now)
        hits += len(lease.keys)
        reserved = hierarchy.reserve(run, layout, nbytes, top)
        if not isinstance(reserved, Reservation):
            _finish(hierarchy, now)
            reserved = hierarchy.reserve(run, layout, nbytes, top, force=True)
        if isinstance(reserved, Reservation):
            hierarchy.commit(reserved.id)
        hierarchy.release(lease.id)
        _finish(hierarchy, now)
    return hits


def _finish(hierarchy: Hierarchy, now: float) -> None:
    while moves := hierarchy.due(now):
        for move in moves:
            outcomes: list[Outcome] = [Done(1)] * len(move.blocks)
            hierarchy.done(move, outcomes)


def reference(runs: Sequence[Run], capacity: int) -> int:
    """The least that an LRU has to do for the same accesses: no slots, leases or residency."""
    order: OrderedDict[BlockKey, None] = OrderedDict()
    hits = 0
    for run in runs:
        leading = True
        for key in run:
            leading = leading and key in order
            hits += leading
        for key in reversed(run):
            order[key] = None
            order.move_to_end(key)
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


def run(*, seconds: float = 20.0, progress: Progress | None = None) -> list[Result]:
    """Interleaved rounds for about `seconds`; medians of CPU seconds, which is time on one core
    that nobody else uses meanwhile."""
    runs = workload(4_000)
    accesses = sum(map(len, runs))
    shapes: dict[str, Callable[[], object]] = {
        "dram": lambda: replay(hierarchy_of(CAPACITY_BLOCKS), runs),
        "dram+nvme": lambda: replay(hierarchy_of(CAPACITY_BLOCKS, 4 * CAPACITY_BLOCKS), runs),
        "dram/adaptive": lambda: replay(hierarchy_of(CAPACITY_BLOCKS, policy="adaptive"), runs),
        "reference": lambda: reference(runs, CAPACITY_BLOCKS),
    }
    took: dict[str, list[float]] = {name: [] for name in shapes}
    began = time.perf_counter()
    rounds = 0
    while rounds < 3 or time.perf_counter() - began < seconds:
        for name, step in shapes.items():
            if progress is not None:
                progress(name, int(time.perf_counter() - began), int(seconds))
            start = time.process_time()
            step()
            took[name].append(time.process_time() - start)
        rounds += 1
    rate = {name: accesses / median(times) for name, times in took.items()}
    hit = 100 * replay(hierarchy_of(CAPACITY_BLOCKS), runs) / accesses
    against = "OrderedDict LRU"
    return [
        Result("hierarchy/accesses/dram", rate["dram"], "1/s", against, rate["reference"],
               rate["dram"] / rate["reference"], ACCESSES_BAR, rate["dram"] >= ACCESSES_BAR),
        Result("hierarchy/accesses/dram+nvme", rate["dram+nvme"], "1/s", against,
               rate["reference"], rate["dram+nvme"] / rate["reference"]),
        compared("hierarchy/accesses/dram/adaptive", rate["dram/adaptive"], "1/s", "policy lru",
                 rate["dram"]),
        Result("hierarchy/hit-ratio/dram", hit, "%"),
        *_lookups(runs),
    ]  # fmt: skip


def hierarchy_of(*blocks: int, policy: str = "lru") -> Hierarchy:
    """DRAM, and NVMe below it where a second size is given, of so many blocks."""
    media = (Medium.DRAM, Medium.NVME)
    return Hierarchy(
        [
            TierSpec(medium, n * BLOCK_BYTES, 50 * BLOCK_BYTES, high=0.95, low=0.90, policy=policy)
            for medium, n in zip(media, blocks, strict=False)
        ]
    )


def _lookups(runs: Sequence[Run]) -> list[Result]:
    """`lookup` of 128 held blocks, a 32K-token session, among thousands of others."""
    hierarchy = hierarchy_of(CAPACITY_BLOCKS)
    replay(hierarchy, runs[:1_000])
    session = tuple(_extend([], LOOKUP_BLOCKS, "a 32K-token session"))
    held = hierarchy.reserve(session, LAYOUT, BLOCK_BYTES, "bench", force=True)
    assert isinstance(held, Reservation)
    hierarchy.commit(held.id)
    took: list[float] = []
    for _ in range(5_000):
        start = time.perf_counter_ns()
        hierarchy.lookup(session)
        took.append((time.perf_counter_ns() - start) / 1e3)
    took.sort()
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    name = f"hierarchy/lookup/{LOOKUP_BLOCKS}"
    return [
        Result(f"{name}/p50", p50, "us", bar=LOOKUP_P50_US, holds=p50 <= LOOKUP_P50_US),
        Result(f"{name}/p99", p99, "us", bar=LOOKUP_P99_US, holds=p99 <= LOOKUP_P99_US),
    ]
