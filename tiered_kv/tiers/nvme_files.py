"""What the NVMe tier keeps on its devices, and where a slot lies in it."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tiered_kv.errors import BadInput
from tiered_kv.folder import Folder
from tiered_kv.slots import SlotPool
from tiered_kv.tiers.index import Index
from tiered_kv.tiers.index_file import Geometry
from tiered_kv.tiers.io_engine import IoOp, PoolMemory
from tiered_kv.tiers.nvme_probe import SCRATCH_BYTES
from tiered_kv.tiers.stripes import Progress, Stripes
from tiered_kv.types import ALIGNMENT, Located


class NvmeFiles:
    """Data files, scratch files and index of a tier. Made by `open`; safe from any thread."""

    def __init__(
        self, slots: SlotPool, stripes: Stripes, scratch: Stripes, index: Index, opened: ExitStack
    ) -> None:
        self.stripes = stripes
        self.scratch = scratch
        self.index = index
        self.close = opened.close
        self._slots = slots

    @classmethod
    def open(
        cls,
        folder: Folder,
        paths: Sequence[Path],
        capacity_bytes: int,
        slab_bytes: int,
        free_floor_bytes: int,
        progress: Progress | None,
    ) -> Self:
        """Open or create all of them; see `NvmeTier.open`. Nothing stays open when this raises."""
        folders = list(paths) or [folder.path]
        slots = SlotPool(capacity_bytes, slab_bytes, len(folders))
        if slab_bytes % (len(folders) * ALIGNMENT):
            raise BadInput(
                f"slab_bytes {slab_bytes} is no multiple of {len(folders)} x {ALIGNMENT}"
            )
        with ExitStack() as opening:
            stripes = Stripes.open(
                folders,
                slots.capacity_bytes // len(folders),
                free_floor_bytes=free_floor_bytes,
                progress=progress,
            )
            opening.callback(stripes.close)
            scratch = Stripes.open(
                folders, SCRATCH_BYTES, free_floor_bytes=free_floor_bytes, name="scratch"
            )
            opening.callback(scratch.close)
            geometry = Geometry(slab_bytes, len(folders), slots.capacity_bytes)
            index = Index.open(folder.path / "index.db", geometry)
            opening.callback(index.close)
            return cls(slots, stripes, scratch, index, opening.pop_all())

    def fits(self, slot: int, nbytes: int) -> bool:
        """Whether this is a slot of the pool that hands them out, for blocks of this size."""
        slots = self._slots
        if nbytes < 1 or nbytes % ALIGNMENT or nbytes > slots.slab_bytes // slots.stripes:
            return False
        row, rest = divmod(slot % slots.slab_bytes, nbytes)
        return 0 <= slot < slots.capacity_bytes and not rest and row < slots.per_slab(nbytes)

    def newest(self, blocks: Sequence[Located]) -> list[Located]:
        """Those of the blocks, given oldest first, that can be where they say.

        A slab belongs to one block size at a time: rows of another size than the newest one's are
        from before it changed hands.
        """
        size: dict[int, int] = {}  # slab -> block size
        kept = []
        for block in reversed(blocks):
            slab = block.slot // self._slots.slab_bytes
            same_size = size.get(slab, block.nbytes) == block.nbytes
            if self.fits(block.slot, block.nbytes) and same_size:
                size[slab] = block.nbytes
                kept.append(block)
        kept.reverse()
        return kept

    def ops(
        self, write: bool, blocks: Sequence[Located], pool: PoolMemory, pool_slots: Sequence[int]
    ) -> list[IoOp]:
        """The transfers between blocks and pool slots. Raises `BadInput` for what is no slot."""
        if len(blocks) != len(pool_slots):
            raise BadInput(f"{len(blocks)} blocks and {len(pool_slots)} pool slots")
        fds, place, view, start = self.stripes.fds, self._slots.place, pool.view, pool.address
        ops = []
        for block, slot in zip(blocks, pool_slots, strict=True):
            nbytes = block.nbytes
            if not self.fits(block.slot, nbytes):
                raise BadInput(f"{block.slot} is no NVMe slot for {nbytes} bytes")
            at = place(block.slot, nbytes)
            ops.append(IoOp(write, fds[at.stripe], at.offset, view(slot, nbytes), start + slot))
        return ops
