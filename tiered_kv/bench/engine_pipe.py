"""Processes that `bench engine` starts and asks: a JSON line in, a JSON line out.

Each has a session of its own, so that Ctrl-C reaches only the parent, which then ends all of them.
A process also ends by itself when its parent is gone: its standard input ends.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tiered_kv.errors import TieredKVError
from tiered_kv.supervise import surviving

STOP = "stop"
STOP_S = 60.0
TAIL_LINES = 4


class EngineFailed(TieredKVError):
    """A process of the benchmark failed, ended, or did not answer. The message has its last words
    and the file with the others."""


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until standard input ends or `stop` comes. What handlers print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        answer: dict[str, Any] = {"value": None}
        if verb != STOP:
            with surviving(verb) as failure:
                answer["value"] = handlers[verb](**asked)
            if failure:
                answer = {"error": failure[0]}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers)
        if verb == STOP:
            return


class Child:
    """A process that runs `serve`, from the parent's side. Leaving it as a context ends it."""

    def __init__(
        self, name: str, python: Path, module: str, environ: Mapping[str, str], log: Path
    ) -> None:
        """Start `python -m module`; its output goes to `log`. Raises `OSError`."""
        self.name = name
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module], env=dict(environ), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._buffer = b""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, verb: str, timeout_s: float = 900.0, **arguments: Any) -> Any:
        """What the handler returned. Blocks. Raises `EngineFailed`; a process that did not answer
        in time is in an unknown state: end it."""
        assert self._process.stdin is not None
        line = json.dumps({"verb": verb, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        answer = json.loads(self._line(verb, time.monotonic() + timeout_s))
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer["value"]

    @property
    def pid(self) -> int:
        """Of the process; its session has the same number."""
        return self._process.pid

    def close(self, patience_s: float = STOP_S) -> None:
        """Ask it to end, and end what is left of its session. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._process.poll() is None:
                self.ask(STOP, patience_s)
                self._process.wait(patience_s)
        except (EngineFailed, subprocess.TimeoutExpired):
            pass  # it is ended below
        finally:  # also when a Ctrl-C comes meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _line(self, verb: str, end: float) -> bytes:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"did not answer {verb!r} in time")
            piece = os.read(out, 1 << 16)
            if not piece:
                raise self._failed(f"ended while it was asked {verb!r}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _failed(self, what: str) -> EngineFailed:
        lines = self._log.read_text(errors="replace").splitlines()
        words = " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())
        return EngineFailed(f"{self.name} {what} ({words})")
