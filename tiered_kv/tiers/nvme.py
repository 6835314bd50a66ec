"""The NVMe tier: blocks in a few large files, their index beside them.

A write puts the data first and the rows of what arrived after it, in one transaction; so a crash
at any point leaves rows of blocks that are there, or no row. Every read is checked against the
checksum that the block had when it was sealed.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tiered_kv.checksum import checksum
from tiered_kv.errors import TierBroken, TieredKVError
from tiered_kv.folder import Folder
from tiered_kv.tiers import io_engine, io_threads, io_uring
from tiered_kv.tiers.index import Opened
from tiered_kv.tiers.index_rows import SessionRow
from tiered_kv.tiers.io_engine import IoEngine, PoolMemory
from tiered_kv.tiers.nvme_files import NvmeFiles
from tiered_kv.tiers.nvme_probe import measure
from tiered_kv.tiers.stripes import Progress
from tiered_kv.types import BlockKey, Done, Failed, Located, Medium, Outcome, Probe, Why

AUTO = "auto"
_CANDIDATES = (io_threads.ThreadsEngine.name, io_uring.UringEngine.name)
_NOT_TRIED = Failed(Why.IO_ERROR, "not carried out")


class NvmeTier:
    """See `Tier` for the verbs. Made by `open`; safe from any thread.

    `opened` tells what became of a former index. The folder stays the caller's to close.
    """

    medium = Medium.NVME

    def __init__(
        self, folder: Folder, pool: PoolMemory, files: NvmeFiles, engine: str, queue_depth: int
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._files = files
        self._wanted = engine
        self._depth = queue_depth
        self._closed = False
        self._engines: list[IoEngine] = []
        self._use(_CANDIDATES[0] if engine == AUTO else engine)

    @classmethod
    def open(
        cls,
        folder: Folder,
        pool: PoolMemory,
        *,
        capacity_bytes: int,
        slab_bytes: int,
        free_floor_bytes: int,
        paths: Sequence[Path] = (),
        engine: str = AUTO,
        queue_depth: int = 8,
        progress: Progress | None = None,
    ) -> Self:
        """Open or create the tier's files and index.

        `paths` are the device folders, one stripe each; by default the one stripe lies in
        `folder`. `capacity_bytes` and `slab_bytes` are those of the `SlotPool` that hands out
        slots. With `engine="auto"` the first `probe` chooses. Blocks while files are allocated.
        Raises `DoesNotFit`, `FolderInUse`, `TierBroken` or `UnknownName`; nothing stays open then.
        """
        files = NvmeFiles.open(
            folder, paths, capacity_bytes, slab_bytes, free_floor_bytes, progress
        )
        try:
            return cls(folder, pool, files, engine, queue_depth)
        except TieredKVError:
            files.close()
            raise

    @property
    def opened(self) -> Opened:
        """What became of the former index."""
        return self._files.index.opened

    @property
    def engine(self) -> str:
        """Name of the engine in use."""
        return self._engine.name

    def read(self, blocks: Sequence[Located], into: Sequence[int]) -> list[Outcome]:
        files = self._open_files()
        ops = files.ops(False, blocks, self._pool, into)
        outcomes: list[Outcome] = [_NOT_TRIED] * len(blocks)
        settle = files.stripes.settle

        def on_done(i: int, result: int) -> None:
            block = blocks[i]
            settle(ops[i].fd, ops[i].offset, block.nbytes)
            if result != block.nbytes:
                outcomes[i] = _io_failed("read", block, result)
                return
            found = checksum(ops[i].view)
            if found == block.checksum:
                outcomes[i] = Done(found)
            else:
                outcomes[i] = _corrupt("on the NVMe", block, found)

        self._engine.run(ops, on_done)
        return outcomes

    def write(self, blocks: Sequence[Located], source: Sequence[int]) -> list[Outcome]:
        files = self._open_files()
        ops = files.ops(True, blocks, self._pool, source)
        if not self._folder.intact():
            raise TierBroken(f"the folder {self._folder.path} was removed or replaced")
        outcomes: list[Outcome] = [_NOT_TRIED] * len(blocks)
        settle = files.stripes.settle
        sealed = list(blocks)

        def before(i: int) -> bool:
            found, block = checksum(ops[i].view), blocks[i]
            if block.checksum is not None and block.checksum != found:
                outcomes[i] = _corrupt("in the pool", block, found)
                return False
            sealed[i] = block._replace(checksum=found)
            return True

        def on_done(i: int, result: int) -> None:
            settle(ops[i].fd, ops[i].offset, blocks[i].nbytes)
            if result == blocks[i].nbytes:
                outcomes[i] = Done(sealed[i].checksum)
            else:
                outcomes[i] = _io_failed("write", blocks[i], result)

        self._engine.run(ops, on_done, before)
        written = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Done)]
        try:
            if written:
                files.index.put([sealed[i] for i in written])
        except TierBroken as error:
            for i in written:
                outcomes[i] = Failed(Why.IO_ERROR, str(error))
        return outcomes

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """See `Tier`. Raises `TierBroken` when the rows are still there."""
        self._open_files().index.drop(keys)

    def restore(self) -> list[Located]:
        """What former incarnations left, oldest first, and never two blocks in one place.

        Nothing was read yet: a block may still prove corrupt. O(rows).
        """
        files = self._open_files()
        rows = files.index.load()
        kept = files.newest(rows)
        if len(kept) < len(rows):
            alive = {block.key for block in kept}
            files.index.drop([block.key for block in rows if block.key not in alive])
        return kept

    def put_sessions(self, sessions: Sequence[SessionRow]) -> None:
        """Keep session documents for the next incarnation. One transaction."""
        self._open_files().index.put_sessions(sessions)

    def drop_sessions(self, ids: Sequence[bytes]) -> None:
        """Forget session documents. One transaction."""
        self._open_files().index.drop_sessions(ids)

    def all_sessions(self) -> list[SessionRow]:
        """Session documents that were kept, the longest untouched first."""
        return self._open_files().index.all_sessions()

    def flush(self) -> None:
        """Make all that is `Done` survive a power failure. Blocks for the medium's own flush."""
        files = self._open_files()
        files.stripes.sync()
        files.index.checkpoint()

    def probe(self) -> Probe:
        """See `Tier`. With `engine="auto"` the first call measures all engines, interleaved, and
        switches to the faster one. Takes some hundred MB of I/O in a scratch file of its own."""
        files = self._open_files()
        if not self.healthy():
            raise TierBroken(f"files in {self._folder.path} were removed or replaced")
        names = _CANDIDATES if self._wanted == AUTO else (self._engine.name,)
        speeds = measure(files.scratch, names, self._depth)
        best = max(speeds, key=lambda name: speeds[name].score)
        if best != self._engine.name:
            self._use(best)
        self._wanted = best
        return Probe(self.medium, best, speeds[best].write, speeds[best].read)

    def healthy(self) -> bool:
        """Whether folder and files are still those that were opened. A few stat calls."""
        return not self._closed and self._folder.intact() and self._files.stripes.intact()

    def describe(self) -> str:
        """One line for `status`: engine and files."""
        return f"{self._engine.describe()}; {self._files.stripes.describe()}"

    def close(self) -> None:
        """Wait for running calls and close all files; later calls raise `TierBroken`."""
        self._closed = True
        for engine in self._engines:
            engine.close()
        self._files.close()

    def _use(self, name: str) -> None:
        # A former engine stays open until the tier closes: a call may be about to enter it.
        self._engine = io_engine.make(name, self._pool, self._depth)
        self._engines.append(self._engine)

    def _open_files(self) -> NvmeFiles:
        if self._closed:
            raise TierBroken(f"the NVMe tier in {self._folder.path} is closed")
        return self._files


def _io_failed(doing: str, block: Located, result: int) -> Failed:
    if result < 0:
        return Failed(Why.IO_ERROR, f"{doing} at slot {block.slot}: {os.strerror(-result)}")
    return Failed(
        Why.IO_ERROR, f"{doing} at slot {block.slot} ended after {result} of {block.nbytes} bytes"
    )


def _corrupt(where: str, block: Located, found: int) -> Failed:
    wanted = "none" if block.checksum is None else f"{block.checksum:016x}"
    return Failed(
        Why.CORRUPT, f"slot {block.slot} {where} has checksum {found:016x}, sealed was {wanted}"
    )
