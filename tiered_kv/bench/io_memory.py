"""The memory that all contenders of a leg move bytes from and into.

One file in /dev/shm for all, fio included: how its pages lie in physical memory alone changes the
speed of a virtual disk by a factor of two (measured: runs of 32 KiB against runs of 1 MiB).
"""

import ctypes
import mmap
import os
import tempfile
from pathlib import Path
from typing import Self

from tiered_kv.types import ALIGNMENT

SHM = Path("/dev/shm")


class SharedMemory:
    """`capacity_bytes` of noise, different in each page: nothing on the way can compress it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._file = tempfile.NamedTemporaryFile(dir=SHM, prefix="bench-io-")  # noqa: SIM115
        os.posix_fallocate(self._file.fileno(), 0, capacity_bytes + ALIGNMENT)
        self._map = mmap.mmap(self._file.fileno(), capacity_bytes + ALIGNMENT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        fill(memoryview(self._map)[:capacity_bytes])

    @property
    def path(self) -> str:
        """Where another program can map it."""
        return self._file.name

    def view(self, slot: int, nbytes: int) -> memoryview:
        """See `PoolMemory`."""
        return memoryview(self._map)[slot : slot + nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # removes the name; the mapping goes with its last view


def fill(memory: memoryview) -> None:
    """Write the noise. O(bytes)."""
    noise = memoryview(bytearray(os.urandom(1 << 20)))
    for at in range(0, len(memory), len(noise)):
        part = noise[: len(memory) - at]
        for page in range(0, len(part), ALIGNMENT):
            part[page : page + 8] = (at + page).to_bytes(8, "little")
        memory[at : at + len(part)] = part
