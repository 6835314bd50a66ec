"""One node as its client in the same host sees it: a link, its pool mapped here, its layouts."""

import threading
from typing import Any

from tiered_kv.errors import StaleHandle, Unreachable
from tiered_kv.layout import KVLayout
from tiered_kv.pool import Pool
from tiered_kv.tiers.hbm import attach_pool
from tiered_kv.types import Medium
from tiered_kv.wire import Link, Welcome


class Attachment:
    """Talks to one node (of a host or a GPU) and follows it through restarts. Thread-safe."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._introduced: set[bytes] = set()
        self._welcome: Welcome | None = None
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    @property
    def pool(self) -> Pool:
        """The pool of the node as it is now. Raises `Unreachable` before `introduce`."""
        if self._pool is None:
            raise Unreachable("no pool is mapped: the node has not answered yet")
        return self._pool

    @property
    def medium(self) -> Medium | None:
        """What the pool is made of."""
        return self._welcome.medium if self._welcome else None

    @property
    def shm_folder(self) -> str:
        """Where a client of this node proves that it lives."""
        assert self._welcome is not None
        return self._welcome.shm_folder

    def introduce(self, layout: KVLayout) -> None:
        """Agree on a layout; maps the pool. One call the first time. Raises `BadLayout`,
        `Unreachable`."""
        with self._lock:
            if layout.fingerprint in self._introduced:
                return
            welcome: Welcome = self.call("hello", layout)
            if self._welcome is None or welcome.incarnation != self._welcome.incarnation:
                self._drop()
                self._pool = attach_pool(welcome.pool)
                self._welcome = welcome
            self._introduced.add(layout.fingerprint)

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """One call; raises what the verb raises, and `Unreachable`."""
        return self._link.call(verb, *args, timeout_s=self._timeout_s, **kwargs)

    def lost(self, error: Unreachable | StaleHandle) -> None:
        """The node has failed or restarted: map its pool anew at the next `introduce`."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """Unmap the pool. Idempotent."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._introduced.clear()
        self._welcome = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
