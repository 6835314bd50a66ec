"""The verb `find`: what all ranks hold of a request, what is worth loading, and its start."""

from collections.abc import Sequence

from tiered_kv.errors import BadInput
from tiered_kv.finding import Match, check_asks, match
from tiered_kv.inputs import check_count, short
from tiered_kv.node_reads import Reading
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.types import BlockKey, Lease, Why
from tiered_kv.wire import NO_LEASE, Ask, Found


class Finding(Reading):
    """See `node.Node`."""

    async def find(
        self, asks: Sequence[Ask], skip: int, new_tokens: int, prefill: Prefill | None = None,
        copy: Link | None = None, ttl_s: float | None = None,
    ) -> Found:  # fmt: skip
        """One call a request: what every rank holds of it, and what of that is worth loading.

        `skip` leading blocks are with the engine already and count as used; `new_tokens` are the
        prompt's tokens behind `run`. `prefill` is what the engine measured (None: load all that
        is found), `copy` the last leg, from the pool to the engine, with the bytes a second of
        all ranks together (None: nothing is known of it).

        What is worth loading and in the pool is leased for `ttl_s`; what lies below starts coming
        up, and nothing is waited for: `fetch` does, for any piece of the run (`again=True`, as
        its use is noted here). Blocks that only some ranks hold cannot be used by anybody, and
        are dropped unless one of their set is being stored: whoever stores must have reserved the
        set of all ranks before it commits the first. In a GPU's node only what that GPU holds is
        found. O(keys); 0.2 ms for a rank with 128 blocks. Raises `BadInput`, `BadLayout`.
        """
        asks = check_asks(asks)
        nbytes = [self._nbytes(ask.layout) for ask in asks]
        self._check_find(asks, skip, new_tokens, prefill, copy)
        ttl_s, _ = self._times(ttl_s, None)
        seen = match(self.hierarchy.book, asks, skip)
        for ask, run in zip(asks, seen.runs, strict=True):
            self._check_blocks(ask.layout, run[seen.blocks :])
        media = seen.media[skip:]
        missing = len(asks[0].run) - seen.blocks
        step = self.layouts[asks[0].layout].block_tokens
        rest = max(0, missing * step + new_tokens - (step if seen.tail else 0))
        decision = self._weighed(
            media, seen.runs, before=skip, block_tokens=step, block_bytes=sum(nbytes),
            new_tokens=rest, prefill=prefill, copy=copy,
        )  # fmt: skip
        load = len(media) if decision is None else decision.load
        leases = []
        for ask, run, size in zip(asks, seen.runs, nbytes, strict=True):
            self.recording.note("find", ask.run, size)
            self.hierarchy.used(run)
            self.outlooks.read(run, self._in_pool)
            leases.append(self._start(ask, run, skip, load, size, ttl_s))
        if load < len(media):
            self._sample(asks[0].layout, seen.runs[0], skip + load, media[load], nbytes[0])
        self._drop_torn(asks, seen)
        self._kick()
        self._count("hit", sum(len(lease.keys) for lease in leases))
        absent = len(asks[0].run) - max(seen.blocks, skip)
        self._count(f"miss.{Why.ABSENT}", len(asks) * absent)
        self._count(f"miss.{Why.SLOWER}", len(asks) * (len(media) - load))
        sums = tuple([self._sums(lease) for lease in leases])
        return Found(seen.blocks, seen.tail, load, tuple(leases), media[:load], decision, sums)

    def _sums(self, lease: Lease) -> tuple[int | None, ...]:
        return tuple([block.checksum for block in self.hierarchy.book.live(lease.keys)])

    def _check_find(
        self, asks: Sequence[Ask], skip: int, new_tokens: int, prefill: object, copy: object
    ) -> None:
        blocks = len(asks[0].run)
        check_count("skip", skip)
        check_count("new_tokens", new_tokens)
        if skip > blocks:
            raise BadInput(f"skip {skip} is more than the {blocks} blocks that are asked for")
        if prefill is not None and not isinstance(prefill, Prefill):
            raise BadInput(f"prefill must be a Prefill, not {short(prefill)}")
        if copy is not None and not isinstance(copy, Link):
            raise BadInput(f"copy must be a Link, not {short(copy)}")
        steps = [self.layouts[ask.layout].block_tokens for ask in asks]
        if len(set(steps)) > 1:
            raise BadInput(f"the ranks' blocks have {steps} tokens, not all the same")
        for ask in asks:
            self._check_blocks(ask.layout, ask.run)

    def _start(
        self, ask: Ask, run: Sequence[BlockKey], skip: int, load: int, nbytes: int, ttl_s: float
    ) -> Lease:
        """Lease what is in the pool of the blocks to load, and start bringing the others up."""
        piece = run[skip : skip + load]
        lease = self.hierarchy.lease(piece, ttl_s, self._now(), again=True)
        if len(lease.keys) < len(piece):
            self._want_piece(ask.layout, run, skip, skip + load, nbytes)
        if lease.keys:
            return self._hand_out(lease)
        self.hierarchy.release(lease.id)
        return Lease(NO_LEASE, (), (), nbytes, lease.expires_s)

    def _drop_torn(self, asks: Sequence[Ask], seen: Match) -> None:
        book = self.hierarchy.book
        if not any(seen.torn) or book.outage or book.below:
            return  # what is out of sight may be there
        wanted = [key for ask in asks for key in ask.run[seen.blocks :]]
        if asks[0].tails[seen.blocks :]:
            wanted += [key for ask in asks for key in ask.tails[seen.blocks]]
        if not self.hierarchy.reserving(wanted):
            gone = [key for keys in seen.torn for key in self.hierarchy.forget(keys)]
            self.keeper.erase(gone)
            self.counts["torn"] += len(gone)
