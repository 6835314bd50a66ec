"""The engine with the least CPU a byte: io_uring with registered buffers, a pool of rings."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence

from tiered_kv.errors import BadInput, TierBroken
from tiered_kv.tiers.io_engine import MAX_IO_BYTES, Before, IoOp, OnDone, PoolMemory, register
from tiered_kv.tiers.uring import Ring
from tiered_kv.types import ALIGNMENT

CHUNK_BYTES = 1 << 30
"""The kernel's limit for one registered buffer; an op across two of them goes unregistered."""

MAX_RINGS = 8
"""Callers beyond this many wait for a ring."""


class UringEngine:
    """One ring of `queue_depth` a running caller. See `IoEngine` for the contract.

    Raises `TierBroken` where the kernel, a sandbox or a limit refuses io_uring. Where the pool
    cannot be registered (an ordinary user's memlock limit is 8 MiB) ops go through the plain
    opcodes: a little more CPU, and `describe` says so.
    """

    name = "io_uring"

    def __init__(self, memory: PoolMemory, queue_depth: int) -> None:
        if queue_depth < 1:
            raise BadInput(f"queue_depth must be at least 1, not {queue_depth}")
        self._memory = (memory.address, memory.capacity_bytes)
        self._depth = queue_depth
        self._lock = threading.Condition()
        self._free: list[Ring] = []
        self._rings = 0
        self._most = MAX_RINGS
        self._closed = False
        self._plain_because = ""
        self._first = self._new_ring()
        self._free.append(self._first)
        self._rings = 1

    def run(self, ops: Sequence[IoOp], on_done: OnDone, before: Before | None = None) -> None:
        with self._ring() as ring:
            try:
                self._pump(ring, ops, on_done, before)
            finally:
                _drain(ring)  # nothing to do unless a callback or a signal handler raised

    def describe(self) -> str:
        if self._plain_because:
            return f"io_uring, depth {self._depth}, plain buffers ({self._plain_because})"
        return f"io_uring, depth {self._depth}, registered buffers"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: len(self._free) == self._rings)
            for ring in self._free:
                ring.close()
            self._free.clear()
            self._rings = 0

    def _pump(
        self, ring: Ring, ops: Sequence[IoOp], on_done: OnDone, before: Before | None
    ) -> None:
        todo = iter(range(len(ops)))
        moved: dict[int, int] = {}  # bytes that ops which stopped short have moved already
        while True:
            # The device gets its next ops before we spend time on those that ended.
            ended = self._sort(ring, ops, ring.reap(), moved)
            self._fill(ring, ops, todo, before)
            if ring.unsubmitted:
                ended += _refused(ring, ring.enter(0))
            for i, result in ended:
                on_done(i, result)
            if not ended:
                if not ring.busy:
                    return
                for i, result in _refused(ring, ring.enter(1)):
                    on_done(i, result)

    def _fill(
        self, ring: Ring, ops: Sequence[IoOp], todo: Iterator[int], before: Before | None
    ) -> None:
        """Push ops up to the depth. With `before`, each is submitted before the next is hashed."""
        while ring.busy < self._depth:
            i = next(todo, None)
            if i is None:
                return
            if before is None:
                self._push(ring, ops[i], i, 0)
            elif before(i):
                self._push(ring, ops[i], i, 0)
                ring.enter(0)  # what it refuses stays queued for the caller's own enter

    def _push(self, ring: Ring, op: IoOp, i: int, done: int) -> None:
        address = op.address + done
        nbytes = min(op.view.nbytes - done, MAX_IO_BYTES)
        buffer = self._buffer(address, nbytes) if ring.registered else -1
        ring.push(op.write, op.fd, op.offset + done, address, nbytes, i, buffer)

    def _buffer(self, address: int, nbytes: int) -> int:
        """Index of the registered buffer that holds these bytes; -1 when none does."""
        start, size = self._memory
        at = address - start
        if at < 0 or at + nbytes > size:
            return -1
        first = at // CHUNK_BYTES
        return first if first == (at + nbytes - 1) // CHUNK_BYTES else -1

    def _sort(
        self,
        ring: Ring,
        ops: Sequence[IoOp],
        reaped: list[tuple[int, int]],
        moved: dict[int, int],
    ) -> list[tuple[int, int]]:
        """The ops that have ended; those that stopped short are pushed again."""
        ended = []
        for i, result in reaped:
            done = moved.pop(i, 0) + max(result, 0)
            short = result > 0 and done < ops[i].view.nbytes and not done % ALIGNMENT
            if short or result == -errno.EINTR:
                moved[i] = done
                self._push(ring, ops[i], i, done)
            else:
                ended.append((i, result if result < 0 else done))
        return ended

    @contextlib.contextmanager
    def _ring(self) -> Iterator[Ring]:
        """A ring for one caller; made when none is free, awaited when there are enough."""
        with self._lock:
            while not self._free and not self._closed:
                self._add_ring()
            if self._closed:
                raise TierBroken("the I/O engine is closed")
            ring = self._free.pop()
        try:
            yield ring
        finally:
            with self._lock:
                self._free.append(ring)
                self._lock.notify_all()

    def _add_ring(self) -> None:
        """Make a further ring, or wait for one when there are enough or the kernel refuses."""
        if self._rings < self._most:
            try:
                self._free.append(self._new_ring())
                self._rings += 1
                return
            except TierBroken:
                self._most = self._rings
        self._lock.wait()

    def _new_ring(self) -> Ring:
        """A ring with the pool registered, shared with the first one where the kernel can."""
        try:
            ring = Ring(self._depth)
        except OSError as error:
            raise TierBroken(f"io_uring is refused: {error.strerror}") from error
        result = ring.clone_buffers(self._first) if self._rings else -errno.EINVAL
        if result < 0:
            result = ring.register(*self._memory, CHUNK_BYTES)
        ring.registered = result == 0
        if result < 0:
            self._plain_because = f"cannot pin the pool: {os.strerror(-result)}"
        return ring


def _refused(ring: Ring, result: int) -> list[tuple[int, int]]:
    """Ops that cannot be submitted at all, with the errno; none in the usual case.

    EINTR: the next round submits. Short of memory: so it does after something has ended; when
    nothing is in flight, nothing will, and the ops fail.
    """
    if result >= 0 or result == -errno.EINTR:
        return []
    if ring.in_flight:
        time.sleep(0.0005)
        return []
    return [(tag, result) for tag in ring.take_back()]


def _drain(ring: Ring) -> None:
    """Wait for all that is in flight, whatever interrupts: its buffers are still written to."""
    ring.take_back()
    try:
        while ring.in_flight:
            if ring.enter(1) < 0:
                time.sleep(0.0005)
            ring.reap()
    finally:
        if ring.in_flight:  # a signal handler raised once more
            _drain(ring)


register(UringEngine.name, UringEngine)
