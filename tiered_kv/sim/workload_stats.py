"""What a stream of requests looks like to a cache: reuse, distances, think times.

Stack distances are sampled by key (SHARDS: Waldspurger et al., FAST'15), so that one key in
`sample` is followed and its distances are multiplied.
"""

import bisect
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tiered_kv.sim.workload_sessions import BLOCK_TOKENS, Request


@dataclass(slots=True)
class Shape:
    """The figures of a workload. Ratios are in 0..1, distances in blocks, times in seconds."""

    requests: int = 0
    accesses: int = 0
    ideal_hits: int = 0
    blocks: int = 0
    used_once: int = 0
    distances: list[int] = field(default_factory=list)
    reuse_s: list[float] = field(default_factory=list)
    think_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def blocks_a_request(self) -> float:
        """Mean length of a run."""
        return self.accesses / self.requests

    @property
    def ideal_hit_ratio(self) -> float:
        """Of an infinite cache."""
        return self.ideal_hits / self.accesses

    @property
    def once_ratio(self) -> float:
        """Blocks that one request used."""
        return self.used_once / self.blocks


def shape(requests: Iterable[Request], *, whole: bool = False, sample: int = 16) -> Shape:
    """Measure a stream; `whole` leaves incomplete last blocks out. Memory: a count a block."""
    found, uses, last_s = Shape(), Counter[int](), dict[int, float]()
    stack: list[int] = []  # positions of the sampled keys' last uses, ascending
    where: dict[int, int] = {}
    clock = 0
    for request in requests:
        run = request.hash_ids[: request.input_length // BLOCK_TOKENS if whole else None]
        found.requests += 1
        found.accesses += len(run)
        found.ideal_hits += next((i for i, key in enumerate(run) if key not in uses), len(run))
        if request.after:
            found.think_s.setdefault(request.after, []).append(request.think_s)
        uses.update(run)
        for key in run:
            if zlib.crc32(key.to_bytes(8, "little")) % sample:
                continue
            clock += 1
            if key in where:
                at = bisect.bisect_left(stack, where[key])
                found.distances.append((len(stack) - at) * sample)
                found.reuse_s.append(request.at_s - last_s[key])
                del stack[at]
            stack.append(clock)
            where[key], last_s[key] = clock, request.at_s
    found.blocks = len(uses)
    found.used_once = sum(1 for n in uses.values() if n == 1)
    return found


def percentile(values: Iterable[float], percent: float) -> float:
    """By rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
