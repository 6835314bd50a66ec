"""An engine process's way to the node of its host: joins by itself, loses it, finds it again.

The engine never waits here. While there is no node every call raises `Unreachable` at once; a
thread looks for one in the background. One warning an outage, one line when it is over.
"""

import logging
import threading
from typing import Any

import ray

from tiered_kv import connecting
from tiered_kv.attachment import Attachment, Mapped
from tiered_kv.connecting import Cluster
from tiered_kv.directory import Member
from tiered_kv.errors import TieredKVError, Unreachable
from tiered_kv.integrations.vllm.options import Options
from tiered_kv.layout import KVLayout
from tiered_kv.supervise import surviving
from tiered_kv.wire import Link

logger = logging.getLogger("vllm.tiered_kv")  # below vLLM's own logger, so that it is seen

FIRST_S, LONGEST_S = 0.5, 10.0
"""Between two tries to find a node: doubled up to the longest."""
CLOSE_S = 2.0
"""How long `close` waits for a try that is under way."""

GIVE_UP_AFTER = 6
"""Tries in a row after which the Ray cluster itself is taken for gone: about half a minute."""


class NodeLink:
    """Thread-safe. One a process and service (`shared`): Ray is joined once."""

    def __init__(self, options: Options) -> None:
        """Returns at once; joins in the background."""
        self._options = options
        self._cluster: Cluster | None = None
        self._node: Attachment | None = None
        self._link: Link | None = None  # the one that `_node` talks through
        self._ours = False  # Ray was joined here, and by nobody else in this process
        self._tries = 0  # in a row that failed
        self._up = threading.Event()
        self._wake = threading.Event()
        self._closed = False
        self._warned = False
        self.users = 0
        self.outages = 0
        self._thread = threading.Thread(target=self._keep, name="kv-link", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether there is a node that answered last time."""
        return self._up.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until there is a node; for tests and for the start of an engine."""
        return self._up.wait(seconds)

    def call(self, verb: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """One call to the node. Raises `Unreachable`, at once while there is none, and what the
        verb raises. Blocks; not for the engine's own threads."""
        node = self._get()
        try:
            return node.call(verb, *args, wait_s=wait_s, **kwargs)
        except Unreachable as error:
            self._lost(str(error))
            raise

    def introduce(self, layout: KVLayout) -> Mapped:
        """The node's pool mapped, the layout agreed. Free when it was done before."""
        node = self._get()
        try:
            return node.introduce(layout)
        except Unreachable as error:
            self._lost(str(error))
            raise

    def forget_pool(self, mapped: Mapped | None = None) -> None:
        """The node turned out to be in another life than when its pool was mapped (as `mapped`,
        if that is known): `introduce` maps it anew."""
        if self._node is not None:
            self._node.lost(mapped or self._node.mapped)

    def suspect(self, why: str) -> None:
        """The node takes longer than anybody wants to wait: no calls until it answers again."""
        self._lost(why)

    def give_back(self, reservation: int) -> None:
        """Abort a reservation, now or when the node next answers. Raises nothing."""
        if self._node is not None:
            self._node.give_back(reservation, now=self.up)

    def settle(self) -> None:
        """Abort what is owed. Raises nothing."""
        if self._node is not None and self.up:
            self._node.settle()

    def close(self) -> None:
        """Let go. Idempotent; the service stays."""
        self._closed = True
        self._up.clear()
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._node is not None:
            self._node.close()

    def _get(self) -> Attachment:
        node = self._node
        if node is None or not self._up.is_set():
            raise Unreachable("no node of the service answers on this host")
        return node

    def _lost(self, why: str) -> None:
        if self._up.is_set():
            self._up.clear()
            self.outages += 1
            self._warn(why)
            self._wake.set()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("tiered_kv: %s. The engine goes on without it, and joins again.", why)

    def _keep(self) -> None:
        """In a thread: find the node, and find it again whenever it was lost."""
        pause = FIRST_S
        while not self._closed:
            if self._up.is_set():
                pause = FIRST_S
                self._wake.wait()
                self._wake.clear()
                continue
            with surviving("joining the service") as failure:
                self._join()
            if failure:
                self._warn(failure[0])
            if not self._up.is_set():
                self._wake.wait(pause)
                self._wake.clear()
                pause = min(LONGEST_S, 2 * pause)

    def _join(self) -> None:
        """One try."""
        try:
            cluster = self._connected()
            here = [m for m in cluster.members() if m.host == cluster.host]
            if not here:
                raise Unreachable("the service has no node on this host")
            self._attach(cluster, here[0])
        except TieredKVError as error:
            self._warn(str(error))
            self._tries += 1
            if self._tries >= GIVE_UP_AFTER:
                self._leave_cluster()
            return
        self._tries = 0
        if self._warned:
            self._warned = False
            logger.warning("tiered_kv: joined the node of this host")
        self._up.set()

    def _connected(self) -> Cluster:
        if self._cluster is None:
            self._ours = not ray.is_initialized()
            self._cluster = connecting.connect(
                self._options.config, address=self._options.address, embedded=False
            )
        return self._cluster

    def _attach(self, cluster: Cluster, member: Member) -> None:
        """Talk to this member's node; another one than before when the service was set up anew."""
        link = cluster.link(member)
        if self._node is None or self._link is not link:
            if self._node is not None:
                self._node.close()
            timeout_s = self._options.config.service.call_timeout_s
            self._link, self._node = link, Attachment(link, timeout_s)
        self._node.call("lookup", [])

    def _leave_cluster(self) -> None:
        """The cluster may have been replaced by another: leave it, if it was joined here, so that
        the next try looks for one."""
        self._tries = 0
        if self._cluster is not None and self._ours:
            self._cluster = None
            ray.shutdown()


_LINKS: dict[Options, NodeLink] = {}
_LOCK = threading.Lock()


def shared(options: Options) -> NodeLink:
    """The link of this process for these options; give it back with `leave`."""
    with _LOCK:
        link = _LINKS.get(options)
        if link is None:
            link = _LINKS[options] = NodeLink(options)
        link.users += 1
        return link


def leave(link: NodeLink) -> None:
    """The counterpart of `shared`: the last one closes it."""
    with _LOCK:
        link.users -= 1
        if link.users > 0:
            return
        for options in [o for o, one in _LINKS.items() if one is link]:
            del _LINKS[options]
    link.close()
