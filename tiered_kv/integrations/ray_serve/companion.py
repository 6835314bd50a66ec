"""The service beside a replica: started or joined when the replica starts, asked to bring sessions
up when their requests come.

Nothing here delays a request or fails a replica: what goes wrong is counted, with one warning.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tiered_kv.actors import launch
from tiered_kv.config import Config
from tiered_kv.connecting import Cluster, connect
from tiered_kv.errors import TieredKVError, UnknownSession, Unreachable
from tiered_kv.raylink import RayLink
from tiered_kv.settings import load
from tiered_kv.sizes import Size
from tiered_kv.supervise import surviving
from tiered_kv.types import SessionId

logger = logging.getLogger("ray.serve.tiered_kv")  # below Serve's own logger, so that it is seen

FIRST_S, LONGEST_S = 1.0, 60.0
"""Between two tries to join: doubled up to the longest."""
ASK_S = 5.0
MAX_WAITING = 256
"""Sessions that wait to be asked for; beyond that a node is slow, and they are not."""


def serving_config() -> Config:
    """The service that a replica starts where none runs yet: engines have their GPUs to
    themselves, so it keeps no HBM. Raises `BadConfig`."""
    mine = load()
    return replace(mine, hbm=replace(mine.hbm, bytes=Size(0), slab_bytes=Size(0)))


class Companion:
    """One for a replica. `start` and `prefetch` return at once."""

    def __init__(self, ray_node: str, counts: Counter[str]) -> None:
        """`ray_node` is this replica's; `counts` is told what became of each prefetch."""
        self._ray_node = ray_node
        self._counts = counts
        self._node: RayLink | None = None
        self._closed = threading.Event()
        self._waiting = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="kv-companion")

    @property
    def joined(self) -> bool:
        """Whether there is a node of the service on this host."""
        return self._node is not None

    def start(self, then: Callable[[], None] = lambda: None) -> None:
        """Join the service in the background, and start it where it does not run."""
        threading.Thread(target=self._keep, args=(then,), name="kv-join", daemon=True).start()

    def prefetch(self, session: SessionId) -> None:
        """Have the session brought up from its sleep, as far as it is on this host."""
        with self._lock:
            if self._node is None or self._closed.is_set():
                self._counts["prefetch.no_node"] += 1
                return
            if self._waiting >= MAX_WAITING:
                self._counts["prefetch.dropped"] += 1
                return
            self._waiting += 1
        self._pool.submit(self._prefetch, self._node, session)

    def close(self) -> None:
        """Let go; the service stays for others. Idempotent."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prefetch(self, node: RayLink, session: SessionId) -> None:
        outcome = "failed"
        try:
            with surviving("bringing a session up"):
                outcome = self._asked(node, session)
        finally:
            with self._lock:
                self._waiting -= 1
                self._counts[f"prefetch.{outcome}"] += 1

    def _asked(self, node: RayLink, session: SessionId) -> str:
        try:
            node.call("prefetch", session, timeout_s=ASK_S)
        except UnknownSession:
            return "unknown"
        except TieredKVError:
            return "failed"
        return "asked"

    def _keep(self, then: Callable[[], None]) -> None:
        """In a thread: until joined or closed."""
        pause, warned = FIRST_S, False
        while not self._closed.is_set():
            with surviving("joining the service"):
                try:
                    self._node = self._join()
                    logger.info("tiered_kv: %s serves this replica", self._node.actor)
                    then()
                    return
                except TieredKVError as error:
                    if not warned:
                        logger.warning("tiered_kv: %s. Serving without it; trying on.", error)
                    warned = True
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_S)

    def _join(self) -> RayLink:
        """The link to this host's node, after starting what is missing. Blocks for seconds."""
        cluster = connect(serving_config())
        found = self._here(cluster)
        if found is None:  # this Ray node joined after the service was started
            launch.ensure(cluster.config)
            cluster.members()
            found = self._here(cluster)
        if found is None:
            raise Unreachable("no node of the service runs on this host")
        return found

    def _here(self, cluster: Cluster) -> RayLink | None:
        here = [member for member in cluster.members() if member.host == cluster.host]
        own = [member for member in here if member.actor == f"node-{self._ray_node}"]
        return cluster.link((own or here)[0]) if here else None
