"""The node inside an actor process: starting, running or stopped, and one line that says which.

A start that fails is tried again, for ever and ever more slowly. The first seconds of it are for a
predecessor that was killed and has not quite died: it still holds the lock of the folder. What
fails after that is a mistake or a foreign service; callers get the error, and the node heals by
itself when the cause goes away.
"""

import gc
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tiered_kv.errors import FolderInUse, TieredKVError, Unreachable
from tiered_kv.node import Node
from tiered_kv.runner import Runner

GRACE_S = 10.0
"""How long a locked folder counts as a predecessor's that is still dying."""
RETRY_S = (0.5, 1.0, 2.0, 5.0)
SWITCH_S = 0.0005
GC_YOUNG = 20_000


def tune() -> None:
    """What a process that moves bytes and decides wants of Python and torch."""
    import torch

    torch.set_num_threads(1)  # or a copy on busy cores waits for threads that get no core
    # A copy takes the GIL again between its pieces, each time behind whoever computes in Python:
    # 2 MiB copies beside a busy thread went from 0.4 to 3 GB/s with this.
    sys.setswitchinterval(SWITCH_S)
    # Blocks are many, live long and are freed by count; looking for cycles among them again and
    # again cost a tenth of all decisions.
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 100)


class Life:
    """Starts a node in the background. Safe from any thread."""

    def __init__(self, build: Callable[[], Awaitable[Node]], grace_s: float = GRACE_S) -> None:
        """Nothing happens before `start`."""
        self._build = build
        self._grace_s = grace_s
        self._began = time.monotonic()
        self._failed: TieredKVError | None = None
        self._progress = (0, 0)
        self._ending = threading.Event()
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="kv-start")
        self._starting: Future[Runner | None] | None = None

    def start(self) -> None:
        """Returns at once; `runner` tells how it goes. Call it once."""
        self._starting = self._starter.submit(self._start)

    def progress(self, done: int, total: int) -> None:
        """Hears how many bytes of memory or disk are prepared; see `assemble.host`."""
        self._progress = done, total

    @property
    def runner(self) -> Runner:
        """The running node. Raises the error of a start that fails again and again, and
        `Unreachable` while it is starting or when it has ended. Does not block."""
        if self._ending.is_set():
            raise Unreachable("the node has been stopped")
        if self._starting is None or not self._starting.done():
            if self._failed is not None:
                raise self._failed
            seconds, (done, total) = time.monotonic() - self._began, self._progress
            share = f", {100 * done // total} % prepared" if total else ""
            raise Unreachable(f"the node has been starting for {seconds:.0f} s{share}")
        error = self._starting.exception()
        if error is not None:
            raise Unreachable(f"the node cannot start: {type(error).__name__}: {error}")
        runner = self._starting.result()
        assert runner is not None  # only an ending start gives none
        return runner

    def stop(self, flush: bool = True) -> None:
        """Stop starting or running. Blocks while memory is written below. Idempotent."""
        self._ending.set()
        self._starter.shutdown(wait=True)
        if self._starting is not None and self._starting.exception() is None:
            runner = self._starting.result()
            if runner is not None:
                runner.stop(flush)

    def _start(self) -> Runner | None:
        tune()
        tries = 0
        while not self._ending.is_set():
            try:
                return Runner(self._build)
            except TieredKVError as error:
                dying = isinstance(error, FolderInUse) and self._age() < self._grace_s
                self._failed = None if dying else error
            self._ending.wait(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1
        return None

    def _age(self) -> float:
        return time.monotonic() - self._began
