"""Ends leases whose bytes have been copied, a little later.

Nobody waits for the end of a lease, and the call costs both processes about a millisecond of CPU.
Made at once, it falls into the very step that computes the first token: on two cores, each bound
to a thread of the engine, that step took 2 to 10 times as long.
"""

import threading
import time
from collections.abc import Callable

from tiered_kv.supervise import surviving

LATER_S = 0.25
"""Short against the time of a lease (30 s), long against the step that follows a load."""


class Releaser:
    """One thread, none while there is nothing to release. Thread-safe."""

    def __init__(self, release: Callable[[int], object]) -> None:
        """`release(lease)` ends one and raises nothing that anybody needs to know."""
        self._release = release
        self._leases: list[int] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def later(self, lease: int) -> None:
        """End a lease soon. Does not wait."""
        with self._changed:
            self._leases.append(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kv-release", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """From now on end leases at once. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        end = time.monotonic() + LATER_S
        while True:
            with self._changed:
                while not self._closed and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                leases, self._leases = self._leases, []
                if not leases:
                    self._thread = None
                    return
            for lease in leases:
                with surviving("ending a lease"):
                    self._release(lease)
            end = time.monotonic() + LATER_S
