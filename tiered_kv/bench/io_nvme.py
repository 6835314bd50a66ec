"""DRAM <-> NVMe: the tier, checksums and index included, against the bare medium."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tiered_kv.bench.contest import Contender, timed
from tiered_kv.bench.io_memory import SharedMemory
from tiered_kv.bench.io_raw import RawFile
from tiered_kv.errors import TierBroken
from tiered_kv.folder import Folder
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import BlockKey, Done, Fingerprint, Located, Outcome

ENGINES = ("threads", "io_uring")
LEGS = {"dram-to-nvme": True, "nvme-to-dram": False}
"""Leg -> whether it writes."""


class NvmeLegs:
    """Tiers with each engine and a bare file beside them. All move the same bytes of `memory`."""

    def __init__(self, tiers: dict[str, NvmeTier], raw: RawFile, nbytes: int) -> None:
        self._tiers = tiers
        self._raw = raw
        self._nbytes = nbytes
        self._blocks: list[Located] = []
        self._sealed: dict[str, list[Located]] = {}

    def prepare(self, block_bytes: int) -> None:
        """Write all areas once: the first write to a preallocated one costs more than the next."""
        self._blocks = _blocks(block_bytes, self._nbytes)
        for name in self._tiers:
            self._write(name)
        next(self._raw.contenders(True, block_bytes)).run()

    def contenders(self, leg: str, block_bytes: int) -> list[Contender]:
        """Ours and the bare ones, for blocks of the size that was prepared."""
        ours = [self._ours(name, LEGS[leg]) for name in self._tiers]
        return [*ours, *self._raw.contenders(LEGS[leg], block_bytes)]

    def _ours(self, name: str, write: bool) -> Contender:
        work = self._write if write else self._read
        return Contender(name, True, lambda: timed(lambda: work(name)))

    def describe(self) -> str:
        """What the tiers do without, and where."""
        return "; ".join(tier.describe() for tier in self._tiers.values())

    def _write(self, name: str) -> None:
        # Unsealed: fio leaves other bytes in the memory, so each pass seals what it finds.
        blocks = self._blocks
        outcomes = self._tiers[name].write(blocks, [block.slot for block in blocks])
        self._sealed[name] = [
            block._replace(checksum=done.checksum)
            for block, done in zip(blocks, _all_done(outcomes), strict=True)
        ]

    def _read(self, name: str) -> None:
        blocks = self._sealed[name]
        _all_done(self._tiers[name].read(blocks, [block.slot for block in blocks]))


@contextmanager
def open_legs(folder: Path, nbytes: int, engines: Collection[str]) -> Iterator[NvmeLegs]:
    """Files of `nbytes` for each contender, in a folder that the caller removes."""
    with ExitStack() as stack:
        memory = stack.enter_context(SharedMemory(nbytes))
        tiers: dict[str, NvmeTier] = {}
        for name in ENGINES:
            if name not in engines:
                continue
            home = Folder.open(folder / name)
            stack.callback(home.close)
            try:
                tiers[name] = NvmeTier.open(
                    home,
                    memory,
                    capacity_bytes=nbytes,
                    slab_bytes=nbytes // 4,
                    free_floor_bytes=nbytes,
                    engine=name,
                )
            except TierBroken:
                if name == ENGINES[0]:
                    raise
                continue  # io_uring is refused here
            stack.callback(tiers[name].close)
        raw = stack.enter_context(RawFile(folder / "raw.data", memory, nbytes))
        yield NvmeLegs(tiers, raw, nbytes)


def _blocks(block_bytes: int, nbytes: int) -> list[Located]:
    layout = Fingerprint(bytes(16))
    return [
        Located(BlockKey(os.urandom(16)), None, slot, block_bytes, layout)
        for slot in range(0, nbytes, block_bytes)
    ]


def _all_done(outcomes: Sequence[Outcome]) -> list[Done]:
    done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
    if len(done) < len(outcomes):
        failed = next(outcome for outcome in outcomes if not isinstance(outcome, Done))
        raise TierBroken(f"a block failed while it was measured: {failed}")
    return done
