"""Who keeps the session table: a host's node in memory and beside its NVMe data, a GPU's node by
asking its host."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from tiered_kv.errors import TieredKVError, Unreachable
from tiered_kv.hierarchy import Hierarchy
from tiered_kv.parts import Parts
from tiered_kv.sessions import Session, SessionTable
from tiered_kv.types import BlockKey, SessionId
from tiered_kv.wire import Ended

Io = Callable[..., Awaitable[Any]]
"""Runs a blocking call in a thread."""
LEAST_S = 0.5
"""What the last step of a durable store may take, however late it is."""


class Keeper(Protocol):
    """Sessions by name. Every verb costs at most one call."""

    table: SessionTable

    async def put(self, session: Session) -> Sequence[BlockKey]:
        """Create or extend; the blocks that this supersedes."""
        ...

    async def use(self, sid: SessionId) -> Session:
        """The session, noted as used now. Raises `UnknownSession`."""
        ...

    async def fork(self, sid: SessionId, new: SessionId) -> Session:
        """A second session with the same run. Raises `UnknownSession`, `BadInput`."""
        ...

    async def close(self, sid: SessionId) -> Ended:
        """Forget a session, and drop what only it had. Raises `UnknownSession`."""
        ...

    def retire(self, sid: SessionId) -> None:
        """Forget a session and leave its blocks to the policies. Raises `UnknownSession`."""
        ...

    async def forget(self, keys: Sequence[BlockKey]) -> int:
        """Drop blocks from which nothing descends, here and below; how many."""
        ...

    def erase(self, keys: Iterable[BlockKey]) -> None:
        """These blocks were dropped here: soon no later incarnation finds them either."""
        ...

    async def erased(self, run: Sequence[BlockKey], left_s: float) -> bool:
        """Wait until no block of a run is being erased; False when that takes too long."""
        ...

    async def persist(self, run: Sequence[BlockKey], written: int, left_s: float) -> int:
        """Called when a run was written below, `written` blocks of it to a medium that lasts:
        write what belongs to it; how many blocks outlive the processes. 0 when that is unknown
        after `left_s`."""
        ...

    async def flush(self) -> None:
        """Write sessions that changed beside the blocks, and erase what was dropped."""
        ...


class HostKeeper:
    """The table itself. What changed is written at each beat of the node, and for `durable`.

    The index on NVMe is changed by one task at a time, in the order of the table. Rows of dropped
    blocks are erased by key, in a thread, and this must not happen:

    1. A session is closed, its block dropped; a thread is about to erase the block's row.
    2. Somebody saves the same block anew and has it written to NVMe: a new row, and a promise.
    3. The thread erases the new row.

    Therefore only blocks that are nowhere here are erased, and who wants to reserve one that is
    being erased waits (`erased`).
    """

    def __init__(
        self, parts: Parts, hierarchy: Hierarchy, recent_s: float, io: Io,
        remark: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`remark` notes an error for `status`."""
        self.table = SessionTable(recent_s)
        self._parts = parts
        self._hierarchy = hierarchy
        self._io = io
        self._remark = remark
        self._changed: set[SessionId] = set()
        self._closed: set[SessionId] = set()
        self._dropped: set[BlockKey] = set()
        self._erasing: frozenset[BlockKey] = frozenset()
        self._index = asyncio.Lock()
        self._writes: set[asyncio.Task[bool]] = set()

    async def put(self, session: Session) -> Sequence[BlockKey]:
        superseded = self.table.save(session)
        self._changed.add(session.id)
        return superseded

    async def use(self, sid: SessionId) -> Session:
        session = self.table.use(sid, time.time())
        self._changed.add(sid)
        return session

    async def fork(self, sid: SessionId, new: SessionId) -> Session:
        forked = self.table.fork(sid, new, time.time())
        self._changed.add(new)
        return forked

    async def close(self, sid: SessionId) -> Ended:
        """Raises `TierBroken` when it is gone from here, but not yet from NVMe; see `forget`."""
        only = self.table.close(sid)
        gone = self._hierarchy.forget(only)
        self._closed.add(sid)
        self.erase(gone)
        await self._clean()
        return Ended(tuple(only), tuple(gone))

    def retire(self, sid: SessionId) -> None:
        """Its row is removed at the next beat."""
        self.table.close(sid)
        self._closed.add(sid)

    async def forget(self, keys: Sequence[BlockKey]) -> int:
        """Raises `TierBroken` when they are gone from here, but not yet from NVMe: that is tried
        again at each beat."""
        gone = self._hierarchy.forget(keys)
        self.erase(gone)
        await self._clean()
        return len(gone)

    def erase(self, keys: Iterable[BlockKey]) -> None:
        self._dropped.update(keys)

    async def erased(self, run: Sequence[BlockKey], left_s: float) -> bool:
        if self._erasing.isdisjoint(run):
            return True
        try:
            await asyncio.wait_for(self._index.acquire(), max(0.0, left_s))
        except TimeoutError:
            return False
        self._index.release()
        return True

    async def persist(self, run: Sequence[BlockKey], written: int, left_s: float) -> int:
        write = asyncio.get_running_loop().create_task(self._told(self._write))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.wait([write], timeout=max(LEAST_S, left_s))
        if not write.done() or write.cancelled() or write.exception() is not None:
            return 0
        return written if write.result() else 0

    async def flush(self) -> None:
        await self._told(self._write)
        await self._told(self._clean)

    async def _told(self, step: Callable[[], Awaitable[None]]) -> bool:
        """Whether a step went well; a medium that fails is told to the operator."""
        try:
            await step()
        except TieredKVError as error:
            self._remark(f"the index on NVMe was not changed: {error}")
            return False
        return True

    async def _write(self) -> None:
        async with self._index:
            changed, self._changed = self._changed, set()
            rows = [session for sid in changed if (session := self.table.find(sid)) is not None]
            try:
                if rows:
                    await self._io(self._parts.put_sessions, rows)
                changed = set()
            finally:
                self._changed |= changed

    async def _clean(self) -> None:
        async with self._index:
            closed, self._closed = self._closed, set()
            dropped, self._dropped = self._dropped, set()
            sids = [sid for sid in closed if self.table.find(sid) is None]
            held = self._hierarchy.book.blocks
            keys = [key for key in dropped if key not in held]
            self._erasing = frozenset(keys)
            try:
                if sids or keys:
                    await self._io(self._parts.forget, sids, keys)
                sids, keys = [], []
            finally:
                self._erasing = frozenset()
                self._closed.update(sids)
                self._dropped.update(keys)


class BelowKeeper:
    """Asks the host's node. Raises `Unreachable` when it does not answer."""

    def __init__(
        self, call: Callable[..., Awaitable[Any]], hierarchy: Hierarchy, recent_s: float,
        remark: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`call(verb, *args)` reaches the host. The table here only knows who is active."""
        self.table = SessionTable(recent_s)
        self._call = call
        self._hierarchy = hierarchy
        self._remark = remark

    async def put(self, session: Session) -> Sequence[BlockKey]:
        superseded: Sequence[BlockKey] = await self._call("put_session", session)
        return superseded

    async def use(self, sid: SessionId) -> Session:
        session: Session = await self._call("session", sid)
        return session

    async def fork(self, sid: SessionId, new: SessionId) -> Session:
        session: Session = await self._call("fork", sid, new)
        return session

    async def close(self, sid: SessionId) -> Ended:
        ended: Ended = await self._call("end_session", sid)
        here = self._hierarchy.forget(ended.only)
        return Ended(ended.only, tuple({*ended.gone, *here}))

    def retire(self, sid: SessionId) -> None:
        return  # the host forgets it

    async def forget(self, keys: Sequence[BlockKey]) -> int:
        here = self._hierarchy.forget(keys)
        below: int = await self._call("forget", keys)
        return max(len(here), below)

    def erase(self, keys: Iterable[BlockKey]) -> None:
        return

    async def erased(self, run: Sequence[BlockKey], left_s: float) -> bool:
        return True

    async def persist(self, run: Sequence[BlockKey], written: int, left_s: float) -> int:
        try:
            durable: int = await self._call("persist", run)
        except Unreachable as error:
            self._remark(f"nothing is known to be durable: {error}")
            return 0
        return durable

    async def flush(self) -> None:
        return
