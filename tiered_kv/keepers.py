"""Who keeps the session table: a host's node in memory and beside its NVMe data, a GPU's node by
asking its host."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from tiered_kv.errors import TieredKVError, UnknownSession
from tiered_kv.parts import Parts
from tiered_kv.sessions import Session, SessionTable
from tiered_kv.types import BlockKey, SessionId

Io = Callable[..., Awaitable[Any]]
"""Runs a blocking call in a thread."""


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

    async def close(self, sid: SessionId) -> tuple[Session, int]:
        """Forget it and what only it had below this node; the session, and how many blocks went
        there. Raises `UnknownSession`."""
        ...

    async def persist(self, run: Sequence[BlockKey], written: int) -> int:
        """Called when a run was written below, `written` blocks of it to a medium that lasts:
        write what belongs to it; how many blocks outlive the processes."""
        ...

    async def flush(self) -> None:
        """Write sessions that changed beside the blocks."""
        ...


class HostKeeper:
    """The table itself. What changed is written at each beat of the node, and for `durable`."""

    def __init__(
        self, parts: Parts, recent_s: float, io: Io, forget: Callable[[Sequence[BlockKey]], Any],
        remark: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`forget` drops blocks of this node, `remark` notes an error for `status`."""
        self.table = SessionTable(recent_s)
        self._parts = parts
        self._io = io
        self._forget = forget
        self._remark = remark
        self._dirty: set[SessionId] = set()

    async def put(self, session: Session) -> Sequence[BlockKey]:
        superseded = self.table.save(session)
        self._dirty.add(session.id)
        return superseded

    async def use(self, sid: SessionId) -> Session:
        session = self.table.use(sid, time.time())
        self._dirty.add(sid)
        return session

    async def fork(self, sid: SessionId, new: SessionId) -> Session:
        forked = self.table.fork(sid, new, time.time())
        self._dirty.add(new)
        return forked

    async def close(self, sid: SessionId) -> tuple[Session, int]:
        session = self.table.get(sid)
        gone = self._forget(self.table.close(sid))
        self._dirty.discard(sid)
        await self._io(self._parts.forget, [sid], gone)
        return session, len(gone)

    async def persist(self, run: Sequence[BlockKey], written: int) -> int:
        await self.flush()
        return written

    async def flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        rows: list[Session] = []
        for sid in dirty:
            try:
                rows.append(self.table.get(sid))
            except UnknownSession:
                continue  # closed meanwhile
        if not rows:
            return
        try:
            await self._io(self._parts.put_sessions, rows)
        except TieredKVError as error:
            self._dirty |= dirty
            self._remark(f"session table not written: {error}")


class BelowKeeper:
    """Asks the host's node. Raises `Unreachable` when it does not answer."""

    def __init__(self, call: Callable[..., Awaitable[Any]], recent_s: float) -> None:
        """`call(verb, *args)` reaches the host. The table here only knows who is active."""
        self.table = SessionTable(recent_s)
        self._call = call

    async def put(self, session: Session) -> Sequence[BlockKey]:
        superseded: Sequence[BlockKey] = await self._call("put_session", session)
        return superseded

    async def use(self, sid: SessionId) -> Session:
        session: Session = await self._call("session", sid)
        return session

    async def fork(self, sid: SessionId, new: SessionId) -> Session:
        session: Session = await self._call("fork", sid, new)
        return session

    async def close(self, sid: SessionId) -> tuple[Session, int]:
        session = await self.use(sid)
        gone: int = await self._call("close_session", sid)
        return session, gone

    async def persist(self, run: Sequence[BlockKey], written: int) -> int:
        durable: int = await self._call("persist", run)
        return durable

    async def flush(self) -> None:
        return
