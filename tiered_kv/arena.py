"""An arena: slots in one shared memory file that all processes of a host may map.

The owner creates it and proves by the file's flock that it lives; others attach by name. Bytes
are addressed by slot, an offset into the data. Nothing here knows which slots are in use.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiered_kv import liveness, pages
from tiered_kv.arena_file import (
    SHM_FOLDER,
    SUFFIX,
    Header,
    address_of,
    allocate,
    arena_name,
    arena_path,
    map_file,
)
from tiered_kv.errors import BadInput, DoesNotFit, StaleHandle
from tiered_kv.generations import Generations
from tiered_kv.memory import check_fits, may_lock_any, memlock_bytes
from tiered_kv.pages import Progress
from tiered_kv.pool import PoolHandle
from tiered_kv.types import ALIGNMENT

if TYPE_CHECKING:
    import torch

__all__ = ["PIN_CHUNK_BYTES", "SHM_FOLDER", "Arena", "arena_name", "sweep_leftovers"]

PIN_CHUNK_BYTES = 64 << 30
"""Of one cudaHostRegister call: larger ones fail on some systems. A CUDA copy must not cross from
one registration into the next; slots do not when slabs are powers of two."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process


class Arena:
    """Made by `create` or `attach`. Safe from any thread; `close` waits for nobody."""

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Header,
        mapping: mmap.mmap,
        alive: liveness.Alive | None,
    ) -> None:
        """Use `create` or `attach`."""
        self.folder = folder
        self.name = name
        self.node_id = header.node_id
        self.incarnation = header.incarnation
        self.capacity_bytes = header.capacity_bytes
        self.address = address_of(mapping) + header.data_offset
        """Of the data in this process: for io_uring, RDMA and CUDA. Void after `close`."""
        self._data_offset = header.data_offset
        self._map: mmap.mmap | None = mapping
        self._generations: Generations | None = Generations(
            np.frombuffer(mapping, np.uint64, header.words, ALIGNMENT)
        )
        self._alive = alive
        self._tensor: torch.Tensor | None = None
        self._pinned: list[int] = []
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        capacity_bytes: int,
        *,
        node_id: str,
        incarnation: int,
        prefault: bool = True,
        progress: Progress | None = None,
        numa_node: int | None = None,
        covers_bytes: int | None = None,
    ) -> "Arena":
        """A new arena of zeros, visible to others only when it is complete.

        Blocks for about 0.4 s a GiB with small pages, a tenth of it with huge ones; `progress` is
        told bytes. Without `prefault` pages are reserved but made at first use. `covers_bytes` is
        for pools that have their data elsewhere (`tiers.hbm`).

        Raises `DoesNotFit` before anything is allocated, or when memory goes away meanwhile;
        `BadInput` for a bad value, a folder of somebody else or a name that a live process has.
        Whatever is raised, and even when this process is killed: no file is left.
        """
        covers = capacity_bytes if covers_bytes is None else covers_bytes
        header = Header(node_id, incarnation, capacity_bytes, covers)
        path = arena_path(liveness.private_folder(folder), name)
        check_fits(folder, header.file_bytes, f"an arena of {capacity_bytes} bytes")
        with ExitStack() as undo:
            alive = liveness.Alive(folder)
            undo.callback(alive.close)
            mapping = allocate(
                alive.fd,
                header.file_bytes,
                touch=prefault,
                progress=progress,
                numa_node=numa_node,
            )
            mapping[: len(header.pack())] = header.pack()
            arena = cls(folder, name, header, mapping, alive)
            undo.callback(arena.close)
            alive.publish(path)
            undo.pop_all()
        return arena

    @classmethod
    def attach(cls, folder: Path, name: str, *, prefault: bool = False) -> "Arena":
        """Map another process's arena, read/write. `prefault` fills this process's page table at
        once instead of at first use.

        Raises `StaleHandle` when it is gone or its owner is dead, `BadInput` when the file is
        not an arena of this release.
        """
        path = arena_path(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StaleHandle(f"arena {name!r} cannot be opened: {error.strerror}") from error
        try:
            header = Header.load(path, fd)
            mapping = map_file(fd, header.file_bytes)
        finally:
            os.close(fd)
        if not liveness.is_locked(path):
            raise StaleHandle(f"arena {name!r} was left over by a process that is dead")
        pages.advise_huge(address_of(mapping), header.file_bytes)
        arena = cls(folder, name, header, mapping, None)
        if prefault:
            pages.prefault(arena.address, arena.capacity_bytes)
        return arena

    @property
    def generations(self) -> Generations:
        """The shared table of what the slots carry."""
        if self._generations is None:
            raise self._closed()
        return self._generations

    @property
    def tensor(self) -> "torch.Tensor":
        """The data as a flat uint8 tensor, `[capacity_bytes]`, sharing memory. Imports torch."""
        with self._lock:
            if self._map is None:
                raise self._closed()
            if self._tensor is None:
                import torch

                # Not torch.frombuffer: it lets the buffer go, so that `close` would unmap memory
                # that the tensor still points to. The array keeps the mapping.
                data = np.frombuffer(self._map, np.uint8, self.capacity_bytes, self._data_offset)
                self._tensor = torch.from_numpy(data)
            return self._tensor

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The bytes of a slot, writable. Raises `BadInput` outside of the arena."""
        mapping = self._map
        if mapping is None:
            raise self._closed()
        if slot < 0 or nbytes < 0 or slot + nbytes > self.capacity_bytes:
            raise BadInput(f"slot {slot} with {nbytes} bytes is not in 0..{self.capacity_bytes}")
        start = self._data_offset + slot
        return memoryview(mapping)[start : start + nbytes]

    def pin(self) -> str:
        """Register the data with CUDA, so that copies run at full speed beside the CPU.

        For this process only: each process that copies pins for itself. Takes seconds to minutes
        a 100 GiB without the GIL, so call it from a thread: the arena can be used meanwhile, with
        slower copies. Returns what was done. Raises `DoesNotFit`, with nothing pinned, when CUDA
        refuses.
        """
        import torch

        if not torch.cuda.is_available():
            return "not pinned: there is no CUDA on this machine"
        with self._lock:
            if self._map is None:
                raise self._closed()
            if not self._pinned:
                self._register()
            return f"pinned {self.capacity_bytes} bytes in {len(self._pinned)} registrations"

    def handle(self) -> PoolHandle:
        """For `tiers.hbm.attach_pool` in another process."""
        return PoolHandle("shm", str(self.folder), self.name, self.capacity_bytes)

    def owner_is_alive(self) -> bool:
        """Whether the process that created it lives. One flock."""
        return liveness.is_locked(arena_path(self.folder, self.name))

    def describe(self) -> str:
        """One line about what this memory is."""
        kind = "pinned shared memory" if self._pinned else "shared memory"
        return f"{kind}, {self.capacity_bytes} bytes in {arena_path(self.folder, self.name)}"

    def close(self) -> None:
        """Unpin, unmap and, as the creator, remove the file. Idempotent.

        Views and tensors that still exist stay valid and keep the memory until they go; the name
        and the proof of life end here.
        """
        with self._lock:
            self._unregister()
            mapping, self._map = self._map, None
            self._generations = self._tensor = None
            if self._alive is not None:
                self._alive.close()
            if mapping is not None:
                with suppress(BufferError):  # then it unmaps itself together with its last view
                    mapping.close()

    def _register(self) -> None:
        import torch

        runtime = torch.cuda.cudart()
        for start in range(0, self.capacity_bytes, PIN_CHUNK_BYTES):
            nbytes = min(PIN_CHUNK_BYTES, self.capacity_bytes - start)
            code = int(runtime.cudaHostRegister(self.address + start, nbytes, _PORTABLE))
            if code != 0:
                self._unregister()
                limit = "any amount" if may_lock_any() else f"RLIMIT_MEMLOCK {memlock_bytes()}"
                raise DoesNotFit(
                    f"CUDA refused to pin {nbytes} bytes at {start} of {self.capacity_bytes} "
                    f"(cudaError {code}); this process may lock {limit}"
                )
            self._pinned.append(self.address + start)

    def _unregister(self) -> None:
        if self._pinned:
            import torch

            runtime = torch.cuda.cudart()
            while self._pinned:
                runtime.cudaHostUnregister(self._pinned.pop())

    def _closed(self) -> StaleHandle:
        return StaleHandle(f"arena {self.name!r} is closed")


def sweep_leftovers(folder: Path) -> list[str]:
    """Remove the arena and `.alive` files of dead processes; returns their names.

    What a live process holds is never touched, even when it is stopped; several sweeps may run
    at once. Raises `BadInput` when the folder is not ours. One flock a file.
    """
    if not folder.exists():
        return []
    liveness.private_folder(folder)
    return [p.name for p in _ours(folder) if liveness.remove_if_dead(p)]


def _ours(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix in (SUFFIX, liveness.SUFFIX):
            yield path
