"""A thread that tells the coordinator that this process lives, and notices when it should not."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tiered_kv.directory import BEAT_S

log = logging.getLogger(__name__)


class Heart:
    """Beats every `BEAT_S` until `stop`."""

    def __init__(self, beat: Callable[[], bool], orphaned: Callable[[str, bool], None]) -> None:
        """`beat` answers True when a later life of this process is known. `orphaned` is called
        once, in this thread, when nobody can want this process any more: with the reason, and
        whether what it holds is still its own to write."""
        self._beat = beat
        self._orphaned = orphaned
        self._parent = os.getppid()
        self._end = threading.Event()
        self._beats = ThreadPoolExecutor(1, thread_name_prefix="kv-beat")
        self.failed = 0
        """Beats that ended with a defect. The heart goes on: without it nobody would be placed
        here any more."""
        self._thread = threading.Thread(target=self._run, name="kv-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; waits for a beat that is under way. Idempotent."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            if os.getppid() != self._parent:
                # Ray's worker ends itself when its raylet dies; this is for one that cannot.
                return self._orphaned("the raylet that started this process is gone", True)
            beat = self._beats.submit(self._beat)
            error = beat.exception()
            if error is not None:
                self.failed += 1
                log.warning("a beat failed", exc_info=error)
            elif beat.result():
                return self._orphaned("a later life of this node has announced itself", False)
            self._end.wait(BEAT_S)
        return None
