"""`tiered-kv bench replay`: how fast a trace goes through the real hierarchy, in how much memory.

Beside it `cachetools.LRUCache` (the extra `bench`), driven with the same accesses in turn: a plain
LRU of keys, without slots, leases, residency or prefixes. An access is a block of a request,
whether it hits or misses.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tiered_kv.bench.report import Result, compared
from tiered_kv.policies import eviction
from tiered_kv.sim.replay import Replayed, replay
from tiered_kv.sim.traces import Trace
from tiered_kv.sim.workload import generate
from tiered_kv.types import BlockKey, Run

ACCESSES_BAR = 400_000
WHOLE_BAR = 300_000
"""Accesses a second with reading the trace: 5.9 million, the whole Claude Code trace, in 20 s."""
SESSIONS, SEED = 60, 1
PEER = "cachetools.LRUCache"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Agents:
    """Made-up coding agents, in place of a trace: about 1.3 million accesses, 49,000 blocks."""

    sessions: int = SESSIONS
    name: str = "agents"

    def runs(self) -> Iterator[Run]:
        """The blocks of each request; the same each time."""
        for request in generate("agent", self.sessions, SEED):
            yield [BlockKey(i.to_bytes(16, "little")) for i in request.hash_ids]


class Whole(NamedTuple):
    """A replay in a process of its own, reading included: CPU seconds and resident bytes, its own
    peak and what there was before it began."""

    found: Replayed
    cpu_s: float
    peak_bytes: int
    before_bytes: int


def run(
    *, trace: Trace | None = None, policy: str = "lru", blocks: int = 2_000,
    seconds: float = 20.0, progress: Progress | None = None,
) -> list[Result]:  # fmt: skip
    """At least three interleaved rounds, for about `seconds`; medians of CPU seconds, which is
    time on one core that nobody else uses meanwhile. Holds all runs in memory, so that both sides
    are told the same without reading. Raises `UnknownName`, and what the trace raises."""
    eviction(policy, blocks)
    source = Agents() if trace is None else trace
    runs = list(source.runs())
    accesses = sum(map(len, runs))
    contenders: dict[str, Callable[[], int]] = {policy: lambda: replay(runs, policy, blocks).hits}
    if find_spec("cachetools") is not None:
        contenders[PEER] = lambda: plain_lru(runs, blocks)
    took, hits = _in_turn(contenders, seconds, progress)
    if progress is not None:
        progress("once more in a process of its own", int(seconds), int(seconds))
    whole = _whole(source, policy, blocks)
    name = f"replay/{source.name}/{policy}/{blocks}"
    rate = accesses / median(took[policy])
    whole_rate = accesses / whole.cpu_s
    found = [_speed(f"{name}/accesses", rate, accesses, took)]
    if PEER in hits:
        ours, its = (100 * hits[contender] / accesses for contender in (policy, PEER))
        found.append(compared(f"{name}/hits", ours, "%", PEER, its))
    found += [
        Result(f"{name}/whole/accesses", whole_rate, "1/s", bar=WHOLE_BAR,
               holds=whole_rate >= WHOLE_BAR),
        Result(f"{name}/whole/seconds", whole.cpu_s, "CPU s"),
        Result(f"{name}/whole/peak-memory", whole.peak_bytes / 2**20, "MiB",
               "the process before", whole.before_bytes / 2**20),
    ]  # fmt: skip
    return found


def plain_lru(runs: Sequence[Run], blocks: int) -> int:
    """The same accesses through `cachetools.LRUCache`, each run touched tail first; how many
    blocks of leading resident parts it had."""
    from cachetools import LRUCache

    cache: LRUCache[BlockKey, None] = LRUCache(blocks)
    hits = 0
    for run in runs:
        for key in run:
            if key not in cache:
                break
            hits += 1
        for key in reversed(run):
            cache[key] = None
    return hits


def _in_turn(
    contenders: dict[str, Callable[[], int]], seconds: float, progress: Progress | None
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """CPU seconds of each round and hits, by contender."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    hits: dict[str, int] = {}
    began, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - began < seconds:
        for name, step in contenders.items():
            if progress is not None:
                progress(name, min(int(time.perf_counter() - began), int(seconds)), int(seconds))
            start = time.process_time()
            hits[name] = step()
            took[name].append(time.process_time() - start)
        rounds += 1
    return took, hits


def _speed(name: str, rate: float, accesses: int, took: dict[str, list[float]]) -> Result:
    """Accesses a second, beside those of the peer where it is installed; the bar is absolute."""
    if PEER not in took:
        return Result(name, rate, "1/s", f"{PEER} is not installed", bar=ACCESSES_BAR,
                      holds=rate >= ACCESSES_BAR)  # fmt: skip
    peer = accesses / median(took[PEER])
    return Result(name, rate, "1/s", PEER, peer, rate / peer, ACCESSES_BAR, rate >= ACCESSES_BAR)


def _whole(source: Trace | Agents, policy: str, blocks: int) -> Whole:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_alone, source, policy, blocks).result()


def _alone(source: Trace | Agents, policy: str, blocks: int) -> Whole:
    before, start = _peak_bytes(), time.process_time()
    found = replay(source, policy, blocks)
    return Whole(found, time.process_time() - start, _peak_bytes(), before)


def _peak_bytes() -> int:
    """Not `ru_maxrss`, which a started process takes over from the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
