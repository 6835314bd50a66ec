"""One node as its client in the same host sees it: a link, its pool mapped here, its layouts."""

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tiered_kv.errors import StaleHandle, Unreachable
from tiered_kv.generations import Generations
from tiered_kv.layout import KVLayout
from tiered_kv.owed import Owed
from tiered_kv.pool import Pool
from tiered_kv.tiers.hbm import attach_pool
from tiered_kv.wire import Link, Welcome, life_of

if TYPE_CHECKING:
    import torch


class Mapped(NamedTuple):
    """One life of a node, and its pool as it is mapped here.

    `tensor` and `generations` stay readable for who holds this, also when another thread finds
    that the node has ended.
    """

    welcome: Welcome
    pool: Pool
    tensor: "torch.Tensor"
    generations: Generations

    def check(self, handle: int) -> None:
        """Raise `StaleHandle` when a handle's slots are of another life's pool than this one.

        1. The pool of life 7 is mapped.  2. The node is killed and starts as life 8; somebody else
        introduces the same layout.  3. Life 8 answers our call with slots of its own pool.
        """
        if life_of(handle) != self.welcome.life:
            raise StaleHandle("the node has restarted, and its new pool is not mapped here yet")


class Attachment:
    """Talks to one node (of a host or a GPU) and follows it through restarts. Thread-safe."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        """`timeout_s` is what a call may take beyond the time for which its verb may wait."""
        self._link = link
        self._timeout_s = timeout_s
        self._introduced: set[bytes] = set()
        self._mapped: Mapped | None = None
        self._owed = Owed()
        self._lock = threading.Lock()

    @property
    def mapped(self) -> Mapped | None:
        """The pool as it is mapped at this moment."""
        return self._mapped

    def introduce(self, layout: KVLayout) -> Mapped:
        """Agree on a layout and map the pool. One call the first time. Raises `BadLayout`,
        `Unreachable`."""
        with self._lock:
            mapped = self._mapped
            if mapped is not None and layout.fingerprint in self._introduced:
                return mapped
            welcome: Welcome = self.call("hello", layout)
            if mapped is None or mapped.welcome.life != welcome.life:
                self._drop()
                try:
                    pool = attach_pool(welcome.pool)
                except StaleHandle as error:
                    raise Unreachable(f"the node ended while it was joined: {error}") from error
                mapped = self._mapped = Mapped(welcome, pool, pool.tensor, pool.generations)
            self._introduced.add(layout.fingerprint)
            return mapped

    def call(self, verb: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """One call; raises what the verb raises, and `Unreachable`. `wait_s` is for how long the
        verb may wait before it answers."""
        return self._link.call(verb, *args, timeout_s=self._timeout_s + wait_s, **kwargs)

    def give_back(self, reservation: int, now: bool) -> None:
        """Abort a reservation, at once or when the node next answers. Raises nothing."""
        self._owed.add(reservation)
        if now:
            self.settle()

    def settle(self) -> None:
        """Abort what is owed, now that the node answers. No call when there is nothing."""
        self._owed.settle(self.call)

    def lost(self, mapped: Mapped | None) -> None:
        """The node failed or restarted while this was mapped: map it anew at the next
        `introduce`. Harmless when that has happened meanwhile."""
        with self._lock:
            if mapped is self._mapped:
                self._drop()

    def close(self) -> None:
        """Unmap the pool. Idempotent."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._introduced.clear()
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.pool.close()
