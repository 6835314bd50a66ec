"""When to bring a sleeping session up before it is read. Policies by name, and what they waste.

A policy names sessions; the node brings them up (`Node.prefetch`) and tells `Waste` what was moved,
used and lost. Pure; seconds and bytes.
"""

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tiered_kv.errors import UnknownName
from tiered_kv.policies.retention import Outlook
from tiered_kv.types import SessionId


class PrefetchPolicy(Protocol):
    """O(log sessions) a call."""

    name: ClassVar[str]

    def arrived(self, sid: SessionId, now: float) -> bool:
        """The router knows of a request: whether to start bringing its session up now."""
        ...

    def stopped(self, sid: SessionId, outlook: Outlook, now: float) -> None:
        """The session's request was answered, and this is expected of it."""
        ...

    def ended(self, sid: SessionId) -> None:
        """The session will not come back."""
        ...

    def due(self, now: float) -> list[SessionId]:
        """Sessions to bring up now, each named once for a stop, the most overdue first."""
        ...


class NoPrefetch:
    """Blocks come up when they are read."""

    name: ClassVar[str] = "none"

    def arrived(self, sid: SessionId, now: float) -> bool:
        """See `PrefetchPolicy`."""
        return False

    def stopped(self, sid: SessionId, outlook: Outlook, now: float) -> None:
        """See `PrefetchPolicy`."""

    def ended(self, sid: SessionId) -> None:
        """See `PrefetchPolicy`."""

    def due(self, now: float) -> list[SessionId]:
        """See `PrefetchPolicy`."""
        return []


class OnRequest(NoPrefetch):
    """As soon as the router knows of a request: its time in the queue is used, nothing is guessed,
    and nothing is wasted but what is evicted again before its turn."""

    name: ClassVar[str] = "on_request"

    def arrived(self, sid: SessionId, now: float) -> bool:
        """See `PrefetchPolicy`."""
        return True


class OnPredictedWake(OnRequest):
    """On request, and before it when the return of a session can be foretold.

    It is brought up `LEAD_S` before one in four would be back. Sessions that are back sooner than
    `NEAR_S` have not left yet, and of those that are expected in more than `FAR_S` nobody knows
    when: both are left alone. State: about 150 bytes for each session that waits.
    """

    name: ClassVar[str] = "on_predicted_wake"
    LEAD_S: ClassVar[float] = 2.0
    NEAR_S: ClassVar[float] = 5.0
    FAR_S: ClassVar[float] = 1800.0

    def __init__(self) -> None:
        self._when: dict[SessionId, float] = {}
        self._heap: list[tuple[float, SessionId]] = []

    def arrived(self, sid: SessionId, now: float) -> bool:
        """See `PrefetchPolicy`."""
        self._when.pop(sid, None)
        return True

    def stopped(self, sid: SessionId, outlook: Outlook, now: float) -> None:
        """See `PrefetchPolicy`."""
        self._when.pop(sid, None)
        if math.isfinite(outlook.return_s) and self.NEAR_S <= outlook.wake_s <= self.FAR_S:
            at = now + outlook.wake_s - self.LEAD_S
            self._when[sid] = at
            heapq.heappush(self._heap, (at, sid))
            if len(self._heap) > 64 + 2 * len(self._when):  # most of it is outdated
                self._heap = [(at, sid) for sid, at in self._when.items()]
                heapq.heapify(self._heap)

    def ended(self, sid: SessionId) -> None:
        """See `PrefetchPolicy`."""
        self._when.pop(sid, None)

    def due(self, now: float) -> list[SessionId]:
        """See `PrefetchPolicy`."""
        found: list[SessionId] = []
        while self._heap and self._heap[0][0] <= now:
            at, sid = heapq.heappop(self._heap)
            if self._when.get(sid) == at:
                del self._when[sid]
                found.append(sid)
        return found


PREFETCH: dict[str, type[PrefetchPolicy]] = {
    policy.name: policy for policy in (NoPrefetch, OnRequest, OnPredictedWake)
}


def prefetch(name: str) -> PrefetchPolicy:
    """A fresh prefetch policy. Raises `UnknownName` with the list of known ones."""
    if name not in PREFETCH:
        raise UnknownName(f"prefetch policy {name!r} is not one of {', '.join(sorted(PREFETCH))}")
    return PREFETCH[name]()


@dataclass(frozen=True, slots=True)
class Wasted:
    """Bytes that prefetching moved, by what became of them; `pending` is not decided yet."""

    brought: int
    used: int
    wasted: int
    pending: int


class Waste:
    """Accounts for every prefetched byte once: used, wasted, or still waiting.

    A byte is used when its session reads it, and wasted when it leaves before that or when its
    session ends. Memory: about 150 bytes for each of `max_sessions`; the one that waits longest is
    given up as wasted.
    """

    def __init__(self, max_sessions: int = 100_000) -> None:
        self._max = max_sessions
        self._pending: OrderedDict[SessionId, int] = OrderedDict()
        self._brought = self._used = self._wasted = 0

    def brought(self, sid: SessionId, nbytes: int) -> None:
        """So much was moved up for the session, unasked."""
        self._brought += nbytes
        self._pending[sid] = self._pending.get(sid, 0) + nbytes
        if len(self._pending) > self._max:
            self._wasted += self._pending.popitem(last=False)[1]

    def used(self, sid: SessionId, nbytes: int | None = None) -> None:
        """The session read so much of it (all of it): what it did not read was for nothing."""
        waiting = self._pending.pop(sid, 0)
        useful = waiting if nbytes is None else min(nbytes, waiting)
        self._used += useful
        self._wasted += waiting - useful

    def lost(self, sid: SessionId, nbytes: int | None = None) -> None:
        """So much of it (all of it) left again before anybody read it, or its session ended."""
        waiting = self._pending.pop(sid, 0)
        gone = waiting if nbytes is None else min(nbytes, waiting)
        self._wasted += gone
        if waiting > gone:
            self._pending[sid] = waiting - gone

    def total(self) -> Wasted:
        """The sums so far; `brought == used + wasted + pending`."""
        pending = self._brought - self._used - self._wasted
        return Wasted(self._brought, self._used, self._wasted, pending)
