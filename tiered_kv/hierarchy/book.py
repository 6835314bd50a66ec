"""The ledger: every block, every copy, and the few steps that change them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from tiered_kv.errors import BadConfig, BadInput
from tiered_kv.hierarchy.state import NO_SLOT, Block, TierSpec, TierState
from tiered_kv.policies.admission import AdmissionPolicy, OnDemotion
from tiered_kv.types import Absent, Answer, BlockKey, Coming, Fingerprint, Held, Medium

ABSENT = Absent()


class Watch(Protocol):
    """Who wants to know which copies come and leave. Called on every change: it must be cheap."""

    def stored(self, keys: Iterable[BlockKey], medium: Medium) -> None:
        """Copies of these blocks came to a tier."""
        ...

    def removed(self, keys: Iterable[BlockKey], medium: Medium) -> None:
        """Copies of these blocks left a tier."""
        ...

    def restart(self) -> None:
        """A tier was taken out or in: what is held has changed as a whole."""
        ...


class Book:
    """Blocks by key and the tiers that hold them, fastest first.

    `below` says that a node holds what leaves the last tier here (a GPU's hierarchy): a parent
    may then be out of sight, and a removed block's children stay.
    """

    def __init__(self, specs: Sequence[TierSpec], below: bool) -> None:
        if not specs or len({spec.medium for spec in specs}) != len(specs):
            raise BadConfig(f"tiers must be one or more different media, not {list(specs)}")
        self.tiers = [TierState(i, spec) for i, spec in enumerate(specs)]
        self.top = self.tiers[0]
        self.gate = self._gate()
        self.below = below
        self.below_online = below
        self.blocks: dict[BlockKey, Block] = {}
        self.buried: set[Block] = set()  # gone, and still pinned: their slots wait
        self.counts: Counter[str] = Counter()
        self.blank = [NO_SLOT] * len(self.tiers)
        self.watch: Watch | None = None
        self.outage = False  # whether a tier is offline
        self.answers: list[Answer] = []
        self.coming = Coming(self.top.spec.medium)
        self.refresh_answers()

    @property
    def sinks(self) -> bool:
        """Whether a node below takes what leaves."""
        return self.below and self.below_online

    def tier(self, medium: Medium) -> TierState:
        """The tier of this medium. Raises `BadInput` naming the ones there are."""
        for tier in self.tiers:
            if tier.spec.medium is medium:
                return tier
        known = ", ".join(t.spec.medium for t in self.tiers)
        raise BadInput(f"no tier {medium!r} here; there are {known}")

    def refresh_answers(self) -> None:
        """Rebuild the answer of each residency; copies in tiers that are offline do not count.
        O(blocks), when a tier goes or comes back."""
        self.outage = not all(tier.online for tier in self.tiers)
        self.answers = []
        for mask in range(1 << len(self.tiers)):
            media = tuple(t.spec.medium for t in self.tiers if mask & t.bit and t.online)
            self.answers.append(Held(media) if media else ABSENT)
        for block in self.blocks.values():
            self.answer(block)
        if self.watch is not None:
            self.watch.restart()

    def answer(self, block: Block) -> None:
        """Set what `lookup` says of a block. What is coming stays so until its move has landed."""
        if not (block.move and block.answer is self.coming):
            block.answer = self.answers[block.mask]

    def fit(self, nbytes: int) -> None:
        """The first block is about to come: policies learn how many of its size there may be."""
        for tier in self.tiers:
            tier.fit(nbytes)
        self.gate = self._gate()

    def add(
        self, key: BlockKey, parent_key: BlockKey | None, nbytes: int, layout: Fingerprint
    ) -> Block:
        """A new block without a copy yet, attached to its parent where that is known."""
        if not self.blocks:
            self.fit(nbytes)
        block = Block(key, parent_key, nbytes, layout, self.blank[:], ABSENT)
        self.blocks[key] = block
        if parent_key is not None:
            parent = self.blocks.get(parent_key)
            if parent is not None:
                block.attach(parent)
        return block

    def hold(self, block: Block, tier: TierState, slot: int) -> None:
        """A copy arrived. The caller tells the policy, a batch at a time."""
        block.slots[tier.index] = slot
        self._reside(block, block.mask | tier.bit)
        self.answer(block)
        if self.watch is not None:
            self.watch.stored((block.key,), tier.spec.medium)

    def lose(self, block: Block, tier: TierState) -> None:
        """A copy leaves and its slot is free. The block itself may now be nowhere: see `drop`."""
        tier.policy.remove((block.key,))
        tier.slots.give(block.nbytes, (block.slots[tier.index],))
        block.slots[tier.index] = NO_SLOT
        self._reside(block, block.mask & ~tier.bit)
        self.answer(block)
        if self.watch is not None:
            self.watch.removed((block.key,), tier.spec.medium)

    def drop(self, block: Block) -> int:
        """Take a block out with all that descends from it, so that no orphan stays; how many.

        Invisible at once. Slots that a lease or a move still uses come back with their last pin.
        """
        doomed = [block]
        if not self.below:
            for parent in doomed:  # grows while it is walked
                doomed += parent.children()
        for one in doomed:
            self._take_out(one)
        return len(doomed)

    def drop_leaves(self, leaves: Sequence[Block], tier: TierState) -> None:
        """Take out blocks of one size that are detached, unpinned and in this tier alone.

        The same as `drop` for each, at a third of its cost: this is how a full cache spends its
        life.
        """
        blocks, index = self.blocks, tier.index
        tier.policy.remove([block.key for block in leaves])
        tier.slots.give(leaves[0].nbytes, [block.slots[index] for block in leaves])
        for block in leaves:
            del blocks[block.key]
            block.gone = True
            block.mask = 0
        if self.watch is not None:
            self.watch.removed([block.key for block in leaves], tier.spec.medium)

    def orphaned(self, block: Block) -> bool:
        """Whether its parent is not here."""
        return block.parent_key is not None and block.parent_key not in self.blocks

    def unpin(self, block: Block) -> None:
        """A lease or a move let go of it."""
        block.pins -= 1
        if block.gone and not block.pins:
            self._free_slots(block)
            self.buried.discard(block)

    def count(self, event: str, n: int = 1) -> None:
        """Count an event for `status`."""
        if n:
            self.counts[event] += n

    def _gate(self) -> AdmissionPolicy:
        """What the pool's blocks have to pass on their way down."""
        return self.tiers[1].admission if len(self.tiers) > 1 else OnDemotion(0)

    def _take_out(self, block: Block) -> None:
        block.detach()
        for child in block.children():
            child.detach()
        del self.blocks[block.key]
        for tier in self.tiers:
            if block.mask & tier.bit:
                tier.policy.remove((block.key,))
                if self.watch is not None:
                    self.watch.removed((block.key,), tier.spec.medium)
        block.gone = True
        if block.pins:
            self.buried.add(block)
        else:
            self._free_slots(block)

    def _free_slots(self, block: Block) -> None:
        for tier in self.tiers:
            if block.mask & tier.bit:
                tier.slots.give(block.nbytes, (block.slots[tier.index],))
        self._reside(block, 0)

    def _reside(self, block: Block, mask: int) -> None:
        """Change where a block is, and each tier's count of copies that are below it too."""
        for tier in self.tiers:
            bit, lower, was = tier.bit, tier.lower, block.mask
            tier.shared += (mask & bit and mask & lower) > 0
            tier.shared -= (was & bit and was & lower) > 0
        block.mask = mask

    def live(self, keys: Iterable[BlockKey]) -> list[Block]:
        """The blocks of these keys that are here."""
        get = self.blocks.get
        return [b for b in map(get, keys) if b is not None]
