"""What a pool is, whatever its memory: slots that this process and its clients address directly."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tiered_kv.generations import Generations

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PoolHandle:
    """What another process on this host needs to map a pool (`tiers.hbm.attach_pool`).

    `folder` and `name` are of its arena file; of kind "cuda" that file has only the generations,
    and `ipc` what CUDA needs to open the tensor. Such a handle serves one attach; make one each.
    """

    kind: Literal["shm", "cuda"]
    folder: str
    name: str
    capacity_bytes: int
    device: str = "cpu"
    ipc: tuple[Any, ...] | None = None


class Pool(Protocol):
    """Memory with slots, as its owner or an attached process sees it. Slots are byte offsets."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slots may cover."""
        ...

    @property
    def tensor(self) -> "torch.Tensor":
        """All of it as a flat uint8 tensor, `[capacity_bytes]`, sharing the memory."""
        ...

    @property
    def generations(self) -> Generations:
        """The shared table that readers compare after a copy; only the owner writes it."""
        ...

    def handle(self) -> PoolHandle:
        """For another process on this host. Picklable."""
        ...

    def describe(self) -> str:
        """One line for `status` and reports: what memory this really is."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent; views that still exist stay valid until they go."""
        ...
