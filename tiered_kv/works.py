"""What turns inside a node: the hierarchy's decisions, the moves that carry them out, the clocks.

Nothing here is called from outside; `node.Node` adds the verbs.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tiered_kv import liveness
from tiered_kv.config import Config
from tiered_kv.decisions import Decisions
from tiered_kv.errors import BadInput, BadLayout
from tiered_kv.health import Health
from tiered_kv.hierarchy import Hierarchy
from tiered_kv.inputs import check_run, short
from tiered_kv.keepers import BelowKeeper, HostKeeper, Keeper
from tiered_kv.layout import KVLayout
from tiered_kv.mover import Mover
from tiered_kv.outlooks import Outlooks
from tiered_kv.parts import Parts
from tiered_kv.policies.prefetch import prefetch
from tiered_kv.recording import Recording
from tiered_kv.sessions import Session, check_session
from tiered_kv.supervise import surviving
from tiered_kv.types import (
    BlockKey,
    Done,
    Failed,
    Fingerprint,
    Medium,
    Move,
    Outcome,
    Run,
    SessionId,
)
from tiered_kv.wire import Handles, life_number

T = TypeVar("T")

TICK_S = 0.2
"""How often leases expire and watermarks are looked at when nothing else happens."""
FLUSH_S = 1.0
"""How often changed sessions are written beside the blocks."""
IO_THREADS = 64
"""Blocking calls at once: to the index, and to the host, which may take its time for each."""


class Works:
    """State and machinery of a node. Lives on one event loop."""

    def __init__(self, config: Config, parts: Parts) -> None:
        """Start moving. Must be called on the event loop that will own it."""
        self.config = config
        self.parts = parts
        self.hierarchy = Hierarchy(parts.specs, below=Medium.HOST in parts.tiers)
        self.layouts: dict[Fingerprint, KVLayout] = {}
        self.counts: Counter[str] = Counter()
        self.decisions = Decisions()
        self.outlooks = Outlooks(prefetch(config.service.prefetch))
        self.leaving: set[SessionId] = set()  # they have ended, and go once nobody reads them
        self.handles = Handles(life_number(parts.node_id, parts.incarnation))
        self.health = Health(parts.tiers, self.hierarchy, config.service.move_deadline_s)
        self.recording = Recording(config.service.record, self.health.remark)
        self.started_s = time.time()
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="kv-io")
        self.keeper = self._keeper()
        self._adopt()
        self.mover = Mover(
            parts.tiers, parts.medium, parts.pool.generations, self._done, parts.rates
        )
        # Clocks of their own, since each of the others may hang with a medium that hangs.
        self._tasks: set[asyncio.Task[Any]] = {
            self._spawn(self._every(TICK_S, self._beat), "kv-tick"),
            self._spawn(self._every(TICK_S, self._check_media), "kv-health"),
            self._spawn(self._every(FLUSH_S, self.keeper.flush), "kv-sessions"),
            self._spawn(self._every(FLUSH_S, self._record), "kv-recording"),
        }
        self._ending: asyncio.Task[None] | None = None

    def _now(self) -> float:
        return time.monotonic()

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
        self._check_blocks(layout, run)

    def _check_blocks(self, layout: Fingerprint, run: Run) -> None:
        for block in self.hierarchy.book.live(run):
            if block.layout != layout:
                raise BadLayout(
                    f"block {block.key.hex()} has layout {block.layout.hex()}, not {layout.hex()}"
                )

    def _count(self, event: str, n: int) -> None:
        if n:
            self.counts[event] += n

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

    def _in_pool(self, key: BlockKey) -> bool:
        """Whether a block is in the pool or on its way there."""
        block, book = self.hierarchy.book.blocks.get(key), self.hierarchy.book
        return block is not None and (
            bool(block.mask & book.top.bit) or block.answer is book.coming
        )

    def _is_here(self, session: Session) -> bool:
        """A request of a session arrived; whether its blocks should be brought up before they are
        read."""
        self.leaving.discard(session.id)
        return self.outlooks.arrived(session.id, self._now())

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

    async def _record(self) -> None:
        """Write the requests since the last time, in a thread."""
        taken = self.recording.take()
        if taken:
            why = await self._io(self.recording.write, taken)
            if why:
                self.recording.end(why)

    async def _beat(self) -> None:
        """Leases, watermarks, owners. Waits for no medium."""
        self._kick()
        for owner in self.hierarchy.owners():
            if not liveness.is_alive(self.config.shm_folder, owner):
                self.hierarchy.owner_died(owner)

    async def _check_media(self) -> None:
        await self.health.check(self.mover, self._now(), self._io)
