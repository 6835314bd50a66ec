"""HBM <-> DRAM: the tier against one plain torch copy of the same bytes."""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tiered_kv.bench.contest import Contender, timed
from tiered_kv.bench.io_memory import fill
from tiered_kv.checksum import checksum
from tiered_kv.errors import TierBroken
from tiered_kv.types import BlockKey, Done, Fingerprint, Located

if TYPE_CHECKING:
    from tiered_kv.arena import Arena
    from tiered_kv.tiers.dram import DramTier
    from tiered_kv.tiers.hbm import HbmPool

LEGS = {"hbm-to-dram": True, "dram-to-hbm": False}
"""Leg -> whether it writes to DRAM."""

ENGINES = {"copy": 0.0, "copy-verified": 1.0}
"""Name -> fraction of blocks whose checksum is compared. The service samples, so the bar is that
of `copy`."""


class HbmLegs:
    """A GPU's pool (or its stand-in) of the same size as the arena, and tiers between them."""

    def __init__(
        self, pool: "HbmPool", arena: "Arena", tiers: "dict[str, DramTier]", nbytes: int
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._tiers = tiers
        self._nbytes = nbytes
        self._sealed: list[Located] = []

    def prepare(self, block_bytes: int) -> None:
        """Give both memories the same bytes, so that every copy leaves them as they are."""
        self._pool.tensor[: self._nbytes].copy_(self._arena.tensor[: self._nbytes])
        self._sealed = [
            Located(
                BlockKey(os.urandom(16)),
                None,
                slot,
                block_bytes,
                Fingerprint(bytes(16)),
                checksum(self._arena.view(slot, block_bytes)),
            )
            for slot in range(0, self._nbytes, block_bytes)
        ]

    def contenders(self, leg: str, block_bytes: int) -> list[Contender]:
        """Ours and the plain copy, for blocks of the size that was prepared."""
        assert self._sealed[0].nbytes == block_bytes
        down = LEGS[leg]
        ours = [self._ours(name, tier, down) for name, tier in self._tiers.items()]
        return [*ours, Contender("torch-copy", False, lambda: timed(lambda: self._plain(down)))]

    def _ours(self, name: str, tier: "DramTier", down: bool) -> Contender:
        judged = ENGINES[name] == 0.0
        return Contender(name, True, lambda: timed(lambda: self._move(tier, down)), judged)

    def describe(self) -> str:
        """What stands for HBM here."""
        return self._pool.describe()

    def _move(self, tier: "DramTier", down: bool) -> None:
        blocks = self._sealed
        slots = [block.slot for block in blocks]
        outcomes = tier.write(blocks, slots) if down else tier.read(blocks, slots)
        if not all(isinstance(outcome, Done) for outcome in outcomes):
            raise TierBroken("a block failed while it was measured")

    def _plain(self, down: bool) -> None:
        here, there = self._pool.tensor[: self._nbytes], self._arena.tensor[: self._nbytes]
        (there if down else here).copy_(here if down else there)


@contextmanager
def open_legs(nbytes: int, engines: Collection[str]) -> Iterator[HbmLegs]:
    """An arena of `nbytes` and a pool of as much. Imports torch."""
    from tiered_kv.arena import SHM_FOLDER, Arena
    from tiered_kv.tiers.dram import DramTier
    from tiered_kv.tiers.hbm import HbmPool

    name = f"bench-{os.getpid()}"
    with ExitStack() as stack:
        arena = Arena.create(SHM_FOLDER, name, nbytes, node_id="0" * 32, incarnation=1)
        stack.callback(arena.close)
        fill(arena.view(0, nbytes))
        pool = HbmPool.create(SHM_FOLDER, f"{name}-hbm", nbytes, node_id="0" * 32, incarnation=1)
        stack.callback(pool.close)
        if pool.device != "cpu":
            arena.pin()
        tiers = {
            name: DramTier(pool, arena, verify)
            for name, verify in ENGINES.items()
            if name in engines
        }
        for tier in tiers.values():
            stack.callback(tier.close)
        yield HbmLegs(pool, arena, tiers, nbytes)
