"""The life of a session: an ordered run of blocks with an owner. Pure, like the hierarchy."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tiered_kv.errors import BadInput, BadSession, UnknownSession
from tiered_kv.inputs import check_count, check_run, short
from tiered_kv.types import BlockKey, Fingerprint, SessionId

ALLOWED = re.compile(r"[A-Za-z0-9_:@+=~-]{1,128}")


class State(StrEnum):
    """How a session looks from here. `ACTIVE` is being read or written right now."""

    ACTIVE = "active"
    RECENT = "recent"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of a session. `run` has a key a block; with `tail` the last is incomplete.

    `tokens` are the packed token ids (`keys.pack_tokens`) when the caller gave them: they let a
    session be resumed by its name alone.
    """

    id: SessionId
    layout: Fingerprint
    run: tuple[BlockKey, ...]
    n_tokens: int
    tail: bool
    used_s: float
    tokens: bytes = b""


def session_id(value: object) -> SessionId:
    """A valid session id. Raises `BadSession` naming the value and what is allowed."""
    if isinstance(value, str) and ALLOWED.fullmatch(value):
        return SessionId(value)
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:60]}... ({len(shown)} characters)"
    raise BadSession(
        f"session id {shown} is not 1 to 128 of the characters A-Z a-z 0-9 _ : @ + = ~ -"
    )


def check_session(session: object) -> Session:
    """The session, when all of it fits together. Raises `BadInput` or `BadSession`."""
    if not isinstance(session, Session):
        raise BadInput(f"a session must be a Session, not {short(session)}")
    name = session_id(session.id)
    check_run(session.run)
    check_count("n_tokens", session.n_tokens)
    if type(session.layout) is not bytes or len(session.layout) != 16:
        raise BadInput(f"session {name!r}: {short(session.layout)} is no layout's fingerprint")
    blocks = len(session.run)
    if (blocks == 0) != (session.n_tokens == 0) or blocks > session.n_tokens:
        raise BadInput(f"session {name!r}: {session.n_tokens} tokens are not {blocks} blocks")
    if type(session.tail) is not bool or (session.tail and not blocks):
        raise BadInput(f"session {name!r} of {blocks} blocks has tail {short(session.tail)}")
    if type(session.tokens) is not bytes or len(session.tokens) not in (0, 4 * session.n_tokens):
        raise BadInput(
            f"session {name!r}: tokens are {short(session.tokens)}, not 4 bytes for each of "
            f"{session.n_tokens}"
        )
    if not isinstance(session.used_s, int | float) or not 0 <= session.used_s < 1e12:
        raise BadInput(f"session {name!r} was used at {short(session.used_s)}, which is no time")
    return session


class SessionTable:
    """Sessions by id. Every call takes `now` in wall-clock seconds where it matters."""

    def __init__(self, recent_s: float) -> None:
        self._recent_s = recent_s
        self._sessions: dict[SessionId, Session] = {}
        self._active: Counter[SessionId] = Counter()
        self._ends: Counter[BlockKey] = Counter()  # last blocks: what only sessions keep wanted

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, sid: SessionId) -> Session:
        """The session. Raises `UnknownSession`."""
        session = self._sessions.get(sid)
        if session is None:
            raise UnknownSession(f"no session {sid!r} is held here")
        return session

    def find(self, sid: SessionId) -> Session | None:
        """The session, or None."""
        return self._sessions.get(sid)

    def save(self, session: Session) -> list[BlockKey]:
        """Create or extend a session; the keys that it supersedes.

        A turn makes the incomplete last block of the turn before worthless: its tokens are in a
        complete block now. Blocks that another session ends with are never superseded.
        """
        old = self._sessions.get(session.id)
        if old is not None:
            self._end(old, -1)
        self._sessions[session.id] = session
        self._end(session, 1)
        if old is None or not old.tail or old.run[-1] in session.run:
            return []
        return [key for key in old.run[-1:] if not self._ends[key]]

    def fork(self, sid: SessionId, new: SessionId, now: float) -> Session:
        """A second session with the same run. Raises `UnknownSession`, `BadInput` if it exists."""
        if new in self._sessions:
            raise BadInput(f"session {new!r} exists already")
        forked = replace(self.get(sid), id=new, used_s=now)
        self.save(forked)
        return forked

    def close(self, sid: SessionId) -> list[BlockKey]:
        """Forget a session; its blocks in prefix order, from behind the last one that another
        session ends with. Raises `UnknownSession`."""
        session = self.get(sid)
        self._end(session, -1)
        del self._sessions[sid]
        self._active.pop(sid, None)
        keep = 0
        for i, key in enumerate(session.run):
            if self._ends[key]:
                keep = i + 1
        return list(session.run[keep:])

    def use(self, sid: SessionId, now: float) -> Session:
        """Note that a session is wanted now. Raises `UnknownSession`."""
        session = replace(self.get(sid), used_s=now)
        self._sessions[sid] = session
        return session

    def enter(self, sid: SessionId) -> None:
        """Somebody reads or writes it; undone by `leave`."""
        self._active[sid] += 1

    def leave(self, sid: SessionId) -> None:
        """The counterpart of `enter`; harmless after `close`."""
        if self._active[sid] > 1:
            self._active[sid] -= 1
        else:
            self._active.pop(sid, None)

    def is_active(self, sid: SessionId) -> bool:
        """Whether somebody reads or writes it."""
        return self._active[sid] > 0

    def unused(self, since_s: float) -> list[Session]:
        """Sessions that nobody has used since then, nor uses now. O(sessions)."""
        return [
            session
            for session in self._sessions.values()
            if session.used_s < since_s and not self.is_active(session.id)
        ]

    def state(self, session: Session, now: float) -> State:
        """Active while somebody reads or writes it, recent for a while after that, then idle."""
        if self._active[session.id]:
            return State.ACTIVE
        return State.RECENT if now - session.used_s < self._recent_s else State.IDLE

    def adopt(self, sessions: Iterable[Session]) -> None:
        """Take over what a former incarnation knew."""
        for session in sessions:
            self.save(session)

    def _end(self, session: Session, by: int) -> None:
        if session.run:
            self._ends[session.run[-1]] += by
            if not self._ends[session.run[-1]]:
                del self._ends[session.run[-1]]
