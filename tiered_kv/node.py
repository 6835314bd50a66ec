"""One process's tiers: pool, tiers below it, the hierarchy that decides, the mover that does.

On a host the pool is the DRAM arena above NVMe; in a GPU process it is HBM above the host's node.
A plain asyncio class that runs with and without Ray. Every verb is one call a request, whatever
its length; none blocks the event loop, all raise the typed errors of their arguments and answer
with a miss for everything that went wrong below.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiered_kv import liveness, status
from tiered_kv.config import Config
from tiered_kv.errors import BadInput, BadLayout, StaleHandle
from tiered_kv.health import Health
from tiered_kv.hierarchy import Hierarchy
from tiered_kv.keepers import BelowKeeper, HostKeeper, Keeper
from tiered_kv.layout import KVLayout
from tiered_kv.mover import Mover
from tiered_kv.parts import Parts
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
    Move,
    Outcome,
    Refused,
    Reservation,
    Run,
    Why,
)
from tiered_kv.wire import Committed, Fetched, Handles, Welcome

log = logging.getLogger(__name__)

TICK_S = 0.2
"""How often leases expire and watermarks are looked at when nothing else happens."""


class Node:
    """Made by `await assemble.host(config)` or `assemble.gpu(config, link)`."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """Start moving. Must be called on the event loop that will own it."""
        self.config = config
        self.parts = parts
        self.hierarchy = Hierarchy(parts.specs, below=Medium.HOST in parts.tiers)
        self.layouts: dict[Fingerprint, KVLayout] = {}
        self.counts: Counter[str] = Counter()
        self.handles = Handles(parts.incarnation)
        self.mover = Mover(parts.tiers, parts.medium, parts.pool.generations, self._done)
        self.health = Health(parts.tiers, self.hierarchy, config.service.move_deadline_s)
        self.started_s = time.time()
        self.keeper = self._keeper()
        self._adopt()
        self._tick = asyncio.create_task(self._run(), name="kv-tick")

    # -- joining --------------------------------------------------------------------------

    async def hello(self, layout: KVLayout) -> Welcome:
        """Introduce a layout and learn how to map the pool. Idempotent.

        Raises `BadLayout` when its block does not fit a slab of a tier here, and, in a GPU's
        node, `Unreachable` when its host does not answer.
        """
        for tier in self.hierarchy.book.tiers:
            tier.slots.per_slab(layout.block_bytes)
        self.layouts[layout.fingerprint] = layout
        parts = self.parts
        if parts.host is not None:
            await self._io(parts.host.introduce, layout)
        return Welcome(
            parts.node_id, parts.incarnation, parts.medium, parts.pool.handle(),
            str(self.config.shm_folder), parts.pool.describe(),
        )  # fmt: skip

    # -- storing --------------------------------------------------------------------------

    async def reserve(
        self, layout: Fingerprint, run: Run, owner: str,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> Reservation | Refused:  # fmt: skip
        """Slots of the pool for the blocks of a run that are not held; see `Hierarchy.reserve`.

        Waits up to `store_deadline_s` while room is being made, then drops blocks for it.
        `owner` is the name under which the caller proves that it lives (`liveness.hold`).
        """
        nbytes = self._nbytes(layout)
        if not liveness.is_alive(self.config.shm_folder, owner):
            raise BadInput(f"owner {owner!r} holds no proof of life in {self.config.shm_folder}")
        end = time.monotonic() + self.config.service.store_deadline_s
        while True:
            late = time.monotonic() >= end
            answer = self.hierarchy.reserve(run, layout, nbytes, owner, parents, force=late)
            self._kick()
            if isinstance(answer, Reservation):
                generations = self.parts.open_slots(answer.slots, self.hierarchy)
                return replace(answer, id=self.handles.out(answer.id), generations=generations)
            if answer.why is not Why.DEMOTING or late:
                self.counts[f"miss.{answer.why}"] += 1
                return answer
            if not await self.mover.wait_any(end - time.monotonic()):
                await asyncio.sleep(0.001)  # nothing moves yet: the tick will start something

    async def commit(
        self, reservation: int, checksums: Sequence[int] | None = None,
        count: int | None = None, session: Session | None = None, durable: bool = False,
    ) -> Committed:  # fmt: skip
        """Make reserved blocks visible, and with `session` the session that ends with them.

        `durable` also waits until the session's blocks have been written below, up to
        `store_deadline_s`; `Committed.durable` says how many were.
        """
        number = self.handles.back(reservation)
        if session is not None:
            session = replace(session, id=session_id(session.id), used_s=time.time())
            self._nbytes(session.layout)
        slots = self.hierarchy.filling(number)
        new = self.hierarchy.commit(number, checksums, count)
        self.parts.pool.generations.publish(slots[:count])
        superseded: Sequence[BlockKey] = ()
        if session is not None:
            superseded = await self.put_session(session)
        self._kick()
        written = await self.persist(session.run) if session is not None and durable else 0
        return Committed(len(new), written, tuple(superseded))

    async def abort(self, reservation: int) -> None:
        """Give reserved slots back unseen. Raises `StaleHandle`."""
        self.hierarchy.abort(self.handles.back(reservation))

    # -- reading --------------------------------------------------------------------------

    async def lookup(self, run: Run) -> list[Answer]:
        """What is held of a run here; promises nothing."""
        return self.hierarchy.lookup(run)

    async def fetch(
        self, layout: Fingerprint, run: Run, ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Fetched:  # fmt: skip
        """Bring the leading held blocks of a run into the pool and lease them.

        Waits for moves up to `deadline_s` and leases what has come by then: the rest is a miss.
        """
        nbytes = self._nbytes(layout)
        began = time.monotonic()
        found: dict[BlockKey, Medium] = {}
        why = await self._bring(layout, run, nbytes, began + self._deadline(deadline_s), found)
        lease = self.hierarchy.lease(run, ttl_s or self.config.service.lease_ttl_s, self._now())
        missed = len(run) - len(lease.keys)
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
        deadline_s: float | None = None,
    ) -> Fetched:  # fmt: skip
        """`fetch` for all blocks of a session. Raises `UnknownSession`, and `BadLayout` when the
        session was saved with another layout."""
        session = await self.session(sid)
        if session.layout != layout:
            raise BadLayout(
                f"session {session.id!r} has layout {session.layout.hex()}, not {layout.hex()}"
            )
        self.keeper.table.enter(session.id)
        try:
            fetched = await self.fetch(layout, session.run, ttl_s, deadline_s)
        finally:
            self.keeper.table.leave(session.id)
        return replace(fetched, session=session)

    async def release(self, lease: int) -> None:
        """End a lease. One that has expired meanwhile is fine: the reader has compared."""
        try:
            self.hierarchy.release(self.handles.back(lease))
        except StaleHandle:
            self.counts["leases.late"] += 1
        self._kick()

    async def lapsed(self, blocks: int) -> None:
        """A reader threw copies away because their lease had ended."""
        self.counts[f"miss.{Why.LAPSED}"] += blocks

    async def prefetch(self, sid: str) -> int:
        """Start bringing a session up and do not wait; how many batches are on their way."""
        session = await self.session(sid)
        wanted = self.hierarchy.want(session.run, session.layout, self._nbytes(session.layout))
        self._kick()
        return len(wanted.moves)

    # -- sessions -------------------------------------------------------------------------

    async def put_session(self, session: Session) -> Sequence[BlockKey]:
        """Create or extend a session; the superseded blocks, which are gone from here now."""
        superseded = await self.keeper.put(session)
        self.hierarchy.forget(superseded)
        return superseded

    async def session(self, sid: str) -> Session:
        """The session, noted as used now. Raises `BadSession` or `UnknownSession`."""
        return await self.keeper.use(session_id(sid))

    async def list_sessions(self) -> list[dict[str, Any]]:
        """One row a session: id, state, tokens, blocks by tier, seconds since its last use."""
        return status.sessions(self)

    async def fork(self, sid: str, new: str) -> Session:
        """A second session with the same blocks; they are shared, not copied."""
        return await self.keeper.fork(session_id(sid), session_id(new))

    async def close_session(self, sid: str) -> int:
        """Forget a session and the blocks that only it had; how many blocks went."""
        session, gone = await self.keeper.close(session_id(sid))
        self.hierarchy.forget(session.run)
        return gone

    async def persist(self, run: Run) -> int:
        """Write a run's blocks below and keep them here; how many outlive the processes now.

        Waits up to `store_deadline_s`.
        """
        moves = self.hierarchy.persist(run)
        self._kick()
        await self.mover.wait(moves, self.config.service.store_deadline_s)
        lasting = [m for m in self.parts.tiers if m is not Medium.HOST]
        written = sum(
            isinstance(a, Held) and any(m in lasting for m in a.tiers)
            for a in self.hierarchy.lookup(run)
        )
        return await self.keeper.persist(run, written)

    async def flush(self) -> int:
        """Write everything that only the pool holds below, sync; how many blocks went."""
        wanted = [k for k, b in self.hierarchy.book.blocks.items()]
        moves = self.hierarchy.persist(wanted)
        self._kick()
        ended = await self.mover.wait(moves, self.config.service.move_deadline_s)
        await self.keeper.flush()
        await self._io(self.parts.sync)
        return sum(isinstance(o, Done) for o in (ended or {}).values())

    async def forget(self, keys: Run) -> int:
        """Drop blocks here and below; how many. Those that others descend from stay."""
        gone = self.hierarchy.forget(keys)
        await self._io(self.parts.forget, [], gone)
        return len(gone)

    # -- operating ------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Everything an operator asks, as plain values; see `status.node`."""
        return status.node(self)

    async def stop(self, flush: bool = True) -> None:
        """Write what only memory holds below, then end. Idempotent."""
        if self._tick.done():
            return
        if flush:
            await self.flush()
        self._tick.cancel()
        await asyncio.gather(self._tick, return_exceptions=True)
        await self.mover.close()
        await self.keeper.flush()
        await self._io(self.parts.close)

    # -- inside ---------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic()

    def _deadline(self, deadline_s: float | None) -> float:
        return self.config.service.wake_deadline_s if deadline_s is None else deadline_s

    def _nbytes(self, layout: Fingerprint) -> int:
        known = self.layouts.get(layout)
        if known is None:
            have = "; ".join(one.describe() for one in self.layouts.values()) or "none"
            raise BadLayout(f"layout {layout.hex()} was not introduced here; known: {have}")
        return known.block_bytes

    async def _bring(
        self, layout: Fingerprint, run: Run, nbytes: int, end: float,
        found: dict[BlockKey, Medium],
    ) -> Why | None:  # fmt: skip
        """Move what is below up until nothing more comes; why the run is not complete.

        Notes in `found` where each block was. A block that failed once is not asked for again:
        the run ends before it.
        """
        run = run[: self.hierarchy.book.top.slots.total(nbytes)]
        for key, answer in zip(run, self.hierarchy.lookup(run), strict=True):
            if isinstance(answer, Held):
                found[key] = answer.tiers[0]
        why: Why | None = None
        while True:
            late = time.monotonic() >= end
            wanted = self.hierarchy.want(run, layout, nbytes, force=late)
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
                return wanted.why
            elif not await self.mover.wait_any(left):
                await asyncio.sleep(0.001)  # nothing moves yet: the tick will start something

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

    def _kick(self) -> None:
        for move in self.hierarchy.due(self._now()):
            self.parts.retire(self.hierarchy)
            self.mover.submit(move)

    def _done(self, move: Move, outcomes: Sequence[Outcome]) -> None:
        self.hierarchy.done(move, outcomes)
        failed = [o for o in outcomes if isinstance(o, Failed)]
        for one in {f.why: f for f in failed}.values():
            self.health.note(move, one)
        medium = move.source if move.target is self.parts.medium else move.target
        self.health.ended(medium, failed, len(outcomes), self._now())
        self._kick()

    def _keeper(self) -> Keeper:
        below, recent_s = self.parts.below, self.config.service.recent_s
        if below is None:
            forget, remark = self.hierarchy.forget, self.health.remark
            return HostKeeper(self.parts, recent_s, self._io, forget, remark)
        call = partial(self._io, partial(below.call, timeout_s=self.config.service.call_timeout_s))
        return BelowKeeper(call, recent_s)

    async def _io(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)

    def _adopt(self) -> None:
        rows, sessions, bad = self.parts.leftovers()
        if Medium.NVME in self.parts.tiers:
            self.hierarchy.adopt(Medium.NVME, rows)
        self.keeper.table.adopt(sessions)
        self.counts["sessions.unreadable"] += bad

    async def _run(self) -> None:
        """The clock of this node: leases, watermarks, owners, health, the session table."""
        beat = 0
        while True:
            await asyncio.sleep(TICK_S)
            beat += 1
            self._kick()
            await self.health.check(self.mover, self._now(), self._io)
            if beat % 5 == 0:
                for owner in self.hierarchy.owners():
                    if not liveness.is_alive(self.config.shm_folder, owner):
                        self.hierarchy.owner_died(owner)
                await self.keeper.flush()
