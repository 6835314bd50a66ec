"""Rows of the index and their seals: how a block or a session becomes a row, and back.

A seal is xxh3_64 over every field of a row. Without it a flipped bit in a key would name another
block's bytes together with their right checksum.
"""

import struct

import xxhash

from tiered_kv.errors import BadInput
from tiered_kv.types import BlockKey, Fingerprint, Located

SessionRow = tuple[bytes, bytes, float]
"""Session id, document, and the time it was last put in seconds; both byte strings are opaque."""

BlockRecord = tuple[int, bytes, bytes | None, int, bytes, int, int, int]
"""slot, key, parent, nbytes, layout, checksum (signed), written_at, seal (signed)."""

SessionRecord = tuple[bytes, bytes, float, int]
"""id, document, updated, seal (signed)."""


def block_record(block: Located, sequence: int) -> BlockRecord:
    """The row of a sealed block. Raises `BadInput` for one without checksum."""
    if block.checksum is None:
        raise BadInput(f"block {block.key.hex()} has no checksum and cannot be recorded")
    fields = (block.slot, block.key, block.parent, block.nbytes, block.layout)
    checksum = _signed(block.checksum)
    return (*fields, checksum, sequence, _block_seal(*fields, checksum))


def block_of(record: BlockRecord) -> Located | None:
    """The block a row speaks of; None when the row is damaged."""
    slot, key, parent, nbytes, layout, checksum, _, seal = record
    try:
        if _block_seal(slot, key, parent, nbytes, layout, checksum) != seal:
            return None
    except (TypeError, struct.error):
        return None  # SQLite types values, not columns: damage can turn a blob into a number
    return Located(
        BlockKey(key),
        None if parent is None else BlockKey(parent),
        slot,
        nbytes,
        Fingerprint(layout),
        checksum & 0xFFFFFFFFFFFFFFFF,
    )


def session_record(session: SessionRow) -> SessionRecord:
    """The row of a session."""
    return (*session, _session_seal(*session))


def session_of(record: SessionRecord) -> SessionRow | None:
    """The session a row speaks of; None when the row is damaged."""
    try:
        return record[:3] if _session_seal(*record[:3]) == record[3] else None
    except (TypeError, struct.error):
        return None


def _signed(value: int) -> int:
    """SQLite's integers are signed."""
    return value - (1 << 64) if value >> 63 else value


def _block_seal(
    slot: int, key: bytes, parent: bytes | None, nbytes: int, layout: bytes, checksum: int
) -> int:
    # Lengths keep neighbouring fields apart.
    lengths = (len(key), -1 if parent is None else len(parent), len(layout))
    head = struct.pack("<6q", slot, nbytes, checksum, *lengths)
    return _signed(xxhash.xxh3_64_intdigest(head + key + (parent or b"") + layout))


def _session_seal(name: bytes, doc: bytes, updated: float) -> int:
    head = struct.pack("<qqd", len(name), len(doc), updated)
    return _signed(xxhash.xxh3_64_intdigest(head + name + doc))
