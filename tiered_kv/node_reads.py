"""The verbs that read: lookup, fetch, wake, release."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from tiered_kv.errors import BadInput, BadLayout, StaleHandle
from tiered_kv.inputs import LONGEST_S, check_count, check_key, check_run, check_seconds, short
from tiered_kv.node_weighs import Weighing
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.sessions import Session, session_id
from tiered_kv.types import (
    Answer,
    BlockKey,
    Done,
    Failed,
    Fingerprint,
    Held,
    Lease,
    Medium,
    Outcome,
    Run,
    Why,
)
from tiered_kv.wire import NO_LEASE, Fetched

HOLD_S = 2 * LONGEST_S
"""For how long a wait may hold what has come, if it is never ended."""


class Reading(Weighing):
    """Leases, and what brings blocks up for them. See `node.Node`."""

    async def lookup(self, run: Run) -> list[Answer]:
        """What is held of a run here; promises nothing."""
        check_run(run)
        return self.hierarchy.lookup(run)

    async def fetch(
        self, layout: Fingerprint, run: Run, ttl_s: float | None = None,
        deadline_s: float | None = None, again: bool = False, parent: BlockKey | None = None,
    ) -> Fetched:  # fmt: skip
        """Bring the leading held blocks of a run into the pool and lease them.

        Waits for moves up to `deadline_s` and leases what has come by then: the rest is a miss.
        The run may be a piece from the middle of another one; `parent` is the block before it
        then, and `again` says that its use was noted by `find`.
        """
        nbytes = self._nbytes(layout)
        self._check_run(layout, run)
        if parent is not None:
            check_key(parent)
        ttl_s, deadline_s = self._times(ttl_s, deadline_s)
        began = time.monotonic()
        found: dict[BlockKey, Medium] = {}
        modelled_s = self._read_s(run, nbytes)
        why = await self._bring(layout, run, nbytes, began + deadline_s, found, parent)
        self._check_blocks(layout, run)  # what came meanwhile, too
        lease = self.hierarchy.lease(run, ttl_s, self._now(), again=again)
        missed = len(run) - len(lease.keys)
        if modelled_s and not missed:
            self.decisions.measured(modelled_s, time.monotonic() - began)
        if missed:
            self.counts[f"miss.{why or Why.ABSENT}"] += missed
        self.counts["hit"] += len(lease.keys)
        checksums = tuple([b.checksum for b in self.hierarchy.book.live(lease.keys)])
        return Fetched(
            lease=self._hand_out(lease),
            found=tuple([found.get(key, self.parts.medium) for key in lease.keys]),
            missed=missed,
            why=(why or Why.ABSENT) if missed else None,
            seconds=time.monotonic() - began,
            checksums=checksums,
        )

    async def wake(
        self, sid: str, layout: Fingerprint, ttl_s: float | None = None,
        deadline_s: float | None = None, prefill: Prefill | None = None,
    ) -> Fetched:  # fmt: skip
        """`fetch` for the blocks of a session: all, or with `prefill` (the engine's measured rate)
        those that are modelled to be loaded faster than they are computed. Raises
        `UnknownSession`, and `BadLayout` when the session was saved with another layout."""
        self._nbytes(layout)
        self._times(ttl_s, deadline_s)
        if prefill is not None and not isinstance(prefill, Prefill):
            raise BadInput(f"prefill must be a Prefill, not {short(prefill)}")
        session = await self.keeper.use(session_id(sid))
        if session.layout != layout:
            raise BadLayout(
                f"session {session.id!r} has layout {session.layout.hex()}, not {layout.hex()}"
            )
        self._is_here(session)
        self.recording.note("wake", session.run, self.layouts[layout].block_bytes)
        self.outlooks.read(session.run, self._in_pool)
        self.keeper.table.enter(session.id)
        try:
            run = self._worthwhile(session, prefill)
            fetched = await self.fetch(layout, run, ttl_s, deadline_s)
        finally:
            self.keeper.table.leave(session.id)
        left = len(session.run) - len(run)
        self._count(f"miss.{Why.SLOWER}", left)
        why = fetched.why or (Why.SLOWER if left else None)
        return replace(fetched, missed=fetched.missed + left, why=why, session=session)

    def _worthwhile(self, session: Session, prefill: Prefill | None) -> Run:
        """The part of a session's run to ask for: all, or as far as loading what is held is
        faster than computing it."""
        layout = self.layouts[session.layout]
        media = self._places(session.run)
        decision = self._weighed(
            media, (session.run,), before=0, block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes, prefill=prefill,
            new_tokens=max(0, session.n_tokens - len(media) * layout.block_tokens) + 1,
        )  # fmt: skip
        if decision is None or not decision.recompute:
            return session.run
        first = decision.load
        self._sample(session.layout, session.run, first, media[first], layout.block_bytes)
        return session.run[:first]

    async def release(self, lease: int) -> None:
        """End a lease. One that has expired meanwhile is fine: the reader has compared."""
        if lease == NO_LEASE:
            return
        try:
            self.hierarchy.release(self.handles.back(lease))
        except StaleHandle:
            self.counts["leases.late"] += 1
        self._kick()

    async def lapsed(self, blocks: int) -> None:
        """A reader threw copies away because their lease had ended."""
        check_count("blocks", blocks)
        self.counts[f"miss.{Why.LAPSED}"] += blocks

    async def distrust(self, keys: Run) -> int:
        """A reader found that bytes of the pool do not match their checksum: nobody gets that copy
        any more. How many blocks were lost with it, for want of another copy."""
        check_run(keys)
        return self.hierarchy.distrust(keys)

    def _times(self, ttl_s: float | None, deadline_s: float | None) -> tuple[float, float]:
        """For how long to lease and to wait: the configured times where none are given."""
        service = self.config.service
        ttl_s = service.lease_ttl_s if ttl_s is None else ttl_s
        deadline_s = service.wake_deadline_s if deadline_s is None else deadline_s
        check_seconds("ttl_s", ttl_s)
        check_seconds("deadline_s", deadline_s, zero=True)
        return ttl_s, deadline_s

    async def _bring(
        self, layout: Fingerprint, run: Run, nbytes: int, end: float,
        found: dict[BlockKey, Medium], parent: BlockKey | None = None,
    ) -> Why | None:  # fmt: skip
        """Move what is below up until nothing more comes; why the run is not complete.

        Notes in `found` where each block was. A block that failed once is not asked for again:
        the run ends before it.
        """
        why = Why.TOO_LARGE if len(run) > self._most(nbytes) else None
        run = run[: self._most(nbytes)]
        for key, answer in zip(run, self.hierarchy.lookup(run), strict=True):
            if isinstance(answer, Held):
                found[key] = answer.tiers[0]
        hold: int | None = None
        try:
            while True:
                late = time.monotonic() >= end
                parents = [parent, *run[:-1]] if run else []
                wanted = self.hierarchy.want(run, layout, nbytes, late, parents)
                former, hold = hold, self.hierarchy.hold(run, HOLD_S, self._now())
                self._let_go(former)
                self._kick()
                if not wanted.moves and not wanted.short:
                    return why
                left = end - time.monotonic()
                if wanted.moves:
                    outcomes = await self.mover.wait(wanted.moves, left)
                    if outcomes is None:
                        return Why.DEADLINE
                    run, why = self._arrived(run, outcomes, found, why)
                elif late or wanted.why is not Why.DEMOTING:
                    run, why = self._shorter(run), wanted.why
                elif not await self.mover.wait_any(left):
                    await asyncio.sleep(0.001)  # nothing moves yet: the tick will start something
        finally:
            self._let_go(hold)

    def _let_go(self, hold: int | None) -> None:
        if hold is not None:
            with suppress(StaleHandle):  # it lasts longer than any wait, but not for ever
                self.hierarchy.release(hold)

    def _shorter(self, run: Run) -> Run:
        """Less of a run for which there is no room: half of what the pool lacks of it."""
        top = self.hierarchy.book.top
        blocks = map(self.hierarchy.book.blocks.get, run)
        here = sum(1 for _ in takewhile(lambda b: b is not None and b.mask & top.bit, blocks))
        return run[: here + (len(run) - here) // 2]

    def _arrived(
        self, run: Run, outcomes: Mapping[BlockKey, Outcome], found: dict[BlockKey, Medium],
        why: Why | None,
    ) -> tuple[Run, Why | None]:  # fmt: skip
        """Note where blocks came from; the run up to the first that did not come, and why."""
        for i, key in enumerate(run):
            match outcomes.get(key):
                case Done(source=source):
                    found.setdefault(key, source or Medium.NVME)
                case Failed(why=reason):
                    return run[:i], reason
        return run, why

    def _hand_out(self, lease: Lease) -> Lease:
        generations = self.parts.pool.generations.read(lease.slots)
        return replace(lease, id=self.handles.out(lease.id), generations=generations)
