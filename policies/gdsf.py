"""GDSF: greedy dual by size and frequency (Cherkasova, HP Labs 1998), for what recomputing costs.

A block is worth `age + uses * cost / size`, where `age` is the worth of what left last, so that
old fame fades. Sizes are equal here. The cost is the work to compute the block again: a token's
linear layers, and attention to all tokens before it, which deep in a prompt is as much again.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from tiered_kv.policies.base import Evictable, pick
from tiered_kv.types import BlockKey

BLOCKS_OF_ATTENTION = 200.0
"""Depth at which attention costs as much as all else: about 50,000 tokens for a 70B model
(2 * 70e9 FLOP a token against 4 * 80 layers * 8192 for each token before it), 256 a block."""


class GDSF:
    """A heap of worths; entries of blocks that were used since are stale."""

    name: ClassVar[str] = "gdsf"

    def __init__(self, capacity_blocks: int) -> None:
        self._age = 0.0
        self._count = 0
        self._worth: dict[BlockKey, tuple[float, int]] = {}  # and the number of its entry
        self._uses: dict[BlockKey, tuple[int, float]] = {}  # and the cost
        self._heap: list[tuple[float, int, BlockKey]] = []

    def admit(self, new: Sequence[BlockKey], before: Sequence[BlockKey]) -> None:
        depth = len(before) + len(new)
        for key in reversed(new):
            depth -= 1
            self._uses[key] = (1, 1.0 + depth / BLOCKS_OF_ATTENTION)
            self._push(key)

    def use(self, run: Sequence[BlockKey]) -> None:
        for key in reversed(run):
            uses, cost = self._uses[key]
            self._uses[key] = (uses + 1, cost)
            self._push(key)
        if len(self._heap) > 64 + 4 * len(self._worth):
            self._heap = [(worth, n, key) for key, (worth, n) in self._worth.items()]
            heapq.heapify(self._heap)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._age = max(self._age, self._worth.pop(key)[0])
            del self._uses[key]

    def victims(self, n: int, evictable: Evictable) -> list[BlockKey]:
        return pick(self._walk(), n, evictable)

    def __len__(self) -> int:
        return len(self._worth)

    def check(self, resident: Collection[BlockKey]) -> None:
        assert self._worth.keys() == self._uses.keys() == set(resident), "residents differ"
        live = {key for worth, n, key in self._heap if self._worth.get(key) == (worth, n)}
        assert live == set(resident), "a block is not in the heap"

    def _push(self, key: BlockKey) -> None:
        uses, cost = self._uses[key]
        self._count += 1
        self._worth[key] = (self._age + uses * cost, self._count)
        heapq.heappush(self._heap, (*self._worth[key], key))

    def _walk(self) -> Iterator[BlockKey]:
        heap, seen = self._heap, []
        try:
            while heap:
                entry = heapq.heappop(heap)
                if self._worth.get(entry[2]) == entry[:2]:
                    seen.append(entry)
                    yield entry[2]
        finally:
            for entry in seen:
                heapq.heappush(heap, entry)
