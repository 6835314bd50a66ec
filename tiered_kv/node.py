"""One process's tiers: pool, tiers below it, the hierarchy that decides, the mover that does.

On a host the pool is the DRAM arena above NVMe; in a GPU process it is HBM above the host's node.
A plain asyncio class that runs with and without Ray. Every verb is one call a request, whatever
its length; none blocks the event loop, all raise the typed errors of their arguments and answer
with a miss for everything that went wrong below.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from tiered_kv import liveness, status
from tiered_kv.config import Config
from tiered_kv.errors import BadInput, BadLayout, StaleHandle
from tiered_kv.health import Health
from tiered_kv.hierarchy import Hierarchy
from tiered_kv.inputs import (
    LONGEST_S,
    check_checksums,
    check_count,
    check_parents,
    check_run,
    check_seconds,
    short,
)
from tiered_kv.keepers import BelowKeeper, HostKeeper, Keeper
from tiered_kv.layout import KVLayout
from tiered_kv.mover import Mover
from tiered_kv.parts import Parts
from tiered_kv.sessions import Session, check_session, session_id
from tiered_kv.supervise import surviving
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
    SessionId,
    Usage,
    Why,
)
from tiered_kv.wire import Committed, Ended, Fetched, Handles, Welcome, life_number

T = TypeVar("T")

TICK_S = 0.2
"""How often leases expire and watermarks are looked at when nothing else happens."""
FLUSH_S = 1.0
"""How often changed sessions are written beside the blocks."""
HOLD_S = 2 * LONGEST_S
"""For how long a wait may hold what has come, if it is never ended."""
IO_THREADS = 64
"""Blocking calls at once: to the index, and to the host, which may take its time for each."""


class Node:
    """Made by `await assemble.host(config)` or `assemble.gpu(config, link)`."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """Start moving. Must be called on the event loop that will own it."""
        self.config = config
        self.parts = parts
        self.hierarchy = Hierarchy(parts.specs, below=Medium.HOST in parts.tiers)
        self.layouts: dict[Fingerprint, KVLayout] = {}
        self.counts: Counter[str] = Counter()
        self.handles = Handles(life_number(parts.node_id, parts.incarnation))
        self.health = Health(parts.tiers, self.hierarchy, config.service.move_deadline_s)
        self.started_s = time.time()
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="kv-io")
        self.keeper = self._keeper()
        self._adopt()
        self.mover = Mover(parts.tiers, parts.medium, parts.pool.generations, self._done)
        # Three clocks, since each of the others may hang with a medium that hangs.
        self._tasks: set[asyncio.Task[Any]] = {
            self._spawn(self._every(TICK_S, self._beat), "kv-tick"),
            self._spawn(self._every(TICK_S, self._check_media), "kv-health"),
            self._spawn(self._every(FLUSH_S, self.keeper.flush), "kv-sessions"),
        }
        self._ending: asyncio.Task[None] | None = None

    # -- joining --------------------------------------------------------------------------

    async def hello(self, layout: KVLayout) -> Welcome:
        """Introduce a layout and learn how to map the pool. Idempotent.

        Raises `BadLayout` when its block does not fit a slab of a tier here, and, in a GPU's
        node, `Unreachable` when its host does not answer.
        """
        if not isinstance(layout, KVLayout):
            raise BadLayout(f"a layout must be a KVLayout, not {short(layout)}")
        for tier in self.hierarchy.book.tiers:
            tier.slots.per_slab(layout.block_bytes)
        parts = self.parts
        if parts.host is not None:
            await self._io(parts.host.introduce, layout)
        self.layouts[layout.fingerprint] = layout
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
        self._check_run(layout, run)
        check_parents(parents, len(run))
        if not isinstance(owner, str) or not liveness.is_alive(self.config.shm_folder, owner):
            raise BadInput(f"owner {owner!r} holds no proof of life in {self.config.shm_folder}")
        end = time.monotonic() + self.config.service.store_deadline_s
        while True:
            late = time.monotonic() >= end
            if not await self.keeper.erased(run, end - time.monotonic()):
                return Refused(Why.OFFLINE, "blocks of the run are still being erased below")
            answer = self.hierarchy.reserve(run, layout, nbytes, owner, parents, force=late)
            if isinstance(answer, Reservation):
                return self._hand_out_slots(answer)
            self._kick()
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
        check_checksums(checksums)
        if count is not None:
            check_count("count", count)
        if session is not None:
            session = self._check_session(session)
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
        check_run(run)
        return self.hierarchy.lookup(run)

    async def fetch(
        self, layout: Fingerprint, run: Run, ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Fetched:  # fmt: skip
        """Bring the leading held blocks of a run into the pool and lease them.

        Waits for moves up to `deadline_s` and leases what has come by then: the rest is a miss.
        """
        nbytes = self._nbytes(layout)
        self._check_run(layout, run)
        ttl_s, deadline_s = self._times(ttl_s, deadline_s)
        began = time.monotonic()
        found: dict[BlockKey, Medium] = {}
        why = await self._bring(layout, run, nbytes, began + deadline_s, found)
        self._check_run(layout, run)  # what came meanwhile, too
        lease = self.hierarchy.lease(run, ttl_s, self._now())
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
        self._nbytes(layout)
        self._times(ttl_s, deadline_s)
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
        check_count("blocks", blocks)
        self.counts[f"miss.{Why.LAPSED}"] += blocks

    async def distrust(self, keys: Run) -> int:
        """A reader found that bytes of the pool do not match their checksum: nobody gets that copy
        any more. How many blocks were lost with it, for want of another copy."""
        check_run(keys)
        return self.hierarchy.distrust(keys)

    async def prefetch(self, sid: str) -> int:
        """Start bringing a session up and do not wait; how many batches are on their way.

        Others follow in the background where room has to be made for them first.
        """
        session = await self.session(sid)
        layout, run = session.layout, session.run
        nbytes = self._block_bytes(session)
        if nbytes is None:
            return 0
        wanted = self.hierarchy.want(run[: self._most(nbytes)], layout, nbytes)
        self._kick()
        if wanted.short:
            end = time.monotonic() + self.config.service.wake_deadline_s
            bringing = self._spawn(self._bring(layout, run, nbytes, end, {}), "kv-prefetch")
            self._tasks.add(bringing)
            bringing.add_done_callback(self._tasks.discard)
        return len(wanted.moves)

    # -- sessions -------------------------------------------------------------------------

    async def put_session(self, session: Session) -> Sequence[BlockKey]:
        """Create or extend a session; the superseded blocks, which are gone from here now."""
        superseded = await self.keeper.put(self._check_session(session))
        self.keeper.erase(self.hierarchy.forget(superseded))
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
        return len((await self.keeper.close(session_id(sid))).gone)

    async def end_session(self, sid: str) -> Ended:
        """`close_session` for the node of a GPU, which may hold blocks of it that are not here."""
        return await self.keeper.close(session_id(sid))

    async def persist(self, run: Run) -> int:
        """Write a run's blocks below and keep them here; how many outlive the processes now.

        Waits up to `store_deadline_s`.
        """
        check_run(run)
        end = time.monotonic() + self.config.service.store_deadline_s
        moves = self.hierarchy.persist(run)
        self._kick()
        await self.mover.wait(moves, end - time.monotonic())
        lasting = [m for m in self.parts.tiers if m is not Medium.HOST]
        written = sum(
            isinstance(a, Held) and any(m in lasting for m in a.tiers)
            for a in self.hierarchy.lookup(run)
        )
        return await self.keeper.persist(run, written, end - time.monotonic())

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
        check_run(keys)
        return await self.keeper.forget(keys)

    # -- operating ------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Everything an operator asks, as plain values; see `status.node`."""
        return status.node(self)

    async def holdings(self) -> tuple[list[Usage], list[SessionId]]:
        """What the coordinator is told every other second: tiers, and ids of all sessions."""
        return self.hierarchy.usage(), [session.id for session in self.keeper.table]

    async def stop(self, flush: bool = True) -> None:
        """Write what only memory holds below, then end. Idempotent; whatever cannot be written,
        everything is given back."""
        if self._ending is None:
            self._ending = self._spawn(self._stop(flush), "kv-stop")
        await asyncio.shield(self._ending)

    async def _stop(self, flush: bool) -> None:
        try:
            if flush:
                with surviving("flushing before the end"):
                    await self.flush()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.mover.close()
            with surviving("writing sessions before the end"):
                await self.keeper.flush()
        finally:
            await asyncio.to_thread(self._threads.shutdown)
            await asyncio.to_thread(self.parts.close)

    # -- inside ---------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic()

    def _times(self, ttl_s: float | None, deadline_s: float | None) -> tuple[float, float]:
        """For how long to lease and to wait: the configured times where none are given."""
        service = self.config.service
        ttl_s = service.lease_ttl_s if ttl_s is None else ttl_s
        deadline_s = service.wake_deadline_s if deadline_s is None else deadline_s
        check_seconds("ttl_s", ttl_s)
        check_seconds("deadline_s", deadline_s, zero=True)
        return ttl_s, deadline_s

    def _nbytes(self, layout: Fingerprint) -> int:
        known = self.layouts.get(layout) if isinstance(layout, bytes) else None
        if known is None:
            which = layout.hex() if isinstance(layout, bytes) else short(layout)
            have = "; ".join(one.describe() for one in self.layouts.values()) or "none"
            raise BadLayout(f"layout {which} was not introduced here; known: {have}")
        return known.block_bytes

    def _check_run(self, layout: Fingerprint, run: Run) -> None:
        """Raise `BadInput` for what is no run, `BadLayout` for blocks of another layout."""
        check_run(run)
        for block in self.hierarchy.book.live(run):
            if block.layout != layout:
                raise BadLayout(
                    f"block {block.key.hex()} has layout {block.layout.hex()}, not {layout.hex()}"
                )

    def _check_session(self, session: Session) -> Session:
        """The session as used now. Raises `BadInput`, `BadSession`, `BadLayout`."""
        session = check_session(replace(check_session(session), used_s=time.time()))
        layout = self.layouts.get(session.layout)
        if layout is not None:
            whole, rest = divmod(session.n_tokens, layout.block_tokens)
            if len(session.run) != whole + bool(rest) or session.tail != bool(rest):
                raise BadInput(
                    f"session {session.id!r}: {session.n_tokens} tokens in blocks of "
                    f"{layout.block_tokens} are not {len(session.run)} with tail {session.tail}"
                )
            self._check_run(session.layout, session.run)
        return session

    def _most(self, nbytes: int) -> int:
        """Blocks of this size that the pool can hold at most."""
        return self.hierarchy.book.top.slots.total(nbytes)

    def _block_bytes(self, session: Session) -> int | None:
        """The size of a session's blocks; None when neither its layout nor a block is known."""
        if session.layout in self.layouts:
            return self.layouts[session.layout].block_bytes
        return next((block.nbytes for block in self.hierarchy.book.live(session.run)), None)

    async def _bring(
        self, layout: Fingerprint, run: Run, nbytes: int, end: float,
        found: dict[BlockKey, Medium],
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
                wanted = self.hierarchy.want(run, layout, nbytes, force=late)
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

    def _hand_out_slots(self, reservation: Reservation) -> Reservation:
        """The reservation as its owner sees it. When that fails, nothing stays reserved."""
        try:
            generations = self.parts.open_slots(reservation.slots, self.hierarchy)
            self._kick()
        except BaseException:
            self.hierarchy.abort(reservation.id)
            raise
        return replace(reservation, id=self.handles.out(reservation.id), generations=generations)

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
        if move.target is Medium.NVME:  # a block that was dropped meanwhile has a row by now
            held = self.hierarchy.book.blocks
            pairs = zip(move.blocks, outcomes, strict=True)
            self.keeper.erase(b.key for b, o in pairs if isinstance(o, Done) and b.key not in held)
        self._kick()

    def _keeper(self) -> Keeper:
        below, recent_s = self.parts.below, self.config.service.recent_s
        if below is None:
            return HostKeeper(self.parts, self.hierarchy, recent_s, self._io, self.health.remark)
        call = partial(self._io, partial(below.call, timeout_s=self.config.service.call_timeout_s))
        return BelowKeeper(call, self.hierarchy, recent_s, self.health.remark)

    async def _io(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        return asyncio.get_running_loop().create_task(work, name=name)

    def _adopt(self) -> None:
        rows, sessions, bad = self.parts.leftovers()
        if Medium.NVME in self.parts.tiers:
            self.hierarchy.adopt(Medium.NVME, rows)
        self.keeper.table.adopt(sessions)
        self.counts["sessions.unreadable"] += bad

    async def _every(self, seconds: float, step: Callable[[], Awaitable[None]]) -> None:
        """A clock of this node. A step that fails is told, and the next one is made."""
        while True:
            await asyncio.sleep(seconds)
            with surviving("a step of the node's clock") as failure:
                await step()
            if failure:
                self.health.remark(failure[0])

    async def _beat(self) -> None:
        """Leases, watermarks, owners. Waits for no medium."""
        self._kick()
        for owner in self.hierarchy.owners():
            if not liveness.is_alive(self.config.shm_folder, owner):
                self.hierarchy.owner_died(owner)

    async def _check_media(self) -> None:
        await self.health.check(self.mover, self._now(), self._io)
