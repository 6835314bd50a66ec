"""Blocks whose bytes follow from their key, and a small NVMe tier to put them in."""

import random

from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import BlockKey, Fingerprint, Located

KB, MB = 1 << 10, 1 << 20
NBYTES = 64 * KB
CAPACITY = 4 * MB
SLAB = 512 * KB
PER_SLAB = SLAB // NBYTES
LAYOUT = Fingerprint(b"layout-of-a-test")


def open_tier(folder, pool, **changes):
    options = {"capacity_bytes": CAPACITY, "slab_bytes": SLAB, "free_floor_bytes": MB}
    return NvmeTier.open(folder, pool, **{**options, **changes})


def block(n, slot=None, nbytes=NBYTES):
    key = BlockKey(n.to_bytes(16, "big"))
    return Located(key, None, n * nbytes if slot is None else slot, nbytes, LAYOUT)


def content(key, nbytes=NBYTES):
    return random.Random(key).randbytes(nbytes)


def put(tier, pool, blocks):
    """Write blocks from pool slots 0.. on; outcomes, and the blocks with their checksums."""
    sources = []
    at = 0
    for b in blocks:
        pool.view(at, b.nbytes)[:] = content(b.key, b.nbytes)
        sources.append(at)
        at += b.nbytes
    outcomes = tier.write(blocks, sources)
    sealed = [
        b._replace(checksum=getattr(o, "checksum", None))
        for b, o in zip(blocks, outcomes, strict=True)
    ]
    return outcomes, sealed


def get(tier, pool, blocks):
    """Read blocks into wiped pool slots; outcomes, and what is there now."""
    targets = []
    at = 0
    for b in blocks:
        pool.view(at, b.nbytes)[:] = bytes(b.nbytes)
        targets.append(at)
        at += b.nbytes
    outcomes = tier.read(blocks, targets)
    return outcomes, [bytes(pool.view(t, b.nbytes)) for t, b in zip(targets, blocks, strict=True)]


def right(blocks, outcomes, found):
    """For each block whether it arrived; fails when one arrived with other bytes than its own."""
    arrived = [type(o).__name__ == "Done" for o in outcomes]
    for b, ok, bytes_ in zip(blocks, arrived, found, strict=True):
        assert not ok or bytes_ == content(b.key, b.nbytes), f"wrong bytes for {b.key.hex()}"
    return arrived
