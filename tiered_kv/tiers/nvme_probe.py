"""The NVMe self-test: write, read back, compare and time scratch blocks, engine by engine."""

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tiered_kv.checksum import checksum
from tiered_kv.errors import TierBroken
from tiered_kv.tiers import io_engine
from tiered_kv.tiers.io_engine import IoEngine, IoOp
from tiered_kv.tiers.stripes import Stripes

_BLOCK_BYTES = 1 << 20
_BLOCKS = 16
_ROUNDS = 5
SCRATCH_BYTES = _BLOCK_BYTES * _BLOCKS
"""Bytes of the scratch file on each device."""


class Speed(NamedTuple):
    """Median bytes per second of one engine."""

    write: float
    read: float

    @property
    def score(self) -> float:
        """Speed of writing a byte and reading it back."""
        return 1 / (1 / self.write + 1 / self.read)


class _Memory:
    """Two areas of the scratch files' size: what is written, and what is read back."""

    def __init__(self, area_bytes: int) -> None:
        self._map = mmap.mmap(-1, 2 * area_bytes)
        self._view = memoryview(self._map)
        self.capacity_bytes = 2 * area_bytes
        self.address = _address(self._map)
        noise = os.urandom(_BLOCK_BYTES)  # a device that compresses must not look fast
        for at in range(0, self.capacity_bytes, _BLOCK_BYTES):
            self._view[at : at + _BLOCK_BYTES] = noise

    def view(self, slot: int, nbytes: int) -> memoryview:
        return self._view[slot : slot + nbytes]

    def stamp(self) -> None:
        """Make each block of the first area differ from all that was ever written."""
        for at in range(0, self.capacity_bytes // 2, _BLOCK_BYTES):
            self._view[at : at + 16] = os.urandom(16)


def measure(scratch: Stripes, names: Sequence[str], queue_depth: int) -> dict[str, Speed]:
    """Median speeds of the engines that this machine has, measured in turn so that a busy moment
    meets all of them.

    Raises `TierBroken` when bytes come back changed, a transfer fails, or no engine works.
    """
    area = SCRATCH_BYTES * len(scratch.fds)
    times: dict[str, list[tuple[float, float]]] = {}
    refused: list[str] = []
    with ExitStack() as stack:
        memory = _Memory(area)  # unmapped with the last of its views
        engines: list[IoEngine] = []
        for name in names:
            try:
                engines.append(io_engine.make(name, memory, queue_depth))
                stack.callback(engines[-1].close)
            except TierBroken as error:
                refused.append(str(error))
        for turn in range(_ROUNDS):
            for engine in engines if turn % 2 else reversed(engines):
                times.setdefault(engine.name, []).append(_round_trip(scratch, memory, engine))
    if not times:
        raise TierBroken("; ".join(refused))
    return {
        name: Speed(*(area / statistics.median(column) for column in zip(*rows, strict=True)))
        for name, rows in times.items()
    }


def _round_trip(scratch: Stripes, memory: _Memory, engine: IoEngine) -> tuple[float, float]:
    """Seconds to write all scratch blocks, and to read them back."""
    memory.stamp()
    area = memory.capacity_bytes // 2
    started = time.perf_counter()
    _transfer(scratch, memory, engine, write=True)
    written = time.perf_counter()
    for fd in scratch.fds:
        scratch.settle(fd, 0, SCRATCH_BYTES)
    flushed = time.perf_counter()
    _transfer(scratch, memory, engine, write=False)
    ended = time.perf_counter()
    for at in range(0, area, _BLOCK_BYTES):
        wrote, read = (memory.view(at + side, _BLOCK_BYTES) for side in (0, area))
        if checksum(wrote) != checksum(read):
            raise TierBroken(f"{engine.name}: scratch block at {at} came back changed")
    return written - started, ended - flushed


def _transfer(scratch: Stripes, memory: _Memory, engine: IoEngine, *, write: bool) -> None:
    shift = 0 if write else memory.capacity_bytes // 2
    ops = []
    for i in range(_BLOCKS * len(scratch.fds)):
        row, stripe = divmod(i, len(scratch.fds))
        at = shift + i * _BLOCK_BYTES
        view, offset = memory.view(at, _BLOCK_BYTES), row * _BLOCK_BYTES
        ops.append(IoOp(write, scratch.fds[stripe], offset, view, memory.address + at))
    wrong: list[int] = []
    engine.run(ops, lambda _, result: wrong.append(result) if result != _BLOCK_BYTES else None)
    if wrong:
        why = os.strerror(-wrong[0]) if wrong[0] < 0 else f"only {wrong[0]} bytes"
        raise TierBroken(f"{engine.name}: {scratch.files[0]}: {why}")


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
