"""The engine that is always there: a few threads that call preadv and pwritev."""

import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

from tiered_kv.errors import BadInput, TierBroken
from tiered_kv.tiers.io_engine import MAX_IO_BYTES, Before, IoOp, OnDone, PoolMemory, register
from tiered_kv.types import ALIGNMENT


class _Task(NamedTuple):
    op: IoOp
    i: int
    ended: SimpleQueue[tuple[int, int]]


class _Flight:
    """What one caller has in flight."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.size = 0

    def land(self) -> tuple[int, int]:
        """Wait for the next op that ends: its number and result."""
        result = self.ended.get()
        self.size -= 1
        return result


class ThreadsEngine:
    """`queue_depth` threads, one op each at a time. See `IoEngine` for the contract."""

    name = "threads"

    def __init__(self, memory: PoolMemory, queue_depth: int) -> None:
        if queue_depth < 1:
            raise BadInput(f"queue_depth must be at least 1, not {queue_depth}")
        self._depth = queue_depth
        self._todo: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"io-{i}", daemon=True)
            for i in range(queue_depth)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, ops: Sequence[IoOp], on_done: OnDone, before: Before | None = None) -> None:
        with self._idle:
            if self._closed:
                raise TierBroken("the I/O engine is closed")
            self._running += 1
        try:
            self._run(ops, on_done, before)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def describe(self) -> str:
        return f"threads, {self._depth} of them"

    def close(self) -> None:
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._running)
            threads, self._threads = self._threads, []
        for _ in threads:
            self._todo.put(None)
        for thread in threads:
            thread.join()

    def _run(self, ops: Sequence[IoOp], on_done: OnDone, before: Before | None) -> None:
        # Twice the depth: each thread finds its next op without waiting for us, and a batch of
        # another caller still waits for few of ours.
        most = 2 * self._depth
        flight = _Flight()
        try:
            for i, op in enumerate(ops):
                if before is not None and not before(i):
                    continue
                self._todo.put(_Task(op, i, flight.ended))
                flight.size += 1
                while flight.size >= most or not flight.ended.empty():
                    on_done(*flight.land())
            while flight.size:
                on_done(*flight.land())
        finally:
            _drain(flight)  # nothing to do unless a callback or a signal handler raised

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            ended, i, result = task.ended, task.i, _transfer(task.op)
            del task  # its view would keep the pool's mapping from being closed while we wait
            ended.put((i, result))


def _drain(flight: _Flight) -> None:
    """Wait for all that is in flight, whatever interrupts: its buffers are still written to."""
    try:
        while flight.size:
            flight.land()
    finally:
        if flight.size:  # a signal handler raised once more
            _drain(flight)


def _transfer(op: IoOp) -> int:
    """Bytes moved, or a negative errno."""
    move = os.pwritev if op.write else os.preadv
    size = op.view.nbytes
    done = 0
    try:
        while done < size:
            rest = op.view if not done and size <= MAX_IO_BYTES else op.view[done:][:MAX_IO_BYTES]
            step = move(op.fd, [rest], op.offset + done)
            done += step
            if step == 0 or done % ALIGNMENT:  # the end of the file; O_DIRECT cannot go on there
                break
    except OSError as error:
        return -(error.errno or 1)
    return done


register(ThreadsEngine.name, ThreadsEngine)
