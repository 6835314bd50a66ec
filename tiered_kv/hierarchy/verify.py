"""Every invariant of the hierarchy, checked from scratch. For tests and `doctor`."""

from tiered_kv.hierarchy.core import Hierarchy
from tiered_kv.hierarchy.state import NO_SLOT, Block, TierState
from tiered_kv.types import Medium


def check(hierarchy: Hierarchy) -> None:
    """Raise `AssertionError` with what is wrong. O(blocks); changes nothing."""
    book = hierarchy.book
    for key, block in book.blocks.items():
        assert block.key == key, f"{key.hex()} is filed wrongly"
        assert not block.gone, f"{key.hex()} is gone and still on file"
        assert block.mask or block.move, f"{key.hex()} is nowhere and not coming"
        assert (block.answer is book.coming) or block.answer is book.answers[block.mask], (
            f"{key.hex()} in {block.mask:b} answers {block.answer}"
        )
        _check_family(hierarchy, block)
    for tier in book.tiers:
        _check_tier(hierarchy, tier)
    _check_moves(hierarchy)
    pins, guards = hierarchy.pins(), hierarchy.guards()
    for block in [*book.blocks.values(), *book.buried]:
        assert block.pins == pins.get(block, 0), f"{block.key.hex()}: {block.pins} pins"
        assert block.guards == guards.get(block, 0), f"{block.key.hex()}: {block.guards} guards"
    assert all(b.gone and b.pins for b in book.buried), "a buried block has no pin"


def _check_tier(hierarchy: Hierarchy, tier: TierState) -> None:
    book, medium = hierarchy.book, tier.spec.medium
    here = [b for b in book.blocks.values() if b.mask & tier.bit]
    tier.policy.check([b.key for b in here])
    here += [b for b in book.buried if b.mask & tier.bit]
    slots = [b.slots[tier.index] for b in here]
    assert NO_SLOT not in slots, f"a copy in {medium} has no slot"
    slabs = {nbytes: tier.slots.slabs_of(nbytes) for nbytes in tier.slots.sizes()}
    for block, slot in zip(here, slots, strict=True):
        slab = slot // tier.slots.slab_bytes
        assert slab in slabs[block.nbytes], f"a slot of {medium} lies in a slab of another size"
    slots += hierarchy.outstanding_slots(medium)
    assert len(set(slots)) == len(slots), f"a slot of {medium} has two owners"
    used = sum(tier.slots.used(nbytes) for nbytes in tier.slots.sizes())
    assert used == len(slots), f"{medium}: {used} slots used, {len(slots)} owned"
    tier.slots.check(slots)
    below = sum(1 for block in here if block.mask & tier.lower)
    assert tier.shared == below, f"{medium}: {tier.shared} copies shared, not {below}"


def _check_moves(hierarchy: Hierarchy) -> None:
    """What blocks and tiers say of moves is what the moves in flight say."""
    book, flights = hierarchy.book, hierarchy.in_flight()
    moving = {block: flight.move for flight in flights for block in flight.blocks}
    for block in [*book.blocks.values(), *book.buried]:
        move = moving.get(block)
        assert block.move == (move.id if move else 0), f"{block.key.hex()}: move {block.move}"
        coming = move is not None and move.target is book.top.spec.medium
        assert block.gone or coming == (block.answer is book.coming), f"{block.key.hex()} lies"
    for tier in book.tiers:
        medium, leaving = tier.spec.medium, dict.fromkeys(tier.leaving, 0)
        for flight in flights:
            if flight.move.source is medium and flight.leaving:
                leaving[flight.move.nbytes] += len(flight.leaving)
        assert leaving == tier.leaving, f"{medium}: {tier.leaving} leave, not {leaving}"
        reserved = sum(f.move.nbytes * len(f.blocks) for f in flights if f.move.target is medium)
        if tier is book.top:
            reserved += hierarchy.reserved_bytes()
        assert tier.reserved == reserved, f"{medium}: {tier.reserved} reserved, not {reserved}"
    assert all(f.move.source is not Medium.HOST or book.below for f in flights)


def _check_family(hierarchy: Hierarchy, block: Block) -> None:
    book, name = hierarchy.book, block.key.hex()
    if block.parent_key is not None and not book.below:
        assert block.parent_key in book.blocks, f"{name} is resident and its parent is not"
        assert block.parent is book.blocks[block.parent_key], f"{name} has another parent"
    if block.parent is not None:
        assert book.blocks.get(block.parent.key) is block.parent, f"{name}'s parent has gone"
        before = block.parent.child if block.prev is None else block.prev.next
        assert before is block, f"{name} is not among its parent's children"
    for one, other in ((block, block.prev), (block.next, block)):
        if one is not None and other is not None:
            assert other.next is one, f"{name}: siblings disagree"
            assert one.prev is other, f"{name}: siblings disagree"
            assert one.parent is other.parent, f"{name}: siblings have different parents"
    if block.child is not None:
        assert block.child.parent is block, f"{name}: its child has another parent"
        assert block.child.prev is None, f"{name}: its first child is not the first"
