"""The bare medium: the shortest loops that move the same bytes with no tier around them."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from tiered_kv.bench.contest import Contender, Pass, timed
from tiered_kv.bench.io_memory import SharedMemory
from tiered_kv.errors import TierBroken
from tiered_kv.folder import medium_error
from tiered_kv.tiers.uring import Ring

THREADS = (4, 8)
DEPTHS = (8, 32)
FIO_DEPTH = 128
"""One buffer each: enough for fio to use as much of the memory as the others do."""


class RawFile:
    """A preallocated file that bytes of `memory` go to and come from, at equal offsets."""

    def __init__(self, file: Path, memory: SharedMemory, nbytes: int) -> None:
        self._file = file
        self._memory = memory
        self._nbytes = nbytes
        self._stack = ExitStack()
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            self._stack.callback(os.close, self._fd)
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self._stack.close()
            raise medium_error(error, file, "open with O_DIRECT and allocate") from error
        self._rings: dict[int, tuple[Ring, int]] = {}
        self._pools = {n: self._stack.enter_context(ThreadPoolExecutor(n)) for n in THREADS}
        for depth in DEPTHS:
            self._add_ring(depth)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def contenders(self, write: bool, block_bytes: int) -> Iterator[Contender]:
        """Every way to move the file once, in blocks of this size."""
        for n in THREADS:
            work = partial(self._by_threads, n, write, block_bytes)
            yield Contender(f"raw-threads-{n}", False, partial(timed, work))
        for depth in self._rings:
            work = partial(self._by_ring, depth, write, block_bytes)
            yield Contender(f"raw-uring-{depth}", False, partial(timed, work))
        if fio := shutil.which("fio"):
            yield Contender("fio", False, partial(self._by_fio, fio, write, block_bytes))

    def _by_threads(self, n: int, write: bool, block_bytes: int) -> None:
        move = os.pwritev if write else os.preadv
        numbers = itertools.count()

        def work() -> None:
            while (at := next(numbers) * block_bytes) < self._nbytes:
                moved = move(self._fd, [self._memory.view(at, block_bytes)], at)
                if moved != block_bytes:
                    raise TierBroken(f"{self._file}: {moved} of {block_bytes} bytes at {at}")

        for future in [self._pools[n].submit(work) for _ in range(n)]:
            future.result()

    def _by_ring(self, depth: int, write: bool, block_bytes: int) -> None:
        ring, buffer = self._rings[depth]
        at = ended = 0
        while ended < self._nbytes:
            while at < self._nbytes and ring.busy < depth:
                address = self._memory.address + at
                ring.push(write, self._fd, at, address, block_bytes, at, buffer)
                at += block_bytes
            ring.enter(1)
            for tag, result in ring.reap():
                if result != block_bytes:
                    raise TierBroken(f"{self._file}: result {result} at {tag}")
                ended += block_bytes

    def _by_fio(self, fio: str, write: bool, block_bytes: int) -> Pass:
        way = "write" if write else "read"
        depth = min(FIO_DEPTH, self._nbytes // block_bytes)
        command = [
            *(fio, "--name=raw", f"--filename={self._file}", f"--rw={way}", "--direct=1"),
            *(f"--bs={block_bytes}", f"--size={self._nbytes}", "--overwrite=1"),
            *("--ioengine=io_uring", f"--iodepth={depth}", "--fixedbufs=1", "--thread"),
            *(f"--iomem=mmapshared:{self._memory.path}", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TierBroken(f"fio: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100  # of its runtime, which is in milliseconds
        return Pass(self._nbytes / job[way]["bw_bytes"], job[way]["runtime"] / 1000 * busy)

    def _add_ring(self, depth: int) -> None:
        try:
            ring = Ring(depth)
        except OSError:
            return  # this kernel has none: the threads are the measure
        self._stack.callback(ring.close)
        size = min(self._memory.capacity_bytes, 1 << 30)
        registered = ring.register(self._memory.address, size, size) == 0
        self._rings[depth] = (ring, 0 if registered and self._nbytes <= size else -1)
