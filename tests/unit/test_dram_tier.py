from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from other_process import shm_folder

from tiered_kv.arena import Arena
from tiered_kv.checksum import checksum
from tiered_kv.errors import BadConfig, BadInput, TierBroken
from tiered_kv.tiers import copies, dram
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.copies import CudaCopier, HostCopier, Piece, coalesce
from tiered_kv.tiers.dram import DramTier
from tiered_kv.tiers.hbm import HbmPool
from tiered_kv.types import BlockKey, Done, Failed, Fingerprint, Located, Medium, Why

MIB = 1 << 20
BLOCK = 12288
SLOTS = 32


class Pair:
    """A pool and an arena, each with random bytes."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        who = {"node_id": "node", "incarnation": 1}
        self.arena = Arena.create(folder, "a", SLOTS * BLOCK, **who)
        self.pool = HbmPool.create(folder, "p", SLOTS * BLOCK, device=device, **who)
        seed = torch.Generator().manual_seed(1)
        for tensor in (self.arena.tensor, self.pool.tensor):
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=seed, dtype=torch.uint8))

    def in_arena(self, slot: int) -> bytes:
        return bytes(self.arena.view(slot, BLOCK))

    def in_pool(self, slot: int) -> bytes:
        return bytes(self.pool.tensor[slot : slot + BLOCK].cpu().numpy())

    def block(self, n: int, at: int, check: int | None = None) -> Located:
        key = BlockKey(n.to_bytes(8, "big") * 2)
        return Located(key, None, at * BLOCK, BLOCK, Fingerprint(bytes(16)), check)

    def sealed(self, n: int, at: int, *, wrong: int = 0) -> Located:
        """A block in the arena with its checksum, or a wrong one."""
        return self.block(n, at, checksum(self.arena.view(at * BLOCK, BLOCK)) ^ wrong)

    def close(self) -> None:
        self.pool.close()
        self.arena.close()


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def pair(request) -> Iterator[Pair]:
    with shm_folder() as folder:
        made = Pair(folder, request.param)
        yield made
        made.close()


def test_reading_brings_each_block_into_its_slot_and_touches_no_other(pair):
    tier: Tier = DramTier(pair.pool, pair.arena, verify=0.0)
    before = [pair.in_pool(i * BLOCK) for i in range(SLOTS)]
    sources, targets = [3, 4, 5, 9, 0, 31], [7, 8, 9, 1, 31, 0]
    blocks = [pair.block(i, at) for i, at in enumerate(sources)]
    assert tier.read(blocks, [t * BLOCK for t in targets]) == [Done()] * 6
    for source, target in zip(sources, targets, strict=True):
        assert pair.in_pool(target * BLOCK) == pair.in_arena(source * BLOCK)
    for i in set(range(SLOTS)) - set(targets):
        assert pair.in_pool(i * BLOCK) == before[i]


def test_writing_is_the_reverse_and_seals_blocks_without_a_checksum(pair):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    outcomes = tier.write([pair.block(0, 2), pair.block(1, 30)], [5 * BLOCK, 4 * BLOCK])
    assert pair.in_arena(2 * BLOCK) == pair.in_pool(5 * BLOCK)
    assert pair.in_arena(30 * BLOCK) == pair.in_pool(4 * BLOCK)
    sums = [checksum(pair.arena.view(at * BLOCK, BLOCK)) for at in (2, 30)]
    assert outcomes == [Done(sums[0]), Done(sums[1])]


def test_sealing_can_be_left_to_whoever_commits(pair):
    tier = DramTier(pair.pool, pair.arena, verify=1.0, seal=False)
    assert tier.write([pair.block(0, 2)], [5 * BLOCK]) == [Done(None)]
    assert pair.in_arena(2 * BLOCK) == pair.in_pool(5 * BLOCK)


def test_reading_with_full_verification_finds_the_one_wrong_block(pair):
    tier = DramTier(pair.pool, pair.arena, verify=1.0)
    blocks = [pair.sealed(0, 1), pair.sealed(1, 2, wrong=1), pair.sealed(2, 3), pair.block(3, 4)]
    outcomes = tier.read(blocks, [0, BLOCK, 2 * BLOCK, 3 * BLOCK])
    assert outcomes[0] == Done(blocks[0].checksum)
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].why is Why.CORRUPT
    assert blocks[1].key.hex() in outcomes[1].detail
    assert outcomes[2] == Done(blocks[2].checksum)
    assert outcomes[3] == Done(None)
    assert pair.in_pool(2 * BLOCK) == pair.in_arena(3 * BLOCK)


def test_a_bit_that_flipped_in_the_arena_is_found(pair):
    tier = DramTier(pair.pool, pair.arena, verify=1.0)
    block = pair.sealed(0, 6)
    pair.arena.view(6 * BLOCK, BLOCK)[BLOCK - 1] ^= 1
    (outcome,) = tier.read([block], [0])
    assert isinstance(outcome, Failed)
    assert outcome.why is Why.CORRUPT


def test_writing_compares_with_a_known_checksum(pair):
    tier = DramTier(pair.pool, pair.arena, verify=1.0)
    (outcome,) = tier.write([pair.sealed(0, 1)], [2 * BLOCK])  # other bytes than were sealed
    assert isinstance(outcome, Failed)
    assert outcome.why is Why.CORRUPT


def test_without_verification_nothing_is_compared(pair):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    assert tier.read([pair.sealed(0, 1, wrong=1)], [0]) == [Done(None)]


def sampled(pair: Pair, verify: float, batches: int) -> list[list[bool]]:
    tier = DramTier(pair.pool, pair.arena, verify=verify)
    keys = [int.from_bytes(checksum(bytes([i])).to_bytes(8, "big"), "big") for i in range(SLOTS)]
    blocks = [pair.sealed(key, i) for i, key in enumerate(keys)]
    into = [i * BLOCK for i in range(SLOTS)]
    return [
        [o.checksum is not None for o in tier.read(blocks, into) if isinstance(o, Done)]
        for _ in range(batches)
    ]


def test_sampling_repeats_itself_keeps_its_fraction_and_gives_every_block_its_turn(pair):
    seen = sampled(pair, 0.25, 16)
    assert sampled(pair, 0.25, 16) == seen
    total = sum(map(sum, seen))
    assert 0.2 * 16 * SLOTS < total < 0.3 * 16 * SLOTS
    assert all(any(column) for column in zip(*seen, strict=True))


@pytest.mark.parametrize("verify", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_of_0_to_1_is_refused(pair, verify):
    with pytest.raises(BadConfig, match="verify must be between 0 and 1"):
        DramTier(pair.pool, pair.arena, verify=verify)


@pytest.mark.parametrize(
    ("at", "slot", "where"),
    [(SLOTS, 0, "arena"), (-1, 0, "arena"), (0, SLOTS * BLOCK, "pool"), (0, -BLOCK, "pool")],
)
def test_a_slot_outside_is_refused_before_anything_is_copied(pair, at, slot, where):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    before = [pair.in_pool(0), pair.in_arena(0)]
    for copy in (tier.read, tier.write):
        with pytest.raises(BadInput, match=f"is not in the {where} of {SLOTS * BLOCK} bytes"):
            copy([pair.block(0, 1), pair.block(1, at)], [0, slot])
    assert [pair.in_pool(0), pair.in_arena(0)] == before


def test_as_many_slots_as_blocks_are_wanted(pair):
    with pytest.raises(BadInput, match="1 blocks, but 2 slots"):
        DramTier(pair.pool, pair.arena, verify=0.0).read([pair.block(0, 1)], [0, BLOCK])


def test_an_empty_batch_is_fine(pair):
    tier = DramTier(pair.pool, pair.arena, verify=1.0)
    assert tier.read([], []) == tier.write([], []) == []


def test_the_probe_touches_no_slot(pair):
    before = [(pair.in_pool(i * BLOCK), pair.in_arena(i * BLOCK)) for i in range(SLOTS)]
    probe = DramTier(pair.pool, pair.arena, verify=0.0).probe()
    assert probe.medium is Medium.DRAM
    assert probe.engine in ("memcpy", "cuda copy engine")
    assert probe.read_bytes_per_s > 0
    assert probe.write_bytes_per_s > 0
    assert [(pair.in_pool(i * BLOCK), pair.in_arena(i * BLOCK)) for i in range(SLOTS)] == before


def test_the_probe_notices_bytes_that_change(pair, monkeypatch):
    honest = dram.copier

    class Lossy:
        def __init__(self, source, target):
            self.inner, self.target = honest(source, target, 1 << 62), target

        def copy(self, pieces):
            self.inner.copy(pieces)
            self.target[12345] ^= 1

    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    flips = iter([True, False] * 2)
    monkeypatch.setattr(
        dram, "copier", lambda s, t, b: Lossy(s, t) if next(flips) else honest(s, t, b)
    )
    with pytest.raises(TierBroken, match="bytes changed on their way"):
        tier.probe()


def test_a_block_that_is_hashed_is_not_copied_twice(pair, monkeypatch):
    tier = DramTier(pair.pool, pair.arena, verify=1.0)
    seen: list[list[Piece]] = []
    monkeypatch.setattr(HostCopier, "copy", lambda self, pieces: seen.append(list(pieces)))
    monkeypatch.setattr(CudaCopier, "copy", lambda self, pieces: seen.append(list(pieces)))
    tier.read([pair.sealed(0, 1), pair.block(1, 2)], [0, BLOCK])
    assert seen[0] == [Piece(2 * BLOCK, BLOCK, BLOCK)]


def test_a_failing_device_fails_each_block_of_the_batch(pair, monkeypatch):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)

    def broken(pieces):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(tier._up, "copy", broken)
    outcomes = tier.read([pair.block(0, 1), pair.block(1, 2)], [0, BLOCK])
    assert [o.why for o in outcomes if isinstance(o, Failed)] == [Why.IO_ERROR] * 2
    assert "illegal memory access" in outcomes[0].detail


def test_a_closed_tier_says_so_and_lets_the_memory_go(pair):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    tier.close()
    tier.close()
    with pytest.raises(TierBroken, match="closed"):
        tier.read([pair.block(0, 1)], [0])
    with pytest.raises(TierBroken, match="closed"):
        tier.probe()


def test_dropping_changes_nothing(pair):
    before = pair.in_arena(0)
    assert DramTier(pair.pool, pair.arena, verify=0.0).drop([pair.block(0, 0).key]) is None
    assert pair.in_arena(0) == before


def test_closing_the_arena_while_a_tier_uses_it_unmaps_nothing(pair):
    tier = DramTier(pair.pool, pair.arena, verify=0.0)
    expected = pair.in_arena(BLOCK)
    pair.arena.close()
    assert tier.read([pair.block(0, 1)], [0]) == [Done()]
    assert pair.in_pool(0) == expected


def test_a_block_larger_than_one_step_is_copied_and_hashed_whole(monkeypatch):
    monkeypatch.setattr(copies, "HASHED_BYTES", 1000)
    monkeypatch.setattr(copies, "COPY_BYTES", 700)
    source = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    for hashed in (False, True):
        target = torch.zeros(5000, dtype=torch.uint8)
        copier = HostCopier(source, target)
        if hashed:
            digests = copier.copy_hashed([Piece(0, 100, 4096)])
            assert digests == [checksum(memoryview(source.numpy()))]
        else:
            copier.copy([Piece(0, 100, 4096)])
        assert torch.equal(target[100:4196], source)
        assert not target[:100].any()
        assert not target[4196:].any()


def test_neighbours_on_both_sides_become_one_piece_and_others_do_not():
    pieces = [Piece(20, 120, 10), Piece(0, 100, 10), Piece(10, 110, 10), Piece(30, 200, 10)]
    assert coalesce(pieces, 1 << 62) == [Piece(0, 100, 30), Piece(30, 200, 10)]
    assert coalesce([], 1 << 62) == []


def test_no_piece_crosses_a_registration():
    assert coalesce([Piece(90, 0, 30)], 100) == [Piece(90, 0, 10), Piece(100, 10, 20)]
    assert coalesce([Piece(0, 90, 30)], 100) == [Piece(0, 90, 10), Piece(10, 100, 20)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=31), st.integers(1, 40))
def test_coalescing_keeps_every_byte_of_the_mapping(pairs, boundary):
    unique = {target: source for source, target in pairs}  # a target is written once
    pieces = [Piece(source * 8, target * 8, 8) for target, source in unique.items()]
    merged = coalesce(pieces, boundary)

    def moves(all_pieces):
        return sorted((p.source + i, p.target + i) for p in all_pieces for i in range(p.nbytes))

    assert moves(merged) == moves(pieces)
    assert all(p.source // boundary == (p.source + p.nbytes - 1) // boundary for p in merged)
    assert all(p.target // boundary == (p.target + p.nbytes - 1) // boundary for p in merged)
