"""Load or recompute, with what the node measures: who decides, who keeps measuring."""

from collections import Counter
from collections.abc import Sequence

from tiered_kv.finding import coming_bytes, links, places, read_s, weigh
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Decision, Prefill
from tiered_kv.types import BlockKey, Fingerprint, Medium, Run
from tiered_kv.works import Works

SAMPLE_BYTES = 64 << 20
"""A leg that decisions avoid is read for its own sake, so much once it is `Pace.stale`: 13 MB/s
at most, and nobody waits for it."""


class Weighing(Works):
    """See `node.Node`."""

    def _weighed(
        self, media: Sequence[Medium], runs: Sequence[Run], *, before: int, block_tokens: int,
        block_bytes: int, new_tokens: int, prefill: Prefill | None, copy: Link | None = None,
    ) -> Decision | None:  # fmt: skip
        """How many of the blocks in `media` to load; None when there is nothing to decide."""
        if prefill is None or not media:
            return None
        mine: Counter[Medium] = Counter()
        for run in runs:
            mine += coming_bytes(self.hierarchy.book, run)
        decision = weigh(
            media, links(self.mover.paces, mine), block_tokens=block_tokens,
            block_bytes=block_bytes, before=before, new_tokens=new_tokens, prefill=prefill,
            copy=copy,
        )  # fmt: skip
        self.decisions.note(decision)
        return decision

    def _sample(
        self, layout: Fingerprint, run: Sequence[BlockKey], first: int, medium: Medium, nbytes: int
    ) -> None:
        """Read a little from a leg that a decision avoids, when nobody has for a while: else
        nobody would ever find out that it is well again."""
        pace = self.mover.paces.get(medium)
        if pace is None or pace.queued_bytes or not pace.stale(self._now()):
            return
        self.decisions.samples += 1
        self._want_piece(layout, run, first, first + max(1, SAMPLE_BYTES // nbytes), nbytes)

    def _want_piece(
        self, layout: Fingerprint, run: Sequence[BlockKey], first: int, end: int, nbytes: int
    ) -> None:
        """Start bringing a piece of a run up."""
        piece = run[first : min(end, first + self._most(nbytes))]
        parents = [run[first - 1] if first else None, *piece[:-1]]
        self.hierarchy.want(piece, layout, nbytes, parents=parents)

    def _places(self, run: Run) -> Sequence[Medium]:
        """Where the leading blocks of a run come from; what is not here may be below."""
        book = self.hierarchy.book
        media = places(book, run)
        return media + [Medium.HOST] * (len(run) - len(media)) if book.sinks else media

    def _read_s(self, run: Run, nbytes: int) -> float:
        """How long bringing up what is held of a run should take; 0 when it is all here."""
        media = self._places(run)
        if all(medium is self.parts.medium for medium in media):
            return 0.0
        legs = links(self.mover.paces, coming_bytes(self.hierarchy.book, run))
        return read_s(media, legs, nbytes)
