"""The node below a GPU, as a tier: its arena is mapped here, its slots come by two-phase calls.

Whatever the number of blocks, a batch costs two calls: reserve and commit, or fetch and release.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.arena import Arena
from tiered_kv.errors import StaleHandle, TierBroken, Unreachable
from tiered_kv.layout import KVLayout
from tiered_kv.pool import Pool
from tiered_kv.tiers.dram import DramTier
from tiered_kv.tiers.hbm import attach_pool
from tiered_kv.types import (
    BlockKey,
    Done,
    Failed,
    Fingerprint,
    Located,
    Medium,
    Outcome,
    Probe,
    Refused,
    Reservation,
    Why,
)
from tiered_kv.wire import Fetched, Link, Welcome


@dataclass
class _Attached:
    welcome: Welcome
    arena: Arena
    leg: DramTier


class HostTier:
    """DRAM and NVMe of the host's node, below a GPU's pool. Safe from several threads.

    A host that was killed and came back is joined again at the next call; what was under way
    fails as a batch, and the blocks in HBM are untouched.
    """

    medium = Medium.HOST

    def __init__(
        self, link: Link, pool: Pool, owner: str, verify: float, timeout_s: float
    ) -> None:
        """`owner` is the name under which this process proves that it lives."""
        self._link = link
        self._pool = pool
        self._owner = owner
        self._verify = verify
        self._timeout_s = timeout_s
        self._layouts: dict[Fingerprint, KVLayout] = {}
        self._attached: _Attached | None = None
        self._lock = threading.Lock()

    def introduce(self, layout: KVLayout) -> Welcome:
        """Agree on a layout with the host and map its arena. One call. Raises `Unreachable`."""
        self._layouts[layout.fingerprint] = layout
        welcome: Welcome = self._link.call("hello", layout, timeout_s=self._timeout_s)
        with self._lock:
            self._attach(welcome)
        return welcome

    def write(self, blocks: Sequence[Located], source: Sequence[int]) -> list[Outcome]:
        """Copy blocks of one layout to the host; those it holds already cost no copy."""
        to = self._joined()
        answer = self._call(
            "reserve", blocks[0].layout, [b.key for b in blocks], self._owner,
            [b.parent for b in blocks],
        )  # fmt: skip
        if isinstance(answer, Refused):
            return [Failed(answer.why, f"host: {answer.detail}")] * len(blocks)
        assert isinstance(answer, Reservation)
        if not answer.keys:
            self._call("abort", answer.id)
            return [Done(copied=False)] * len(blocks)
        missing = dict(zip(answer.keys, answer.slots, strict=True))
        todo = [i for i, block in enumerate(blocks) if block.key in missing]
        copied = to.leg.write(
            [blocks[i]._replace(slot=missing[blocks[i].key]) for i in todo],
            [source[i] for i in todo],
        )
        return self._commit(answer, blocks, todo, copied)

    def _commit(
        self, reservation: Reservation, blocks: Sequence[Located], todo: list[int],
        copied: list[Outcome],
    ) -> list[Outcome]:  # fmt: skip
        """Commit up to the first block that failed: what descends from it could not be hit."""
        outcomes: list[Outcome] = [Done(copied=False) for _ in blocks]
        checksums: list[int] = []
        for i, outcome in zip(todo, copied, strict=True):
            outcomes[i] = outcome
            if isinstance(outcome, Failed) or outcome.checksum is None:
                break
            checksums.append(outcome.checksum)
        good = len(checksums)
        self._call("commit", reservation.id, checksums, good)
        for i in todo[good:]:
            if not isinstance(outcomes[i], Failed):
                outcomes[i] = Failed(Why.ORPHANED, "a block before it could not be copied")
        return outcomes

    def read(self, blocks: Sequence[Located], into: Sequence[int]) -> list[Outcome]:
        """Copy what the host holds of these blocks into the pool; the rest is `ABSENT`."""
        of = self._joined()
        fetched = self._call("fetch", blocks[0].layout, [b.key for b in blocks])
        assert isinstance(fetched, Fetched)
        lease, n = fetched.lease, len(fetched.lease.keys)
        if n == 0:
            self._call("release", lease.id)
            return [Failed(fetched.why or Why.ABSENT, "host")] * len(blocks)
        found = [
            block._replace(slot=slot, checksum=checksum)
            for block, slot, checksum in zip(blocks, lease.slots, fetched.checksums, strict=False)
        ]
        outcomes = of.leg.read(found, into[:n])
        intact = of.arena.generations.unchanged(lease.slots, lease.generations)
        self._call("release", lease.id)
        if not intact:
            outcomes = [Failed(Why.LAPSED, "the host reused a slot during the copy")] * n
        for i, (block, outcome) in enumerate(zip(found, outcomes, strict=True)):
            if isinstance(outcome, Done):
                outcomes[i] = Done(block.checksum, source=fetched.found[i])
        return outcomes + [Failed(fetched.why or Why.ABSENT, "host")] * (len(blocks) - n)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to do: the host keeps its own account."""

    def probe(self) -> Probe:
        """Whether the host answers and its arena can be mapped; measures the copy to and from it.
        Raises `TierBroken` or `Unreachable`."""
        probe = self._rejoin().leg.probe()
        return Probe(self.medium, probe.engine, probe.write_bytes_per_s, probe.read_bytes_per_s)

    def close(self) -> None:
        """Unmap the host's arena. Idempotent."""
        with self._lock:
            self._detach()

    def _call(self, verb: str, *args: object) -> object:
        try:
            return self._link.call(verb, *args, timeout_s=self._timeout_s)
        except StaleHandle as error:
            # It was killed and restarted between two calls: this batch is lost, the next is not.
            with self._lock:
                self._detach()
            raise Unreachable(f"the host restarted during a copy: {error}") from error

    def _joined(self) -> _Attached:
        with self._lock:
            attached = self._attached
        if attached is not None and attached.arena.owner_is_alive():
            return attached
        return self._rejoin()

    def _rejoin(self) -> _Attached:
        for layout in list(self._layouts.values()):
            self.introduce(layout)
        with self._lock:
            if self._attached is None:
                raise TierBroken("no layout was introduced to the host yet")
            return self._attached

    def _attach(self, welcome: Welcome) -> None:
        known = self._attached
        if known is not None and known.welcome.incarnation == welcome.incarnation:
            return
        self._detach()
        arena = attach_pool(welcome.pool)
        assert isinstance(arena, Arena)
        arena.pin()
        self._attached = _Attached(welcome, arena, DramTier(self._pool, arena, self._verify))

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.leg.close()
            self._attached.arena.close()
            self._attached = None
