"""Making room in a tier: who leaves, and how.

Blocks leave in the order of the policy: those that a lower tier has too at once (free), the others
when they are written there. Who cannot wait for that takes any copies that a lower tier has too,
then leaves of the prefix tree (lost, and counted). What is leased, moving or reserved never leaves.
While a lower tier is offline its copies do not count: blocks leave in the order of the policy
alone, and those that have a copy there wait for its return.
"""

from collections.abc import Iterable

from tiered_kv.hierarchy.book import Book
from tiered_kv.hierarchy.state import Block, TierState
from tiered_kv.types import BlockKey, Why

Taken = list[tuple[Block, Block | None]]
"""Leaves that were chosen to go, each with the parent that it was taken off."""


class Room:
    """Frees slots of a tier. Every call frees all that was asked for or changes nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def make(self, tier: TierState, nbytes: int, n: int, *, store: bool, force: bool) -> Why | None:
        """Make `n` slots of a size free; None when they are.

        A `store` leaves the restore floor alone. `DEMOTING` means that blocks could leave for a
        lower tier: carry out `due` moves and ask again, or `force` to drop instead.
        """
        floor = tier.floor(nbytes) if store else 0
        if n > tier.slots.total(nbytes) - floor:
            return Why.TOO_LARGE
        need = n + floor - tier.slots.room(nbytes)
        if need > 0 and tier.slots.reclaim(nbytes):
            need = n + floor - tier.slots.room(nbytes)
        if need <= 0:
            return None
        if not force and self._can_demote(tier):
            clean = self._clean_in_order(tier, nbytes, need)
            if len(clean) < need:
                tier.wanted[nbytes] = max(tier.wanted.get(nbytes, 0), n + floor)
                return Why.DEMOTING
            self.release(clean, tier)
            return None
        clean = self._clean(tier, nbytes, need)
        short = need - len(clean)
        if short > 0:
            leaves = [] if self._book.outage else self._leaves(tier, nbytes, short)
            if len(leaves) < short:
                self._put_back(leaves, tier)
                return self._last_resort(tier, nbytes, need)
            self.discard(leaves, tier)
        self.release(clean, tier)
        return None

    def lower(self, tier: TierState) -> TierState | None:
        """The next tier down that takes demotions."""
        for other in self._book.tiers[tier.index + 1 :]:
            if other.online:
                return other
        return None

    def release(self, blocks: list[Block], tier: TierState) -> None:
        """Free copies that a lower tier has too. Leaving is the last use that the lower tier's
        order hears of: blocks rest there in the order in which they left."""
        for block in blocks:
            self._book.lose(block, tier)
        self._book.count(f"evicted.{tier.spec.medium}", len(blocks))
        for other in self._book.tiers[tier.index + 1 :]:
            left = [b.key for b in reversed(blocks) if b.mask & other.bit]
            if left:
                other.policy.use(left)

    def discard(self, leaves: Taken, tier: TierState) -> None:
        """Drop blocks that no tier holds any longer."""
        if leaves:
            self._book.drop_leaves([block for block, _ in leaves], tier)
        self._book.count(f"dropped.{Why.PRESSURE}", len(leaves))
        self._book.count(f"evicted.{tier.spec.medium}", len(leaves))

    def shed(self, tier: TierState, blocks: Iterable[Block]) -> None:
        """Let go of those blocks that can go: what other tiers have too, and leaves."""
        for block in blocks:
            if block.gone or block.pins:
                continue
            if block.mask != tier.bit:
                self._expend([block], tier)
            elif not (block.child or block.guards):
                block.detach()
                self.discard([(block, None)], tier)

    def bottom(self, tier: TierState, nbytes: int, n: int) -> bool:
        """Free `n` slots in a tier that takes demotions; False and nothing changed if not."""
        need = n - tier.slots.room(nbytes)
        if need > 0 and tier.slots.reclaim(nbytes):
            need = n - tier.slots.room(nbytes)
        if need <= 0:
            return True
        clean = self._clean(tier, nbytes, need)
        leaves = self._leaves(tier, nbytes, need - len(clean))
        shadows = self._shadows(tier, nbytes, need - len(clean) - len(leaves))
        foreign = self._foreign(tier, nbytes, need - len(clean) - len(leaves) - len(shadows))
        if foreign is None:
            self._put_back(leaves, tier)
            return False
        self.discard(leaves, tier)
        self.release(clean, tier)
        self._expend(shadows + foreign, tier)
        tier.slots.reclaim(nbytes)
        return True

    def trim(self, tier: TierState, excess: float) -> None:
        """Drop blocks of a tier that has none below it, until `excess` bytes are free or none
        can go."""
        for nbytes in sorted(tier.slots.sizes(), key=tier.slots.used, reverse=True):
            if excess <= 0:
                return
            cost = tier.slots.cost(nbytes)
            n = -int(-excess // cost)
            if self._book.outage:
                gone = self._expendable(tier, nbytes, n)
                self._expend(gone, tier)
                excess -= len(gone) * cost
            else:
                leaves = self._leaves(tier, nbytes, n)
                self.discard(leaves, tier)
                excess -= len(leaves) * cost

    def _can_demote(self, tier: TierState) -> bool:
        if not (self._book.sinks or self.lower(tier)):
            return False
        blocks = self._book.blocks

        def may_leave(key: BlockKey) -> bool:
            block = blocks[key]
            return block.pins == (block.move > 0)  # what is being written can leave after that

        return any(tier.leaving.values()) or bool(tier.policy.victims(1, may_leave))

    def _clean_in_order(self, tier: TierState, nbytes: int, n: int) -> list[Block]:
        """The `n` blocks of this size that are to leave next, up to the first one that a lower
        tier lacks: it has to be written before its turn is over."""
        lower, blocks = self._lower_bits(tier), self._book.blocks
        if not (lower and tier.shared):
            return []
        dirty = False
        found: list[Block] = []

        def free(key: BlockKey) -> bool:
            nonlocal dirty
            block = blocks[key]
            if block.pins or block.nbytes != nbytes:
                return False
            dirty = dirty or not block.mask & lower
            if not dirty:
                found.append(block)
            return True

        tier.policy.victims(n, free)
        return found

    def _lower_bits(self, tier: TierState) -> int:
        below = self._book.tiers[tier.index + 1 :]
        return sum(other.bit for other in below if other.online)

    def _clean(self, tier: TierState, nbytes: int, n: int) -> list[Block]:
        lower = self._lower_bits(tier)
        if not (lower and tier.shared):
            return []  # else a tier full of unwritten blocks is searched at each reservation
        blocks = self._book.blocks

        def free(key: BlockKey) -> bool:
            block = blocks[key]
            return not block.pins and bool(block.mask & lower) and block.nbytes == nbytes

        return [blocks[key] for key in tier.policy.victims(n, free)]

    def _leaves(self, tier: TierState, nbytes: int, n: int) -> Taken:
        """Up to `n` blocks that only this tier holds and no block descends from.

        Each chosen leaf is taken off its parent (and marked by an empty mask) at once, which may
        make that the next leaf; who does not go through with it calls `_put_back`. Blocks that a
        faster tier holds too are in use there: they get a second turn instead of being asked
        again and again.
        """
        blocks = self._book.blocks
        bit = tier.bit
        taken: Taken = []
        in_use: list[BlockKey] = []

        def leaf(key: BlockKey) -> bool:
            block = blocks[key]
            if block.mask != bit:
                if block.mask & (bit - 1):
                    in_use.append(key)
                return False
            if block.pins or block.child or block.guards or block.nbytes != nbytes:
                return False
            taken.append((block, block.parent))
            block.detach()
            block.mask = 0
            return True

        tier.policy.victims(n, leaf)
        for _, parent in taken:  # grows: some were asked before the last of their children
            if len(taken) >= n:
                break
            if parent is not None and parent.mask == bit:
                leaf(parent.key)
        if in_use:
            tier.policy.use(in_use[::-1])
        return taken

    def _put_back(self, taken: Taken, tier: TierState) -> None:
        for block, parent in reversed(taken):
            block.mask = tier.bit
            if parent is not None:
                block.attach(parent)

    def _shadows(self, tier: TierState, nbytes: int, n: int) -> list[Block]:
        """Up to `n` copies under a faster tier's copy: redundant, a full tier's last resort.

        Only those from which nothing in this tier, or on its way here, descends, so that it stays
        self-contained.
        """
        blocks = self._book.blocks
        found: dict[Block, None] = {}

        def shadow(key: BlockKey) -> bool:
            block = blocks[key]
            if block.pins or not block.mask & (tier.bit - 1) or block.nbytes != nbytes:
                return False
            if any(c.move or (c.mask & tier.bit and c not in found) for c in block.children()):
                return False
            found[block] = None
            return True

        tier.policy.victims(n, shadow)
        return list(found)

    def _last_resort(self, tier: TierState, nbytes: int, need: int) -> Why | None:
        blocks = self._expendable(tier, nbytes, need)
        foreign = self._foreign(tier, nbytes, need - len(blocks))
        if foreign is None:
            return Why.FULL
        self._expend(blocks + foreign, tier)
        tier.slots.reclaim(nbytes)
        return None

    def _expendable(self, tier: TierState, nbytes: int, n: int) -> list[Block]:
        """Up to `n` blocks that can leave somehow, in the order of the policy: as one of several
        copies, or lost with all that descends from them."""
        blocks = self._book.blocks

        def expendable(key: BlockKey) -> bool:
            block = blocks[key]
            return block.nbytes == nbytes and not self._stuck(block, tier)

        return [blocks[key] for key in tier.policy.victims(n, expendable)]

    def _expend(self, blocks: Iterable[Block], tier: TierState) -> None:
        """Let blocks that are not stuck leave, each with its subtree where it is lost."""
        for block in blocks:
            if block.gone:
                continue  # went with an ancestor
            self._book.count(f"evicted.{tier.spec.medium}")
            if block.mask != tier.bit:
                self._book.lose(block, tier)
            else:
                self._book.count(f"dropped.{Why.PRESSURE}", self._book.drop(block))

    def _foreign(self, tier: TierState, nbytes: int, need: int) -> list[Block] | None:
        """Blocks of other sizes whose leaving empties enough slabs for `need` slots of this size;
        None if there are not enough.

        O(blocks of the tier); only when layouts compete and the asking one has nothing to give.
        """
        if need <= 0:
            return []
        slabs = self._removable_slabs(tier, nbytes)
        enough = -(-need // tier.slots.per_slab(nbytes))
        if len(slabs) < enough:
            return None
        return [block for slab in slabs[:enough] for block in slab]

    def _removable_slabs(self, tier: TierState, nbytes: int) -> list[list[Block]]:
        """Blocks of each slab of another size whose every used slot can be freed now; first the
        slabs of which nothing is much wanted."""
        blocks = self._book.blocks
        others = tier.policy.victims(len(tier.policy), lambda key: blocks[key].nbytes != nbytes)
        by_slab: dict[int, list[Block]] = {}
        for key in reversed(others):  # so that slabs lie in the order of their most wanted block
            block = blocks[key]
            slab = block.slots[tier.index] // tier.slots.slab_bytes
            by_slab.setdefault(slab, []).append(block)
        used, stuck = tier.slots.used_by_slab(nbytes), self._all_stuck()
        return [
            some
            for slab, some in reversed(by_slab.items())
            if len(some) == used[slab]
            and not any(b.pins or (b.mask == tier.bit and b in stuck) for b in some)
        ]

    def _all_stuck(self) -> set[Block]:
        """What is pinned or guarded, and all that such blocks descend from. O(blocks)."""
        stuck: set[Block] = set()
        for block in self._book.blocks.values():
            one: Block | None = block if block.pins or block.guards else None
            while one is not None and one not in stuck:
                stuck.add(one)
                one = one.parent
        return stuck

    def _stuck(self, block: Block, tier: TierState) -> bool:
        """Whether a block cannot leave the tier, alone or, where it is lost, with its subtree."""
        if block.pins or block.mask != tier.bit:
            return block.pins > 0
        walk = [block]
        for one in walk:  # grows while it is walked
            if one.pins or one.guards:
                return True
            walk += one.children()
        return False
