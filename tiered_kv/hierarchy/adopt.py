"""Warm restart: what a former incarnation left in a tier becomes residency again."""

from collections.abc import Sequence

from tiered_kv.hierarchy.book import Book
from tiered_kv.hierarchy.state import TierState
from tiered_kv.types import BlockKey, Located, Why


def adopt(book: Book, tier: TierState, found: Sequence[Located]) -> list[BlockKey]:
    """Hold every found block whose ancestors are held too and whose slot is valid.

    `found` comes in the order of writing, which stands for the order of use. O(found).
    """
    rows = {row.key: row for row in found if row.checksum is not None}
    ordered = _prefix_order(book, rows)
    by_size: dict[int, list[Located]] = {}
    for row in ordered:
        by_size.setdefault(row.nbytes, []).append(row)
    valid: set[BlockKey] = set()
    for nbytes, some in by_size.items():
        if nbytes < 1 or nbytes * tier.slots.stripes > tier.slots.slab_bytes:
            continue
        taken = tier.slots.adopt(nbytes, [row.slot for row in some])
        valid.update(row.key for row, good in zip(some, taken, strict=True) if good)
    kept: list[Located] = []
    for row in ordered:
        if row.key not in valid:
            continue
        if row.parent is not None and row.parent not in book.blocks:
            tier.slots.give(row.nbytes, (row.slot,))
            continue
        block = book.add(row.key, row.parent, row.nbytes, row.layout)
        block.checksum = row.checksum
        book.hold(block, tier, row.slot)
        kept.append(row)
    tier.policy.admit(_most_wanted_first(kept, found), ())
    book.count("adopted", len(kept))
    book.count(f"dropped.{Why.ORPHANED}", len(found) - len(kept))
    return [row.key for row in kept]


def _prefix_order(book: Book, rows: dict[BlockKey, Located]) -> list[Located]:
    """Rows with every parent before its children; those that hang in the air are left out."""
    children: dict[BlockKey | None, list[Located]] = {}
    for row in rows.values():
        here = row.key in book.blocks
        if not here:
            children.setdefault(row.parent, []).append(row)
    ready = [*children.pop(None, ())]
    for parent in [p for p in children if p is not None and p in book.blocks]:
        ready += children.pop(parent)
    for row in ready:  # grows while it is walked
        ready += children.pop(row.key, ())
    return ready


def _most_wanted_first(kept: Sequence[Located], found: Sequence[Located]) -> list[BlockKey]:
    """Last written first, and every block before its descendants: whole runs, tails last."""
    written = {row.key: i for i, row in enumerate(found)}
    for row in reversed(kept):  # children come before their parents here
        if row.parent in written:
            written[row.parent] = max(written[row.parent], written[row.key])
    # the sort is stable: of equals, which are a block and its ancestors, the ancestor stays first
    return [row.key for row in sorted(kept, key=lambda row: -written[row.key])]
