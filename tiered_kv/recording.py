"""A node's own trace, written as it runs: which blocks were asked for, and when. No content."""

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TextIO

from tiered_kv.recorded import Recorder
from tiered_kv.types import Run

MOST_KEYS = 1_000_000
"""Keys that may wait to be written, 16 MB and what Python adds. Beyond that requests are left out,
and counted."""


class Recording:
    """Takes requests on the node's loop and writes them in a thread, one call at a time.

    A file that is there already is left alone: the next free name of `FILE`, `FILE.1`, `FILE.2`
    is taken. A disk that is full or fails ends the recording and nothing else.
    """

    def __init__(self, path: str, remark: Callable[[str], None]) -> None:
        """An empty `path` records nothing. `remark` notes a sentence for `status`."""
        self.on = bool(path)
        self.requests = self.left_out = 0
        self.path = path
        self._remark = remark
        self._began_s = time.monotonic()
        self._waiting: list[tuple[float, str, Run, int]] = []
        self._keys = 0
        self._file: TextIO | None = None
        self._recorder: Recorder | None = None
        self._lock = threading.Lock()  # the last write may still run when the node stops

    def note(self, verb: str, run: Run, block_bytes: int) -> None:
        """A request for the blocks of a run. Does not block."""
        if not self.on:
            return
        if self._keys + len(run) > MOST_KEYS:
            self.left_out += 1
            return
        self._keys += len(run)
        self._waiting.append((time.monotonic() - self._began_s, verb, run, block_bytes))

    def take(self) -> list[tuple[float, str, Run, int]]:
        """What waits, for `write`. On the node's loop."""
        taken, self._waiting, self._keys = self._waiting, [], 0
        return taken

    def write(self, taken: list[tuple[float, str, Run, int]]) -> str:
        """Write what was taken; why the recording ended, or nothing. Blocks."""
        try:
            with self._lock:
                recorder = self._recorder or self._open()
                for at_s, verb, run, block_bytes in taken:
                    recorder.write(at_s, run, block_bytes, verb)
                assert self._file is not None
                self._file.flush()
        except OSError as error:
            return f"recording to {self.path} ended after {self.requests} requests: {error}"
        self.requests += len(taken)
        return ""

    def end(self, why: str) -> None:
        """Record no more. On the node's loop."""
        self.on = False
        self.take()
        self._remark(why)

    def close(self) -> None:
        """Close the file. Blocks; raises nothing. Idempotent."""
        with self._lock:
            file, self._file, self._recorder = self._file, None, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._remark(f"recording to {self.path} could not be completed: {error}")

    def _open(self) -> Recorder:
        for number in count():
            path = Path(f"{self.path}.{number}" if number else self.path)
            try:
                self._file = path.open("x", encoding="utf-8")
            except FileExistsError:
                continue
            self.path = str(path)
            break
        assert self._file is not None
        self._recorder = Recorder(self._file)
        return self._recorder
