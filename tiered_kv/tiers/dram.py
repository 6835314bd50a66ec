"""The leg between a GPU's pool and the DRAM arena of its host."""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiered_kv.arena import PIN_CHUNK_BYTES, Arena
from tiered_kv.errors import BadConfig, BadInput, TierBroken
from tiered_kv.pool import Pool
from tiered_kv.tiers.copies import Copier, Piece, copier
from tiered_kv.types import BlockKey, Done, Failed, Located, Medium, Outcome, Probe, Why

if TYPE_CHECKING:
    import torch

PROBE_BYTES = 32 << 20
_PROBE_ROUNDS = 3
_TURN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples fill the circle evenly


class DramTier:
    """DRAM below HBM: copies slots of an arena into slots of a pool and back.

    Blocks, releases the GIL while bytes move; safe from several threads at once. Owns neither the
    pool nor the arena, and keeps their memory mapped until `close`.
    """

    medium = Medium.DRAM

    def __init__(self, pool: Pool, arena: Arena, verify: float, *, seal: bool = True) -> None:
        """`verify` is the fraction (0 to 1) of blocks of known checksum that are compared.

        Which ones depends on the key and on how many batches came before: repeatable, and over
        time every block has its turn. With `seal`, `write` takes the checksum of each block that
        has none; without, whoever commits the block seals it later.

        Raises `BadConfig` when `verify` is not a fraction.
        """
        if not 0.0 <= verify <= 1.0:
            raise BadConfig(f"verify must be between 0 and 1, not {verify!r}")
        self._verify_below = int(verify * (1 << 64))
        self._seal = seal
        self._capacity = (arena.capacity_bytes, pool.capacity_bytes)
        self._device = pool.tensor.device
        self._up: Copier | None = copier(arena.tensor, pool.tensor, PIN_CHUNK_BYTES)
        self._down: Copier | None = copier(pool.tensor, arena.tensor, PIN_CHUNK_BYTES)
        self._batches = itertools.count(1)

    def read(self, blocks: Sequence[Located], into: Sequence[int]) -> list[Outcome]:
        """Arena slot `blocks[i].slot` -> pool slot `into[i]`. `Done.checksum` is set where it was
        compared: of the bytes in the pool, or with CUDA of the bytes in the arena.

        Raises `BadInput` for a slot outside of either, and `TierBroken` when closed, before
        anything is copied.
        """
        self._check(blocks, into)
        pieces = [Piece(b.slot, s, b.nbytes) for b, s in zip(blocks, into, strict=True)]
        return self._move(_open(self._up), blocks, pieces, self._sampled(blocks))

    def write(self, blocks: Sequence[Located], source: Sequence[int]) -> list[Outcome]:
        """Pool slot `source[i]` -> arena slot `blocks[i].slot`. `Done.checksum` is of the bytes in
        the arena, set where it was compared or, for a block that had none, taken. Raises like
        `read`.
        """
        self._check(blocks, source)
        pieces = [Piece(s, b.slot, b.nbytes) for b, s in zip(blocks, source, strict=True)]
        hashed = self._sampled(blocks)
        if self._seal:
            hashed |= {i for i, block in enumerate(blocks) if block.checksum is None}
        return self._move(_open(self._down), blocks, pieces, hashed)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to do: no later incarnation finds what was in memory."""

    def probe(self) -> Probe:
        """Copy 32 MiB of scratch memory of its own both ways, compare, and time the best of three.

        Takes no slot. Blocks for some tens of milliseconds. Raises `TierBroken` when there is no
        memory for it, the copy fails, or the bytes differ.
        """
        try:
            up_s, down_s = _time_scratch(self._device)
        except RuntimeError as error:  # torch's class for CUDA errors and refused memory
            raise TierBroken(f"the probe of DRAM <-> {self._device} failed: {error}") from error
        name = _open(self._up).name
        return Probe(Medium.DRAM, name, PROBE_BYTES / down_s, PROBE_BYTES / up_s)

    def close(self) -> None:
        """Let go of both memories. Idempotent; calls that run end normally."""
        self._up = self._down = None

    def _move(
        self, via: Copier, blocks: Sequence[Located], pieces: list[Piece], hashed: set[int]
    ) -> list[Outcome]:
        order = sorted(hashed)
        try:
            via.copy([piece for i, piece in enumerate(pieces) if i not in hashed])
            digests = via.copy_hashed([pieces[i] for i in order])
        except RuntimeError as error:  # torch's class for CUDA errors; the CPU raises none
            return [Failed(Why.IO_ERROR, f"{via.name}: {error}")] * len(blocks)
        outcomes: list[Outcome] = [Done()] * len(blocks)
        for i, digest in zip(order, digests, strict=True):
            outcomes[i] = _compared(blocks[i], digest)
        return outcomes

    def _sampled(self, blocks: Sequence[Located]) -> set[int]:
        """Which blocks are compared in this batch."""
        turn = next(self._batches) * _TURN
        return {
            i
            for i, block in enumerate(blocks)
            if block.checksum is not None
            and (int.from_bytes(block.key[:8], "big") + turn) % (1 << 64) < self._verify_below
        }

    def _check(self, blocks: Sequence[Located], slots: Sequence[int]) -> None:
        if len(blocks) != len(slots):
            raise BadInput(f"{len(blocks)} blocks, but {len(slots)} slots")
        arena_bytes, pool_bytes = self._capacity
        for block, slot in zip(blocks, slots, strict=True):
            if block.nbytes < 1 or not 0 <= block.slot <= arena_bytes - block.nbytes:
                raise _outside(block.slot, block.nbytes, "arena", arena_bytes)
            if not 0 <= slot <= pool_bytes - block.nbytes:
                raise _outside(slot, block.nbytes, "pool", pool_bytes)


def _outside(slot: int, nbytes: int, where: str, capacity: int) -> BadInput:
    return BadInput(f"slot {slot} with {nbytes} bytes is not in the {where} of {capacity} bytes")


def _open(via: Copier | None) -> Copier:
    if via is None:
        raise TierBroken("the DRAM tier is closed")
    return via


def _compared(block: Located, digest: int) -> Outcome:
    if block.checksum is None or block.checksum == digest:
        return Done(digest)
    return Failed(
        Why.CORRUPT, f"block {block.key.hex()}: xxh3 {digest:016x}, not {block.checksum:016x}"
    )


def _time_scratch(device: "torch.device") -> tuple[float, float]:
    """Seconds for `PROBE_BYTES` up and down. Raises `TierBroken` when bytes change on the way."""
    import torch

    cuda = device.type == "cuda"
    pattern = torch.arange(PROBE_BYTES // 4, dtype=torch.int32).view(torch.uint8)
    host = pattern.pin_memory() if cuda else pattern.clone()
    there = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    piece = [Piece(0, 0, PROBE_BYTES)]
    up = copier(host, there, PIN_CHUNK_BYTES)
    down = copier(there, host, PIN_CHUNK_BYTES)
    best = [float("inf"), float("inf")]
    for _ in range(_PROBE_ROUNDS):
        for n, way in enumerate((up, down)):
            started = time.perf_counter()
            way.copy(piece)
            best[n] = min(best[n], time.perf_counter() - started)
            if n == 0:
                host.zero_()
        if not torch.equal(host, pattern):
            raise TierBroken(f"{PROBE_BYTES} bytes changed on their way to {device} and back")
    return best[0], best[1]
