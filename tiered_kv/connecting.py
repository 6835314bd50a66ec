"""A process's view of the service: whom to talk to, also while the coordinator is away."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

from tiered_kv.actors import fleet, launch
from tiered_kv.actors.shell import COORDINATOR
from tiered_kv.config import Config
from tiered_kv.directory import Member, Placement
from tiered_kv.errors import BadInput, TieredKVError, Unreachable
from tiered_kv.hosts import host_identity
from tiered_kv.joining import join
from tiered_kv.policies.placement import Candidate, placement
from tiered_kv.raylink import RayLink, reason
from tiered_kv.residence import Residence
from tiered_kv.sessions import session_id
from tiered_kv.settings import load
from tiered_kv.types import Medium

ASK_S = 5.0
"""How long the coordinator may take; without it one goes on with what one knows."""
AWAY_S = 1.0
"""For how long a coordinator that did not answer is not asked again."""
FRESH_S = 5.0
MAX_REMEMBERED = 1 << 16


class Cluster:
    """Made by `connect`. Thread-safe. Blocks; never call it on an event loop."""

    def __init__(self, config: Config, owned: bool) -> None:
        """`owned`: the Ray cluster was started by this process and ends with `close`."""
        self.config = config
        self.host = host_identity(config.shm_folder)
        self._owned = owned
        self._links: dict[str, RayLink] = {}
        self._members: dict[str, Member] = {}
        self._asked = 0.0
        self._away_until = 0.0
        self._placed: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._alone = placement("rendezvous")  # clients that cannot ask still agree

    # -- whom to talk to ------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Who is there. One actor call; the last known answer while the coordinator is away."""
        try:
            found: list[Member] = self._ask("members")
        except Unreachable:
            with self._lock:
                return list(self._members.values())
        with self._lock:
            self._members = {member.node_id: member for member in found}
            self._asked = time.monotonic()
        return found

    def place(self, session: str) -> Placement:
        """The node for a session, on this host if it is new and a member is here.

        One actor call, and one more at most every `FRESH_S`. While the coordinator is away: where
        this process saw the session last, else by hash among the members it knows. Raises
        `BadSession`, and `Unreachable` when no member is known.
        """
        sid = session_id(session)
        if time.monotonic() - self._asked > FRESH_S:
            self.members()
        with self._lock:
            last, _ = self._placed.get(sid, (None, 0.0))
        try:
            found: Placement = self._ask("place", sid, self.host, last)
        except Unreachable as error:
            found = self._place_alone(sid, last, error)
        with self._lock:
            self._placed[sid] = found.member.node_id, time.monotonic()
            self._placed.move_to_end(sid)
            if len(self._placed) > MAX_REMEMBERED:
                self._placed.popitem(last=False)
        return found

    def where(self, session: str) -> Member | None:
        """Who holds a session, as far as the coordinator knows; None for one that nobody has
        saved. One actor call. Raises `BadSession` and `Unreachable`."""
        found: Member | None = self._ask("where", session_id(session))
        return found

    def resident(self, member: Member, session: str) -> Residence:
        """How much of a session a member holds. One actor call. Raises `BadSession`,
        `UnknownSession` and `Unreachable`."""
        found: Residence = self._link(member.actor).call(
            "resident", session_id(session), timeout_s=ASK_S
        )
        return found

    def link(self, to: Member | Placement, medium: Medium = Medium.DRAM, index: int = 0) -> RayLink:
        """The link to a member's node (`DRAM`) or to its GPU actor `index` (`HBM`). No call; the
        same object for the same actor. Raises `BadInput` for what it has not."""
        member = to.member if isinstance(to, Placement) else to
        if medium is Medium.DRAM:
            return self._link(member.actor)
        if medium is Medium.HBM and 0 <= index < len(member.gpus):
            return self._link(member.gpus[index])
        raise BadInput(
            f"{member.actor} has no {medium} {index}; it has dram and hbm 0..{len(member.gpus) - 1}"
        )

    def link_for(self, session: str) -> RayLink:
        """The link that serves a session from here: to the first GPU actor of its node, or to the
        node where none has announced itself.

        No call for a session that was placed less than `FRESH_S` ago on a node that is still
        there; costs and errors of `place` otherwise.
        """
        sid = session_id(session)
        with self._lock:
            node_id, at = self._placed.get(sid, ("", 0.0))
            known = self._members.get(node_id)
        fresh = known is not None and time.monotonic() - at < FRESH_S
        member = known if known and fresh else self.place(sid).member
        return self.link(member, Medium.HBM if member.gpus else Medium.DRAM)

    # -- operating ------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Coordinator, nodes and GPU actors by name: the status of each, or `{"problem": line}`.

        One actor call each, side by side; blocks up to `ASK_S`.
        """
        names = {COORDINATOR, *fleet.named(self.config.service.namespace)}
        names.update(name for m in self._members.values() for name in (m.actor, *m.gpus))
        ordered = sorted(names)
        with ThreadPoolExecutor(len(ordered)) as pool:
            found = dict(zip(ordered, pool.map(self._status, ordered), strict=True))
        return {
            "coordinator": found.pop(COORDINATOR),
            "nodes": _starting_with("node-", found.items()),
            "gpus": _starting_with("gpu-", found.items()),
        }

    def nodes(self) -> list[dict[str, Any]]:
        """The status of every node that answers, of hosts and of GPUs; see `status.node`."""
        found = self.status()
        rows = [*found["nodes"].values(), *found["gpus"].values()]
        return [row for row in rows if "problem" not in row]

    def close(self) -> None:
        """Let go. An embedded cluster is stopped, with all that memory holds written to disk.
        Idempotent."""
        owned, self._owned = self._owned, False
        if owned and ray.is_initialized():
            try:
                launch.down(self.config)
            finally:
                ray.shutdown()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _link(self, name: str) -> RayLink:
        with self._lock:
            if name not in self._links:
                self._links[name] = RayLink(name, self.config.service.namespace)
            return self._links[name]

    def _ask(self, verb: str, *args: Any) -> Any:
        if time.monotonic() < self._away_until:
            raise Unreachable("the coordinator did not answer a moment ago")
        try:
            return self._link(COORDINATOR).call(verb, *args, timeout_s=ASK_S)
        except Unreachable:
            self._away_until = time.monotonic() + AWAY_S
            raise

    def _place_alone(self, sid: str, last: str | None, error: Unreachable) -> Placement:
        with self._lock:
            members = dict(self._members)
        if last in members:
            return Placement(sid, members[last], kept=True)
        here = [m for m in members.values() if m.host == self.host] or list(members.values())
        if not here:
            raise error
        chosen = self._alone.choose(
            sid, [Candidate(m.node_id, m.capacity_bytes, m.used_bytes, m.sessions) for m in here]
        )
        return Placement(sid, members[chosen.node_id], kept=False)

    def _status(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._link(name).call("status", timeout_s=ASK_S)
        except TieredKVError as error:
            return {"problem": reason(error)}
        return found


def connect(
    config: Config | None = None, *, address: str | None = None, embedded: bool | None = None,
    wait_s: float = 120.0, **overrides: Any,
) -> Cluster:  # fmt: skip
    """Join the service, and start it where it does not run yet.

    `address`, `embedded`: see `joining.join`; `embedded=False` also forbids starting the service.
    `overrides` are sections, as in `connect(dram={"bytes": "8GiB"})`. Tiers and folders are those
    of the running service; deadlines and the tenant's secret are the caller's. Raises `BadConfig`,
    `Unreachable`, and what `launch.up` raises; nothing is left running then.
    """
    if config is not None and overrides:
        raise BadInput(f"give a config or {', '.join(sorted(overrides))}, not both")
    mine = load(overrides=overrides) if config is None else config
    owned = join(address, embedded)
    try:
        if owned or COORDINATOR not in fleet.named(mine.service.namespace):
            if embedded is False:
                raise Unreachable(
                    f"no service runs in Ray namespace {mine.service.namespace!r} of this cluster; "
                    "start it with `tiered-kv up`"
                )
            launch.ensure(mine, embedded=owned, wait_s=wait_s)
        cluster = Cluster(_shared(mine, wait_s), owned)
        cluster.members()
    except BaseException:
        if owned:
            ray.shutdown()
        raise
    return cluster


def _shared(mine: Config, wait_s: float) -> Config:
    """My deadlines and secret with the media of the service. Waits for a coordinator that is
    being restarted."""
    link, end = RayLink(COORDINATOR, mine.service.namespace), time.monotonic() + wait_s
    while True:
        try:
            theirs: Config = link.call("config", timeout_s=ASK_S)
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(AWAY_S)
        else:
            return replace(theirs, service=mine.service)


def _starting_with(prefix: str, items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if name.startswith(prefix)}
