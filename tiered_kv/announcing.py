"""How a node keeps the coordinator informed: changes only, in batches, again after any doubt.

    node                                       coordinator
    announce(beat 1, all, whole)          ->   known
    announce(beat 2, +s7 -s3)             ->   known
                                               (killed, restarted: knows nobody)
    announce(beat 3, +s8)                 ->   not known
    announce(beat 4, all, whole)          ->   known

What was not acknowledged is sent once more: applying an announcement twice changes nothing.
"""

from collections.abc import Callable, Collection
from itertools import islice

from tiered_kv.directory import Ack, Announcement, Member
from tiered_kv.errors import Unreachable
from tiered_kv.wire import Link

BATCH = 10_000
"""Session ids in one announcement, about 0.5 MB. One that is larger would hold the coordinator."""
MAX_BATCHES = 50
"""Announcements a beat; the rest follows with the next beats."""
TIMEOUT_S = 5.0

Facts = Callable[[], tuple[Member, Collection[str]]]


class Announcer:
    """The node's end. Used by one thread."""

    def __init__(self, link: Link, facts: Facts) -> None:
        """`facts` answers who this is and the ids of all sessions that it holds, or raises
        `Unreachable`."""
        self._link = link
        self._facts = facts
        self._told: set[str] = set()
        self._whole = False
        self._beat = 0
        self.missed = 0
        """Beats that did not reach the coordinator, or could not be taken from the node."""

    def beat(self) -> bool:
        """Tell what changed; True when a later life of this node is known there.

        One call, and one more for every `BATCH` changed sessions; O(sessions). A coordinator or
        node that does not answer is counted and ignored. Blocks up to `TIMEOUT_S` a call.
        """
        try:
            member, held = self._facts()
            ids: set[str] = set(held)
            for _ in range(MAX_BATCHES):
                ack, complete = self._tell(member, ids)
                if ack.superseded:
                    return True
                if ack.known and complete:
                    return False
        except Unreachable:
            self.missed += 1
        return False

    def _tell(self, member: Member, ids: set[str]) -> tuple[Ack, bool]:
        added = tuple(islice(ids - self._told, BATCH))
        gone = tuple(islice(self._told - ids, BATCH))
        self._beat += 1
        news = Announcement(member, self._beat, added, gone, whole=not self._whole)
        ack: Ack = self._link.call("announce", news, timeout_s=TIMEOUT_S)
        if ack.known:
            self._whole = True
            self._told.update(added)
            self._told.difference_update(gone)
        else:
            self._whole = False
            self._told.clear()
        return ack, self._told == ids
