"""Hints about sessions: who has stopped, pauses or has ended, and who is brought up before."""

import math
import time
from collections.abc import Sequence
from functools import partial

from tiered_kv.config import Config
from tiered_kv.errors import BadInput
from tiered_kv.inputs import check_seconds, short
from tiered_kv.node_finds import Finding
from tiered_kv.outlooks import MOST_PRIORITY
from tiered_kv.parts import Parts
from tiered_kv.sessions import Session, session_id
from tiered_kv.types import BlockKey, SessionId
from tiered_kv.wire import Expected

LOOK_S = 0.5
"""How often expected returns are looked at."""
SWEEP_S = 30.0
"""How often sessions are looked at that nobody has used for long."""
LONGEST_REASON = 64


class Hinting(Finding):
    """See `node.Node`."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__(config, parts)
        self._tasks.add(self._spawn(self._every(LOOK_S, self._look_ahead), "kv-outlooks"))
        self._tasks.add(self._spawn(self._every(SWEEP_S, self._expire_sessions), "kv-expiry"))

    async def hint(
        self, sid: str, ended: bool = False, stopped: str | None = None,
        pause_s: float | None = None, priority: int | None = None,
    ) -> Expected:  # fmt: skip
        """What the caller knows of a session beyond its requests; what is expected of it now.

        `stopped` is why its last request ended ("tool_use", "end_turn", or a name of the caller's
        own: each is learned from), `pause_s` after how many seconds its next one comes. `priority`
        from -8 to 8 makes its blocks stay as if it came back in `2**-priority` of the time.
        `ended` says that it never does: its blocks are the first to leave, and it is forgotten
        once nobody reads it, unless it is woken or saved before; say it after its last save.
        Hints may be wrong: they cost hits, never bytes. Raises `UnknownSession`, `BadInput`.
        """
        sid = session_id(sid)
        _check_hint(ended, stopped, pause_s, priority)
        if self.parts.below is None:
            expected = self._hinted(sid, ended, stopped, pause_s, priority)
        else:
            ask = partial(self.parts.below.call, timeout_s=self.config.service.call_timeout_s)
            expected = await self._io(ask, "hint", sid, ended, stopped, pause_s, priority)
        if expected.return_s is not None:
            self.hierarchy.expect(expected.run, expected.return_s)
        return expected

    def _hinted(
        self, sid: SessionId, ended: bool, stopped: str | None, pause_s: float | None,
        priority: int | None,
    ) -> Expected:  # fmt: skip
        session = self.keeper.table.get(sid)
        if ended:
            self.outlooks.ended(sid)
            self.leaving.add(sid)
            self._close_leaving()
            return Expected(session.run, math.inf)
        if priority is not None:
            self.outlooks.prioritise(sid, priority)
        if stopped is None and pause_s is None:
            return Expected(session.run, None)
        return Expected(session.run, self.outlooks.stopped(sid, stopped, pause_s, self._now()))

    async def prefetch(self, sid: str) -> int:
        """A request of the session is on its way: start bringing it up and do not wait; how many
        batches are on their way. With `service.prefetch = "none"` nothing is brought up.

        Others follow in the background where room has to be made for them first.
        """
        session = await self.keeper.use(session_id(sid))
        return self._bring_up(session) if self._is_here(session) else 0

    def _bring_up(self, session: Session) -> int:
        layout, run = session.layout, session.run
        nbytes = self._block_bytes(session)
        if nbytes is None:
            return 0
        book = self.hierarchy.book
        wanted = self.hierarchy.want(run[: self._most(nbytes)], layout, nbytes)
        self._kick()
        coming = [block.key for block in book.live(run) if block.answer is book.coming]
        self.outlooks.brought(session.id, coming, nbytes)
        if wanted.short:
            rest = [key for key in run if not self._in_pool(key)]
            bringing = self._spawn(self._bring_rest(session, rest, nbytes), "kv-prefetch")
            self._tasks.add(bringing)
            bringing.add_done_callback(self._tasks.discard)
        return len(wanted.moves)

    async def _bring_rest(self, session: Session, rest: Sequence[BlockKey], nbytes: int) -> None:
        """Bring up what found no room yet, as room is being made."""
        end = time.monotonic() + self.config.service.wake_deadline_s
        await self._bring(session.layout, session.run, nbytes, end, {})
        self.outlooks.brought(session.id, [key for key in rest if self._in_pool(key)], nbytes)

    def _block_bytes(self, session: Session) -> int | None:
        """The size of a session's blocks; None when neither its layout nor a block is known."""
        if session.layout in self.layouts:
            return self.layouts[session.layout].block_bytes
        return next((block.nbytes for block in self.hierarchy.book.live(session.run)), None)

    async def _look_ahead(self) -> None:
        """Bring up who is expected soon, and see what became of earlier guesses."""
        for sid in self.outlooks.due(self._now()):
            session = self.keeper.table.find(sid)
            if session is not None:
                self.counts["prefetch.predicted"] += 1
                self._bring_up(session)
        self.outlooks.sweep(self._in_pool)
        self._close_leaving()

    async def _expire_sessions(self) -> None:
        """Forget who was not used for `session_ttl_s`; the blocks leave like any that are old."""
        ttl_s = self.config.service.session_ttl_s
        if not ttl_s or self.parts.below is not None:
            return
        for session in self.keeper.table.unused(time.time() - ttl_s):
            self.outlooks.ended(session.id)
            self.hierarchy.expect(session.run, math.inf)
            self.keeper.retire(session.id)
            self.counts["sessions.expired"] += 1

    def _close_leaving(self) -> None:
        for sid in [sid for sid in self.leaving if not self.keeper.table.is_active(sid)]:
            self.leaving.discard(sid)
            if self.keeper.table.find(sid) is not None:
                self.keeper.retire(sid)
                self.counts["sessions.ended"] += 1


def _check_hint(ended: object, stopped: object, pause_s: object, priority: object) -> None:
    if type(ended) is not bool:
        raise BadInput(f"ended must be True or False, not {short(ended)}")
    if stopped is not None and not (
        isinstance(stopped, str) and 0 < len(stopped) <= LONGEST_REASON
    ):
        raise BadInput(
            f"stopped must be a reason of 1 to {LONGEST_REASON} characters, not {short(stopped)}"
        )
    if pause_s is not None:
        check_seconds("pause_s", pause_s, zero=True)
    if priority is not None and (
        type(priority) is not int or not -MOST_PRIORITY <= priority <= MOST_PRIORITY
    ):
        raise BadInput(
            f"priority must be from -{MOST_PRIORITY} to {MOST_PRIORITY}, not {short(priority)}"
        )
