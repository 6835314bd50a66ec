"""What an engine's own cache should still hold, judged by what it was sent. Pure.

The engine evicts least recently used blocks, tails first, and so does this: marks of prompts in
order of their last use, as many as the engine has room for.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiered_kv.integrations.ray_serve.prompts import Prompt, shared_tokens

MAX_MARKS = 1 << 16
MAX_SESSIONS = 1 << 16


class _Turn(NamedTuple):
    tokens: int  # prompt and answer
    until: int  # the clock of `Seen.used_tokens` at which the engine has overwritten it


class Seen:
    """One cache of `capacity_tokens` (estimated, as everything in tokens here)."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._marks: OrderedDict[int, int] = OrderedDict()  # name -> tokens since the mark before
        self._held = 0
        self._sessions: OrderedDict[str, _Turn] = OrderedDict()
        self._written = 0  # tokens that were ever computed: what has been overwritten since

    def note(self, prompt: Prompt, session: str | None = None, answered: int = 0) -> None:
        """A request was computed here: its prompt, and `answered` tokens behind it. O(marks)."""
        cached = self.holds(prompt, session)
        self._written += max(0, prompt.tokens - cached) + answered
        before = 0
        sizes = []
        for mark in prompt.marks:
            sizes.append((mark.name, mark.tokens - before))
            before = mark.tokens
        for name, size in reversed(sizes):  # tail first, so that heads outlive tails
            self._held += size - self._marks.get(name, 0)
            self._marks[name] = size
            self._marks.move_to_end(name)
        if session is not None:
            turn = _Turn(prompt.tokens + answered, self._written + self.capacity_tokens)
            self._sessions[session] = turn
            self._sessions.move_to_end(session)
        self._forget()

    def forget(self, session: str) -> None:
        """The session has ended. Its marks go when nobody uses them."""
        self._sessions.pop(session, None)

    def holds(self, prompt: Prompt, session: str | None = None) -> int:
        """Leading tokens of the prompt that should be here. O(marks)."""
        shared = shared_tokens(prompt, self._marks)
        turn = self._sessions.get(session) if session is not None else None
        if turn is not None and turn.until >= self._written:
            shared = max(shared, min(turn.tokens, prompt.tokens))
        return shared

    def __contains__(self, session: object) -> bool:
        """Whether the session was here, whatever has become of it."""
        return session in self._sessions

    def __len__(self) -> int:
        """Sessions that were here, at most `MAX_SESSIONS`."""
        return len(self._sessions)

    def newest_sessions(self, n: int) -> dict[str, int]:
        """The last `n` sessions that should still be here, and their tokens."""
        newest = list(self._sessions.items())[-n:]
        return {sid: turn.tokens for sid, turn in newest if turn.until >= self._written}

    def newest_marks(self, n: int) -> list[int]:
        """Names of the `n` marks that were used last."""
        return list(self._marks)[-n:]

    def _forget(self) -> None:
        while self._marks and (self._held > self.capacity_tokens or len(self._marks) > MAX_MARKS):
            self._held -= self._marks.popitem(last=False)[1]
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


class Reported(NamedTuple):
    """What a replica said of its own cache: it may have served requests of other routers."""

    sessions: Mapping[str, int]
    marks: Mapping[int, None]

    @classmethod
    def of(cls, sessions: Mapping[str, int], marks: Iterable[int]) -> "Reported":
        """From plain values."""
        return cls(dict(sessions), dict.fromkeys(marks))

    def holds(self, prompt: Prompt, session: str | None) -> int:
        """Leading tokens of the prompt that were there. O(marks)."""
        tokens = self.sessions.get(session, 0) if session is not None else 0
        return max(shared_tokens(prompt, self.marks), min(tokens, prompt.tokens))
