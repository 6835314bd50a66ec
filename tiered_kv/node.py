"""One process's tiers: pool, tiers below it, the hierarchy that decides, the mover that does.

On a host the pool is the DRAM arena above NVMe; in a GPU process it is HBM above the host's node.
A plain asyncio class that runs with and without Ray. Every verb is one call a request, whatever
its length; none blocks the event loop, all raise the typed errors of their arguments and answer
with a miss for everything that went wrong below.
"""

import asyncio
import time
from typing import Any

from tiered_kv import status
from tiered_kv.block_events import BlockEvents
from tiered_kv.errors import BadLayout
from tiered_kv.inputs import check_count, short
from tiered_kv.layout import KVLayout
from tiered_kv.node_hints import Hinting
from tiered_kv.node_stores import Storing
from tiered_kv.residence import Residence, residence
from tiered_kv.sessions import Session, session_id
from tiered_kv.supervise import surviving
from tiered_kv.types import SessionId, Usage
from tiered_kv.wire import Ended, Events, Welcome


class Node(Storing, Hinting):
    """Made by `await assemble.host(config)` or `assemble.gpu(config, link)`."""

    _events: BlockEvents | None = None  # since somebody asked

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

    # -- sessions -------------------------------------------------------------------------

    async def session(self, sid: str) -> Session:
        """The session, noted as used now. Raises `BadSession` or `UnknownSession`."""
        session = await self.keeper.use(session_id(sid))
        self._is_here(session)
        return session

    async def list_sessions(self) -> list[dict[str, Any]]:
        """One row a session: id, state, tokens, blocks by tier, seconds since its last use."""
        return status.sessions(self)

    async def resident(self, sid: str) -> Residence:
        """What is held of a session here. No use of it. Raises `BadSession`, `UnknownSession`."""
        return residence(self, self.keeper.table.get(session_id(sid)))

    async def fork(self, sid: str, new: str) -> Session:
        """A second session with the same blocks; they are shared, not copied."""
        return await self.keeper.fork(session_id(sid), session_id(new))

    async def close_session(self, sid: str) -> int:
        """Forget a session and the blocks that only it had; how many blocks went."""
        return len((await self.end_session(sid)).gone)

    async def end_session(self, sid: str) -> Ended:
        """`close_session` for the node of a GPU, which may hold blocks of it that are not here."""
        sid = session_id(sid)
        ended = await self.keeper.close(sid)
        self.outlooks.ended(sid)
        return ended

    # -- operating ------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Everything an operator asks, as plain values; see `status.node`."""
        return status.node(self)

    async def events(self, since: int) -> Events:
        """Copies of blocks that came and left from number `since` on; see `Events`. Begins with 0,
        and then with the `next` of the last answer. The first call starts the account, which
        costs each later change about 1 us. Raises `BadInput`."""
        check_count("since", since)
        if self._events is None:
            self._events = BlockEvents(self.hierarchy.book, time.time_ns() // 1000)
        return self._events.since(since)

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
            with surviving("writing the recording before the end"):
                await self._record()
                await self._io(self.recording.close)
        finally:
            await asyncio.to_thread(self._threads.shutdown)
            await asyncio.to_thread(self.parts.close)
