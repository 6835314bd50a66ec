"""What a node expects of its sessions: who is back when, who is brought up before, and what that
wasted. Pure; seconds of one clock."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

from tiered_kv.policies.prefetch import PrefetchPolicy, Waste, Wasted
from tiered_kv.policies.retention import OTHER, Retention
from tiered_kv.types import BlockKey, SessionId

MAX_SESSIONS = 100_000
"""Of so many sessions it is known when they come back; 200 bytes each."""
MAX_BROUGHT = 10_000
"""Of so many sessions it is known which blocks were prefetched and not read yet."""
MOST_PRIORITY = 8

Here = Callable[[BlockKey], bool]
"""Whether a block is in the pool, or on its way there."""


class Outlooks:
    """Retention, prefetch policy and accounts of one node. Every call is O(1), or O(keys)."""

    def __init__(self, policy: PrefetchPolicy) -> None:
        self.policy = policy
        self.retention = Retention(MAX_SESSIONS)
        self._waste = Waste(MAX_BROUGHT + 1)
        self._priority: OrderedDict[SessionId, int] = OrderedDict()
        self._brought: OrderedDict[SessionId, dict[BlockKey, int]] = OrderedDict()
        self._whose: dict[BlockKey, SessionId] = {}

    # -- when sessions come back ----------------------------------------------------------

    def arrived(self, sid: SessionId, now: float) -> bool:
        """A request of the session is here; whether to bring it up now."""
        self.retention.arrived(sid, now)
        return self.policy.arrived(sid, now)

    def stopped(
        self, sid: SessionId, reason: str | None, pause_s: float | None, now: float
    ) -> float:
        """Its request was answered; in how many seconds to expect the next one. A pause that the
        caller knows counts for more than what was learned."""
        self.retention.stopped(sid, reason or OTHER, now)
        outlook = self.retention.outlook(sid, now)
        if pause_s is not None:
            outlook = replace(outlook, return_s=pause_s, wake_s=pause_s)
        self.policy.stopped(sid, outlook, now)
        return outlook.return_s / 2.0 ** self._priority.get(sid, 0)

    def prioritise(self, sid: SessionId, priority: int) -> None:
        """From its next stop on the session is expected back in `2**-priority` of the time, so
        that its blocks stay longer (or, below 0, shorter) than those of others."""
        self._priority[sid] = priority
        self._priority.move_to_end(sid)
        if len(self._priority) > MAX_SESSIONS:
            self._priority.popitem(last=False)

    def ended(self, sid: SessionId) -> None:
        """It will not come back."""
        self.retention.ended(sid)
        self.policy.ended(sid)
        self._priority.pop(sid, None)
        self._drop(sid)
        self._waste.lost(sid)

    def due(self, now: float) -> list[SessionId]:
        """Sessions to bring up now, before they are asked for."""
        return self.policy.due(now)

    # -- what prefetching wastes ----------------------------------------------------------

    def brought(self, sid: SessionId, keys: Iterable[BlockKey], nbytes: int) -> None:
        """These blocks are being brought up for the session, unasked."""
        new = [key for key in keys if key not in self._whose]
        if not new:
            return
        self._waste.brought(sid, len(new) * nbytes)
        self._brought.setdefault(sid, {}).update(dict.fromkeys(new, nbytes))
        self._brought.move_to_end(sid)
        self._whose.update(dict.fromkeys(new, sid))
        if len(self._brought) > MAX_BROUGHT:
            oldest = next(iter(self._brought))
            self._drop(oldest)
            self._waste.lost(oldest)

    def read(self, run: Iterable[BlockKey], here: Here) -> None:
        """Somebody wants these blocks: what was brought for them was worth it where it still is
        here. Free while nothing is waiting."""
        if not self._whose:
            return
        for key in run:
            sid = self._whose.get(key)
            if sid is not None:
                waiting = self._drop(sid)
                self._waste.used(sid, sum(n for one, n in waiting.items() if here(one)))

    def sweep(self, here: Here, sessions: int = 64) -> None:
        """Look whether what was brought is still here, for the next few sessions in turn."""
        for sid in list(islice(self._brought, sessions)):
            self._brought.move_to_end(sid)
            waiting = self._brought[sid]
            gone = [key for key in waiting if not here(key)]
            if gone:
                self._waste.lost(sid, sum(waiting[key] for key in gone))
                for key in gone:
                    del waiting[key], self._whose[key]
                if not waiting:
                    del self._brought[sid]

    def wasted(self) -> Wasted:
        """Bytes that prefetching moved, by what became of them."""
        return self._waste.total()

    def _drop(self, sid: SessionId) -> dict[BlockKey, int]:
        waiting = self._brought.pop(sid, {})
        for key in waiting:
            del self._whose[key]
        return waiting
