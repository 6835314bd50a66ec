"""Real second processes for tests: start one, wait for its word, stop or kill it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered_kv import errors

_ROOT = Path(errors.__file__).parents[1]


@contextmanager
def shm_folder() -> Iterator[Path]:
    """An empty folder of its own in shared memory, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tiered_kv-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Child:
    """A Python process that runs `script` with `args` in `sys.argv[1:]`."""

    def __init__(self, script: str, *args: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )

    def word(self) -> str:
        """The next line that it prints; blocks. Empty when it ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, text: str) -> None:
        """A line for its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
