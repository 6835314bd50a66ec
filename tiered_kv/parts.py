"""What a node is assembled from: its media, and the steps that touch more than one of them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tiered_kv import records
from tiered_kv.errors import BadInput
from tiered_kv.folder import Folder
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.liveness import Alive
from tiered_kv.pool import Pool
from tiered_kv.sessions import Session
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.host import HostTier
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import BlockKey, Located, Medium, SessionId
from tiered_kv.wire import Link


@dataclass
class Parts:
    """Made by `assemble`. `specs[0]` is the pool, the others are in `tiers`; a GPU's node has
    `below`, the link to its host, and `host`, the tier that copies over it. `rates` has the bytes
    a second that the self-test of a tier read."""

    node_id: str
    incarnation: int
    medium: Medium
    pool: Pool
    specs: list[TierSpec]
    tiers: dict[Medium, Tier]
    below: Link | None = None
    host: HostTier | None = None
    nvme: NvmeTier | None = None
    folder: Folder | None = None
    alive: Alive | None = None
    notes: tuple[str, ...] = ()
    rates: Mapping[Medium, float] = field(default_factory=dict)

    def open_slots(self, slots: Sequence[int], hierarchy: Hierarchy) -> tuple[int, ...]:
        """Generations of slots that are about to be filled; their former readers will notice."""
        self.retire(hierarchy)
        return self.pool.generations.open(slots)

    def retire(self, hierarchy: Hierarchy) -> None:
        """Tell readers of slots whose slab was cut anew for another block size."""
        recut = hierarchy.book.top.slots.take_recut()
        if recut:
            self.pool.generations.retire(recut)

    def leftovers(self) -> tuple[list[Located], list[Session], int]:
        """Blocks and sessions of a former incarnation, and how many sessions were unreadable."""
        if self.nvme is None:
            return [], [], 0
        sessions: list[Session] = []
        bad = 0
        for _, doc, _ in self.nvme.all_sessions():
            try:
                sessions.append(records.load(doc))
            except BadInput:
                bad += 1
        return self.nvme.restore(), sessions, bad

    def put_sessions(self, sessions: Sequence[Session]) -> None:
        """Write sessions beside the blocks. Blocks; raises `TierBroken`."""
        if self.nvme is not None:
            self.nvme.put_sessions([(s.id.encode(), records.dump(s), s.used_s) for s in sessions])

    def forget(self, sessions: Sequence[SessionId], keys: Sequence[BlockKey]) -> None:
        """Remove sessions and blocks for good, so that no later incarnation finds them."""
        if self.nvme is not None:
            self.nvme.drop_sessions([sid.encode() for sid in sessions])
            self.nvme.drop(keys)

    def sync(self) -> None:
        """Make what was written survive a loss of power. Blocks."""
        if self.nvme is not None:
            self.nvme.flush()

    def close(self) -> None:
        """Give everything back, last things first. Idempotent; what fails does not keep the rest
        from being given back."""
        with ExitStack() as closing:
            for one in (self.folder, self.alive, self.pool, *self.tiers.values()):
                if one is not None:
                    closing.callback(one.close)
