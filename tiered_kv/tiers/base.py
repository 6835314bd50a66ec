"""The verbs that every tier has, whatever its medium.

A process has one *pool*: memory with slots that it and its clients address directly (the arena
of a node, the device tensor of a GPU). A tier is a medium that blocks are copied to from slots of
that pool and back from. Tiers own no policy: which slot belongs to which block, what moves and
what leaves is decided by the hierarchy; a tier does it and says how it went, block by block.
"""

from collections.abc import Sequence
from typing import Protocol

from tiered_kv.types import BlockKey, Located, Medium, Outcome, Probe


class Tier(Protocol):
    """A medium below the pool. All calls block, release the GIL while bytes move, and may run in
    several threads at once; two calls never name the same slot of the tier at the same time.
    """

    medium: Medium

    def read(self, blocks: Sequence[Located], into: Sequence[int]) -> list[Outcome]:
        """Copy each block from `blocks[i].slot` of this tier into pool slot `into[i]`.

        One outcome a block. Bytes that do not match `checksum` are `Failed(CORRUPT)`. Raises
        `TierBroken` only when nothing of the batch was tried.
        """
        ...

    def write(self, blocks: Sequence[Located], source: Sequence[int]) -> list[Outcome]:
        """Copy pool slot `source[i]` to `blocks[i].slot` of this tier; `Done` has its checksum.

        After `Done` the block is found by the next incarnation where the medium outlives the
        process. After `Failed` the copy in the pool is still the truth.
        """
        ...

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget copies, so that no later incarnation finds them."""
        ...

    def probe(self) -> Probe:
        """Write, read back, compare and time a few blocks of scratch space. Raises `TierBroken`."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
