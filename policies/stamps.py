"""Blocks ordered by a whole number each, many of them equal: buckets and a heap of numbers."""

import heapq
from collections.abc import Iterator

from tiered_kv.types import BlockKey


class Stamps:
    """Smallest stamp first; among equals the one that was put there first. O(1) a block, and
    O(log stamps) a new stamp."""

    def __init__(self) -> None:
        self.of: dict[BlockKey, int] = {}
        self._buckets: dict[int, dict[BlockKey, None]] = {}
        self._heap: list[int] = []

    def put(self, key: BlockKey, stamp: int) -> None:
        """File a block, or file it anew."""
        if key in self.of:
            self.take(key)
        self.of[key] = stamp
        bucket = self._buckets.get(stamp)
        if bucket is None:
            self._buckets[stamp] = {key: None}
            heapq.heappush(self._heap, stamp)
        else:
            bucket[key] = None

    def take(self, key: BlockKey) -> None:
        """Forget a block."""
        stamp = self.of.pop(key)
        bucket = self._buckets[stamp]
        del bucket[key]
        if not bucket:
            del self._buckets[stamp]

    def __iter__(self) -> Iterator[BlockKey]:
        """All blocks in order; a step looks at no more stamps than it must."""
        for _, bucket in self.buckets():
            yield from bucket

    def buckets(self) -> Iterator[tuple[int, list[BlockKey]]]:
        """Stamps in order, each with its blocks."""
        heap = self._heap
        passed: list[int] = []
        try:
            while heap:
                stamp = heapq.heappop(heap)
                if stamp in self._buckets and stamp not in passed[-1:]:
                    passed.append(stamp)
                    yield stamp, list(self._buckets[stamp])
        finally:
            for stamp in passed:
                heapq.heappush(heap, stamp)
