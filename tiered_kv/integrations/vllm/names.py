"""The names of a request's blocks, made from the engine's own chained hashes of its pages.

The hash of a page covers all tokens before it, adapters, images and the cache salt. A block is
named after its last page, so an incomplete block of k pages (the tail of a prompt or of an answer)
is named after its k-th page, and is never taken for the complete one.
"""

import os
from collections.abc import Sequence

from tiered_kv import keys
from tiered_kv.layout import KVLayout
from tiered_kv.types import BlockKey
from tiered_kv.wire import Ask


class Names:
    """Names for every rank of one engine. Thread-safe."""

    def __init__(self, layouts: Sequence[KVLayout], secret: bytes, group: int) -> None:
        self.layouts = tuple(layouts)
        self._secret = secret
        self.group = group
        self._salt = b""

    def renew(self) -> None:
        """From now on every block has another name, which no other engine uses: the weights may
        have been changed in place, and nothing tells them from those before."""
        self._salt = os.urandom(16)

    def block(
        self, hashes: Sequence[bytes], block: int, pages: int | None = None
    ) -> list[BlockKey]:
        """The name of a block on each rank; of its first `pages` pages where it is incomplete."""
        last = block * self.group + (self.group if pages is None else pages) - 1
        salted = [hashes[last] + self._salt]
        return [keys.from_engine(one, self._secret, salted)[0] for one in self.layouts]

    def asks(self, hashes: Sequence[bytes]) -> tuple[Ask, ...]:
        """What to ask a node about all pages of a request. About 1 us a page and rank: not for
        the engine's thread."""
        salted = [one + self._salt for one in hashes]
        return tuple(self._ask(layout, salted) for layout in self.layouts)

    def _ask(self, layout: KVLayout, hashes: Sequence[bytes]) -> Ask:
        group = self.group
        named = keys.from_engine(layout, self._secret, hashes)
        complete = len(named) // group
        run = tuple(named[(i + 1) * group - 1] for i in range(complete))
        tails = tuple(
            tuple(named[i * group : min((i + 1) * group - 1, len(named))])
            for i in range(complete + 1)
        )
        return Ask(layout.fingerprint, run, tails)
