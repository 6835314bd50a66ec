"""What a replica tells the routers of itself: what it holds and how fast it computes. Pure.

`now` is seconds of one monotonic clock.
"""

from collections import Counter, deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from tiered_kv.integrations.ray_serve.prompts import Prompt
from tiered_kv.integrations.ray_serve.seen import Seen
from tiered_kv.integrations.ray_serve.view import CAPACITY_TOKENS

MAX_SESSIONS, MAX_MARKS = 256, 512
"""What a report names at most: some 20 KB, sent to every router every other second."""
MIN_TOKENS = 256
"""Shorter prompts take the time of their overhead."""
SAMPLES, ENOUGH = 32, 3
"""What the rate is the median of, at most and at least: the first request warms the engine up."""


@dataclass(slots=True)
class Turn:
    """One request at a replica. `cold`: nothing of it was here, and nobody else was."""

    prompt: Prompt
    session: str | None
    began: float
    cold: bool
    first: float | None = None


class Watch:
    """Watches the requests of one replica. One event loop owns it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seen = Seen(CAPACITY_TOKENS)
        self._running = 0
        self._pace: deque[float] = deque(maxlen=SAMPLES)

    def has_room_for(self, capacity_tokens: int) -> None:
        """What the engine's own cache holds, once it is known."""
        self._seen.capacity_tokens = capacity_tokens

    def began(self, prompt: Prompt, session: str | None, now: float) -> Turn:
        """A request came. It ends by `ended`."""
        cold = not self._running and not self._seen.holds(prompt, session)
        self._running += 1
        return Turn(prompt, session, now, cold)

    def first(self, turn: Turn, now: float) -> None:
        """Its first token left; all later ones change nothing."""
        if turn.first is not None:
            return
        turn.first = now
        if turn.cold and turn.prompt.tokens >= MIN_TOKENS and self._running == 1:
            self._pace.append((now - turn.began) / turn.prompt.tokens)

    def ended(self, turn: Turn, answered: int) -> None:
        """It ended with `answered` tokens; without a first one nothing is here now."""
        self._running -= 1
        if turn.first is not None:
            self._seen.note(turn.prompt, turn.session, answered)

    @property
    def prefill_s_per_token(self) -> float | None:
        """Measured on cold requests that were alone here; None before there were `ENOUGH`."""
        return median(self._pace) if len(self._pace) >= ENOUGH else None

    def report(self) -> dict[str, Any]:
        """Plain values, bounded in size; `View.heard` reads them."""
        return {
            "prefill_s_per_token": self.prefill_s_per_token,
            "capacity_tokens": self._seen.capacity_tokens,
            "sessions": self._seen.newest_sessions(MAX_SESSIONS),
            "marks": self._seen.newest_marks(MAX_MARKS),
            "counts": dict(self.counts),
        }
