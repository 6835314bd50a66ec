"""Blocks that share their fate: stretches of a run that were always used together.

A block is used whenever a block behind it is, so along a run uses only fall and ages only rise:
runs fall into few stretches of equal history. They are kept as such, so that using a run costs a
step a stretch and not a step a block.
"""

from array import array
from collections.abc import Sequence

from tiered_kv.policies.reuse import Era
from tiered_kv.types import BlockKey


class History:
    """What is known of some blocks that were last touched together."""

    __slots__ = ("era", "gap", "kinds", "last", "uses", "weight")

    def __init__(self, last: float, uses: int, gap: float) -> None:
        self.last = last
        self.uses = uses
        self.gap = gap
        self.kinds: tuple[int, ...] = ()  # class in each table
        self.weight = 0.0  # of each block; a request weighs 1
        self.era: Era | None = None

    def like(self, other: "History") -> None:
        """Take over what is known of others."""
        self.last, self.uses, self.gap = other.last, other.uses, other.gap
        self.kinds, self.weight, self.era = other.kinds, other.weight, other.era


class Segment(History):
    """Resident blocks, in prefix order. `rank` is its place in the order of touches."""

    __slots__ = ("ghost", "keys", "rank")

    def __init__(self, keys: list[BlockKey], last: float, uses: int, gap: float) -> None:
        super().__init__(last, uses, gap)
        self.keys = keys
        self.rank = 0
        self.ghost: Ghost | None = None


class Ghost(History):
    """Evicted blocks, in prefix order: 8 bytes of each, the hash of its key."""

    __slots__ = ("prints",)

    def __init__(self, keys: Sequence[BlockKey], segment: Segment) -> None:
        super().__init__(segment.last, segment.uses, segment.gap)
        self.like(segment)
        self.prints = array("q", map(hash, keys))

    def matched(self, run: Sequence[BlockKey], start: int) -> int:
        """How many of them are in the run from `start` on."""
        same = 0
        for seen, key in zip(self.prints, run[start:], strict=False):
            if seen != hash(key):
                break
            same += 1
        return same


class Segments:
    """The segment of each resident block."""

    def __init__(self) -> None:
        self.of: dict[BlockKey, Segment] = {}

    def add(self, segment: Segment) -> None:
        """File its blocks under it."""
        for key in segment.keys:
            self.of[key] = segment

    def split(self, segment: Segment, at: int) -> Segment:
        """Cut off and return the blocks from `at` on."""
        tail = Segment(segment.keys[at:], 0.0, 0, 0.0)
        tail.like(segment)
        del segment.keys[at:]
        self.add(tail)
        return tail

    def cut(self, run: Sequence[BlockKey]) -> tuple[list[Segment], list[Segment]]:
        """The segments that are the resident blocks of a run, in order; and those that were cut
        off them, since the run does not have their blocks."""
        parts: list[Segment] = []
        others: list[Segment] = []
        i, n = 0, len(run)
        while i < n:
            segment = self.of.get(run[i])
            if segment is None:
                i += 1
                continue
            if segment.keys[0] != run[i]:  # never, while runs begin at their first block
                whole, segment = segment, self.split(segment, segment.keys.index(run[i]))
                others += [whole] if whole not in parts else []
            keys = segment.keys
            if list(run[i : i + len(keys)]) != keys:
                same = range(1, len(keys))
                others.append(
                    self.split(
                        segment, next(j for j in same if i + j >= n or keys[j] != run[i + j])
                    )
                )
            parts.append(segment)
            i += len(keys)
        return parts, others
