"""The records behind the hierarchy: one per block, one per tier."""

from dataclasses import dataclass

from tiered_kv.errors import BadConfig
from tiered_kv.policies import eviction
from tiered_kv.policies.admission import admission
from tiered_kv.slots import SlotPool
from tiered_kv.types import Answer, BlockKey, Fingerprint, Medium, Usage

NO_SLOT = -1
HINT_BLOCK_BYTES = 2 << 20  # for the policies' capacity hint, before the first block was seen


class Block:
    """Everything known of one block. Lives while a tier holds it or a move brings it.

    `parent`, `child`, `next` and `prev` thread the prefix tree through the blocks themselves, so
    that leaves are found and subtrees walked without a set a block. `pins` counts leases and
    moves, `guards` the reservations that will attach children.
    """

    __slots__ = (
        "answer",
        "checksum",
        "child",
        "gone",
        "guards",
        "key",
        "layout",
        "mask",
        "move",
        "nbytes",
        "next",
        "parent",
        "parent_key",
        "pins",
        "prev",
        "slots",
    )

    def __init__(
        self,
        key: BlockKey,
        parent_key: BlockKey | None,
        nbytes: int,
        layout: Fingerprint,
        slots: list[int],
        answer: Answer,
    ) -> None:
        self.key = key
        self.parent_key = parent_key
        self.nbytes = nbytes
        self.layout = layout
        self.slots = slots
        self.answer = answer
        self.mask = 0
        self.pins = 0
        self.guards = 0
        self.move = 0
        self.gone = False
        self.checksum: int | None = None
        self.parent: Block | None = None
        self.child: Block | None = None
        self.next: Block | None = None
        self.prev: Block | None = None

    def attach(self, parent: "Block") -> None:
        """Become a child of `parent`."""
        first = parent.child
        self.parent = parent
        self.prev = None
        self.next = first
        if first is not None:
            first.prev = self
        parent.child = self

    def detach(self) -> None:
        """Stop being anybody's child."""
        parent = self.parent
        if parent is None:
            return
        if self.prev is None:
            parent.child = self.next
        else:
            self.prev.next = self.next
        if self.next is not None:
            self.next.prev = self.prev
        self.parent = self.next = self.prev = None

    def children(self) -> "list[Block]":
        """The blocks that are attached to it. O(children)."""
        found = []
        child = self.child
        while child is not None:
            found.append(child)
            child = child.next
        return found


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier as the hierarchy sees it.

    Above `high` (a share of the capacity) blocks leave until `low`. `restore_floor` is the share
    that only promotions may take, so that what lies below can always be brought up. `admission`
    says which blocks of the pool above may come in, and when (of the first tier below it alone).
    """

    medium: Medium
    capacity_bytes: int
    slab_bytes: int
    stripes: int = 1
    high: float = 0.90
    low: float = 0.80
    restore_floor: float = 0.0
    policy: str = "lru"
    admission: str = "on_demotion"

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high <= 1.0:
            raise BadConfig(
                f"{self.medium}: watermarks must be 0 < low <= high <= 1, "
                f"not low {self.low} and high {self.high}"
            )
        if not 0.0 <= self.restore_floor < 1.0:
            raise BadConfig(f"{self.medium}: restore_floor {self.restore_floor} is not in [0, 1)")


class TierState:
    """Slots and order of one tier."""

    __slots__ = ("admission", "bit", "hint", "index", "leaving", "lower", "online", "policy",
                 "reserved", "shared", "slots", "spec", "wanted")  # fmt: skip

    def __init__(self, index: int, spec: TierSpec) -> None:
        self.index = index
        self.bit = 1 << index
        self.lower = ~((self.bit << 1) - 1)  # mask of the tiers below
        self.spec = spec
        self.slots = SlotPool(spec.capacity_bytes, spec.slab_bytes, spec.stripes)
        self.hint = max(1, self.slots.capacity_bytes // HINT_BLOCK_BYTES)
        self.policy = eviction(spec.policy, self.hint)
        self.admission = admission(spec.admission, self.hint)
        self.online = True
        self.leaving: dict[int, int] = {}  # block size -> blocks whose demotion is under way
        self.wanted: dict[int, int] = {}  # block size -> slots that somebody waits for
        self.reserved = 0  # bytes in reservations and incoming moves
        self.shared = 0  # copies here that a tier below has too

    def fit(self, nbytes: int) -> None:
        """The first blocks are about to come, and have this size: policies whose hint was another
        begin anew. Only for a hierarchy without a block."""
        hint = max(1, self.slots.total(nbytes))
        if hint != self.hint:
            self.hint = hint
            self.policy = eviction(self.spec.policy, hint)
            self.admission = admission(self.spec.admission, hint)

    def floor(self, nbytes: int) -> int:
        """Slots of this size that are kept for promotions."""
        return int(self.spec.restore_floor * self.slots.total(nbytes))

    @property
    def leaving_cost(self) -> float:
        """Bytes of capacity that moves under way will free."""
        return sum(n * self.slots.cost(nbytes) for nbytes, n in self.leaving.items() if n)

    def usage(self) -> Usage:
        """What `status` shows of this tier."""
        return Usage(
            medium=self.spec.medium,
            capacity_bytes=self.slots.capacity_bytes,
            used_bytes=round(self.slots.used_cost),
            reserved_bytes=self.reserved,
            blocks=len(self.policy),
            high=self.spec.high,
            low=self.spec.low,
            online=self.online,
        )
