"""The cluster: who is there, who holds which session, and where a session goes.

Plain and pure: no Ray, no clock (`now` is seconds of one monotonic clock), no I/O. All of it is
soft state. A directory that starts empty is whole again after one beat of every node, because it
answers `known=False` to a node that it does not know, and that node then tells all it holds.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from tiered_kv.errors import Unreachable
from tiered_kv.policies.placement import Candidate, placement
from tiered_kv.sessions import session_id

BEAT_S = 2.0
"""How often a member announces itself."""
MISSED_BEATS = 5
"""A member that was silent for that many is taken for gone; it may come back at any time."""
MAX_PROMISED = 1 << 16
"""Sessions that were placed and not yet announced. The oldest are forgotten first: at worst such
a session is placed anew, on a node that does not hold it, which is a miss."""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of one node. `actor` and `gpus` are Ray names in the service's namespace."""

    node_id: str
    incarnation: int
    actor: str
    host: str  # `hosts.host_identity`: equal where memory can be shared
    capacity_bytes: int = 0  # of all its tiers
    used_bytes: int = 0
    sessions: int = 0
    gpus: tuple[str, ...] = ()  # filled in by the directory


@dataclass(frozen=True, slots=True)
class GpuMember:
    """One life of one GPU actor, or of its CPU stand-in; `node` is the actor of its host."""

    actor: str
    node: str
    incarnation: int
    pool: str  # one line: what memory it really is


@dataclass(frozen=True, slots=True)
class Announcement:
    """A member and what changed in its sessions since the last acknowledged announcement.

    Applying one twice changes nothing. With `whole`, `added` begins the complete list.
    """

    member: Member
    beat: int  # grows with each announcement of a life
    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """`known`: changes suffice; otherwise send all. `superseded`: a later life of this node has
    announced itself, and this one should end."""

    known: bool
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a session goes. `kept`: it was there before."""

    session: str
    member: Member
    kept: bool


@dataclass(slots=True)
class _Seat:
    member: Member
    heard: float
    beat: int
    whole: bool  # its complete list has begun to arrive
    sessions: set[str] = field(default_factory=set)


class Directory:
    """Not thread-safe. `place`, `where` and `members` are O(members), `announce` is O(changes)."""

    def __init__(self, policy: str = "least_loaded") -> None:
        """Raises `UnknownName` for a policy that is not registered."""
        self._policy = placement(policy)
        self._seats: dict[str, _Seat] = {}
        self._gpus: dict[str, tuple[GpuMember, float]] = {}
        self._where: dict[str, str] = {}
        self._promised: OrderedDict[str, str] = OrderedDict()
        self._promises: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    # -- what members tell ----------------------------------------------------------------

    def announce(self, news: Announcement, now: float) -> Ack:
        """Take over what a node says about itself. Older lives and late beats change nothing."""
        self._expire(now)
        new = news.member
        seat = self._seats.get(new.node_id)
        if seat is not None and new.incarnation < seat.member.incarnation:
            self.counts["announcements.superseded"] += 1
            return Ack(known=True, superseded=True)
        if seat is None or new.incarnation > seat.member.incarnation:
            seat = self._welcome(new, now)
        elif news.beat <= seat.beat:
            self.counts["announcements.late"] += 1
            return Ack(known=seat.whole)
        seat.member, seat.heard, seat.beat = new, now, news.beat
        if news.whole:
            self._drop_sessions(new.node_id, seat.sessions)
            seat.sessions.clear()
            seat.whole = True
        self._add_sessions(seat, news.added)
        self._drop_sessions(new.node_id, news.gone)
        seat.sessions.difference_update(news.gone)
        return Ack(known=seat.whole)

    def announce_gpu(self, gpu: GpuMember, now: float) -> Ack:
        """Take over what a GPU actor says about itself."""
        known = self._gpus.get(gpu.actor)
        if known is not None and gpu.incarnation < known[0].incarnation:
            return Ack(known=True, superseded=True)
        self._gpus[gpu.actor] = gpu, now
        return Ack(known=True)

    def leave(self, name: str) -> bool:
        """A node (by node id) or GPU actor (by Ray name) stops; whether it was known."""
        gpu = self._gpus.pop(name, None)
        seat = self._seats.get(name)
        if seat is not None:
            self._remove(name)
        return gpu is not None or seat is not None

    # -- what clients ask -----------------------------------------------------------------

    def members(self, now: float) -> list[Member]:
        """Who was heard lately, by node id, each with the GPU actors above it."""
        self._expire(now)
        return [self._seen(seat) for _, seat in sorted(self._seats.items())]

    def where(self, session: str, now: float) -> Member | None:
        """Who holds a session, as far as is known. Raises `BadSession`."""
        self._expire(now)
        node_id = self._where.get(session_id(session))
        return None if node_id is None else self._seen(self._seats[node_id])

    def place(
        self, session: str, now: float, host: str | None = None, last: str | None = None
    ) -> Placement:
        """The node for a session: the one that holds it or was given it, while that one lives;
        else `last`, where the caller remembers to have seen it; else the policy's choice, on
        `host` when a member is there.

        Raises `BadSession`, and `Unreachable` when no node has announced itself.
        """
        self._expire(now)
        sid = session_id(session)
        for node_id in (self._where.get(sid), self._promised.get(sid), last):
            if node_id is not None and node_id in self._seats:
                return Placement(sid, self._seen(self._seats[node_id]), kept=True)
        chosen = self._choose(sid, host)
        self._promise(sid, chosen)
        return Placement(sid, self._seen(self._seats[chosen]), kept=False)

    def status(self, now: float) -> dict[str, object]:
        """Plain values for an operator."""
        self._expire(now)
        return {
            "members": len(self._seats),
            "gpus": len(self._gpus),
            "sessions": len(self._where),
            "promised": len(self._promised),
            "silent_s": {i: round(now - s.heard, 1) for i, s in sorted(self._seats.items())},
            "counts": dict(self.counts),
        }

    # -- inside ---------------------------------------------------------------------------

    def _choose(self, sid: str, host: str | None) -> str:
        if not self._seats:
            raise Unreachable("no node has announced itself to the coordinator yet")
        here = [seat for seat in self._seats.values() if seat.member.host == host]
        candidates = [self._candidate(seat) for seat in here or self._seats.values()]
        return self._policy.choose(sid, candidates).node_id

    def _candidate(self, seat: _Seat) -> Candidate:
        member = seat.member
        sessions = len(seat.sessions) + self._promises[member.node_id]
        return Candidate(member.node_id, member.capacity_bytes, member.used_bytes, sessions)

    def _seen(self, seat: _Seat) -> Member:
        above = [gpu.actor for gpu, _ in self._gpus.values() if gpu.node == seat.member.actor]
        return replace(seat.member, sessions=len(seat.sessions), gpus=tuple(sorted(above)))

    def _welcome(self, member: Member, now: float) -> _Seat:
        # A node without a disk has another id in each life, but its actor keeps its name.
        for node_id in [i for i, s in self._seats.items() if s.member.actor == member.actor]:
            self._remove(node_id)
        if member.node_id in self._seats:
            self._remove(member.node_id)
        seat = self._seats[member.node_id] = _Seat(member, now, -1, whole=False)
        return seat

    def _expire(self, now: float) -> None:
        oldest = now - BEAT_S * MISSED_BEATS
        for node_id in [i for i, seat in self._seats.items() if seat.heard < oldest]:
            self._remove(node_id)
            self.counts["members.expired"] += 1
        for name in [n for n, (_, heard) in self._gpus.items() if heard < oldest]:
            del self._gpus[name]

    def _remove(self, node_id: str) -> None:
        seat = self._seats.pop(node_id)
        self._drop_sessions(node_id, seat.sessions)
        for sid in [s for s, n in self._promised.items() if n == node_id]:
            self._keep_promise(sid)

    def _add_sessions(self, seat: _Seat, sessions: tuple[str, ...]) -> None:
        for sid in sessions:
            self._where[sid] = seat.member.node_id
            self._keep_promise(sid)
        seat.sessions.update(sessions)

    def _drop_sessions(self, node_id: str, sessions: "tuple[str, ...] | set[str]") -> None:
        for sid in sessions:
            if self._where.get(sid) == node_id:
                del self._where[sid]

    def _promise(self, sid: str, node_id: str) -> None:
        self._keep_promise(sid)
        self._promised[sid] = node_id
        self._promises[node_id] += 1
        while len(self._promised) > MAX_PROMISED:
            self._keep_promise(next(iter(self._promised)))

    def _keep_promise(self, sid: str) -> None:
        node_id = self._promised.pop(sid, None)
        if node_id is not None:
            self._promises[node_id] -= 1
