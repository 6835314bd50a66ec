"""The pool of a GPU: device memory with slots, or shared memory where there is no CUDA.

Both kinds have an arena file on the host: of a CUDA pool it carries the generations, of the
stand-in also the data. So leftovers of dead processes are found and removed in one way.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tiered_kv.arena import Arena
from tiered_kv.errors import BadInput, DoesNotFit, StaleHandle
from tiered_kv.generations import Generations
from tiered_kv.pages import Progress
from tiered_kv.pool import Pool, PoolHandle
from tiered_kv.types import ALIGNMENT

if TYPE_CHECKING:
    import torch


class PoolView(Pool, Protocol):
    """A pool of another process, mapped here. Closing it leaves the pool as it is."""


class HbmPool:
    """A GPU process's pool. Made by `create`; safe from any thread."""

    def __init__(self, arena: Arena, tensor: "torch.Tensor", device: str) -> None:
        """Use `create`."""
        self.device = device
        self.capacity_bytes = tensor.numel()
        self._arena = arena
        self._tensor: torch.Tensor | None = tensor

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        capacity_bytes: int,
        *,
        node_id: str,
        incarnation: int,
        device: str = "auto",
        progress: Progress | None = None,
    ) -> "HbmPool":
        """Take `capacity_bytes` on `device` ("auto", "cpu", "cuda", "cuda:1").

        Raises `DoesNotFit` with both numbers when the device has less free, `BadInput` for a
        device that is not here. On any error nothing is held. Blocks like `Arena.create`.
        """
        where = _device(device)
        if where == "cpu":
            arena = Arena.create(
                folder,
                name,
                capacity_bytes,
                node_id=node_id,
                incarnation=incarnation,
                progress=progress,
            )
            return cls(arena, arena.tensor, where)
        _check_device_fits(where, capacity_bytes)
        arena = Arena.create(
            folder,
            name,
            ALIGNMENT,
            node_id=node_id,
            incarnation=incarnation,
            covers_bytes=capacity_bytes,
        )
        with ExitStack() as undo:
            undo.callback(arena.close)
            tensor = _take(where, capacity_bytes)
            if progress is not None:
                progress(capacity_bytes, capacity_bytes)
            undo.pop_all()
        return cls(arena, tensor, where)

    @property
    def tensor(self) -> "torch.Tensor":
        """Flat uint8, `[capacity_bytes]`, on `device`."""
        if self._tensor is None:
            raise StaleHandle(f"the pool {self._arena.name!r} is closed")
        return self._tensor

    @property
    def generations(self) -> Generations:
        """The shared table; it lies in host memory for both kinds."""
        return self._arena.generations

    def handle(self) -> PoolHandle:
        """For `attach_pool` in one other process on this host."""
        if self.device == "cpu":
            return self._arena.handle()
        from torch.multiprocessing.reductions import reduce_tensor

        _, ipc = reduce_tensor(self.tensor)
        folder, name = str(self._arena.folder), self._arena.name
        return PoolHandle("cuda", folder, name, self.capacity_bytes, self.device, ipc)

    def describe(self) -> str:
        """One line; says in words when no GPU is behind it."""
        if self.device == "cpu":
            return f"CPU stand-in for HBM (no GPU is used): {self._arena.describe()}"
        import torch

        gpu = torch.cuda.get_device_name(self.device)
        return f"HBM of {self.device} ({gpu}), {self.capacity_bytes} bytes"

    def close(self) -> None:
        """Give the memory back to the device and remove the file. Idempotent."""
        self._tensor = None
        self._arena.close()
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()


class CudaView:
    """A CUDA pool of another process, opened through CUDA IPC by `attach_pool`."""

    def __init__(self, handle: PoolHandle, table: Arena, tensor: "torch.Tensor") -> None:
        """Use `attach_pool`."""
        self.capacity_bytes = handle.capacity_bytes
        self._handle = handle
        self._table = table
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> "torch.Tensor":
        """Flat uint8, `[capacity_bytes]`, on the owner's device."""
        if self._tensor is None:
            raise StaleHandle(f"the view of pool {self._handle.name!r} is closed")
        return self._tensor

    @property
    def generations(self) -> Generations:
        """The owner's table."""
        return self._table.generations

    def handle(self) -> PoolHandle:
        """Raises `BadInput`: CUDA memory can be handed on by its owner only."""
        raise BadInput(f"the pool {self._handle.name!r} can be handed on by its owner only")

    def describe(self) -> str:
        """One line."""
        return f"HBM of {self._handle.device} of another process, {self.capacity_bytes} bytes"

    def close(self) -> None:
        """Unmap. Idempotent; the owner's pool stays."""
        self._tensor = None
        self._table.close()


def attach_pool(handle: PoolHandle) -> PoolView:
    """Map a pool of another process on this host.

    Raises `StaleHandle` when its owner is dead or the name belongs to another pool by now,
    `BadInput` when it is not of this release, `RuntimeError` when CUDA cannot open it. The owner
    must outlive the view of a CUDA pool; a shared memory view only loses its file's name.
    """
    arena = Arena.attach(Path(handle.folder), handle.name)
    if handle.kind == "shm":
        if arena.capacity_bytes != handle.capacity_bytes:
            arena.close()
            raise StaleHandle(
                f"pool {handle.name!r} has {arena.capacity_bytes} bytes, not the "
                f"{handle.capacity_bytes} of its handle"
            )
        return arena
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    with ExitStack() as undo:
        undo.callback(arena.close)
        if handle.ipc is None:
            raise BadInput(f"the handle of CUDA pool {handle.name!r} has no IPC arguments")
        view = CudaView(handle, arena, rebuild_cuda_tensor(*handle.ipc))
        undo.pop_all()
    return view


def _device(wanted: str) -> str:
    """ "cpu" or "cuda:<n>". Raises `BadInput`."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{n}" for n in range(count))]
    if wanted == "auto":
        return f"cuda:{torch.cuda.current_device()}" if count else "cpu"
    name = "cuda:0" if wanted == "cuda" else wanted
    if name not in known:
        raise BadInput(f"device {wanted!r} is not one of auto, {', '.join(known)}")
    return name


def _check_device_fits(device: str, nbytes: int) -> None:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator has taken from the driver and does not use is ours to take again.
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if nbytes > free + spare:
        raise DoesNotFit(
            f"an HBM pool needs {nbytes} bytes, but {device} has {free + spare} free of {total}"
        )


def _take(device: str, nbytes: int) -> "torch.Tensor":
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"an HBM pool of {nbytes} bytes was refused by {device}: {error}"
        ) from error
