"""The node below a GPU, as a tier: its arena is mapped here, its slots come by two-phase calls.

Whatever the number of blocks, a batch costs two calls: reserve and commit, or fetch and release.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tiered_kv.arena import Arena
from tiered_kv.errors import BadInput, StaleHandle, TierBroken, Unreachable
from tiered_kv.generations import Generations
from tiered_kv.layout import KVLayout
from tiered_kv.owed import Owed
from tiered_kv.pool import Pool
from tiered_kv.tiers.dram import DramTier
from tiered_kv.tiers.hbm import attach_pool
from tiered_kv.types import (
    Absent,
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
from tiered_kv.wire import Committed, Fetched, Link, Welcome, life_of

PARTLY = (Why.TOO_LARGE, Why.FULL)
"""The host's memory holds less than a batch: the rest of it comes next."""


@dataclass
class _Attached:
    welcome: Welcome
    arena: Arena
    leg: DramTier
    generations: Generations  # readable as long as somebody compares, also after a detach

    def arena_is_alive(self) -> bool:
        """Whether the host whose arena is mapped lives."""
        return self.arena.owner_is_alive()


class HostTier:
    """DRAM and NVMe of the host's node, below a GPU's pool. Safe from several threads.

    A host that was killed and came back is joined again at the next call; what was under way
    fails as a batch, and the blocks in HBM are untouched.
    """

    medium = Medium.HOST

    def __init__(self, link: Link, pool: Pool, owner: str, verify: float, timeout_s: float) -> None:
        """`owner` is the name under which this process proves that it lives."""
        self._link = link
        self._pool = pool
        self._owner = owner
        self._verify = verify
        self._timeout_s = timeout_s
        self._layouts: dict[Fingerprint, KVLayout] = {}
        self._attached: _Attached | None = None
        self._owed = Owed()
        self._closed = False
        self._lock = threading.Lock()

    def introduce(self, layout: KVLayout) -> Welcome:
        """Agree on a layout with the host and map its arena. One call. Raises `Unreachable`, and
        `BadLayout` when the host refuses; the layout is not kept then."""
        welcome: Welcome = self._link.call("hello", layout, timeout_s=self._timeout_s)
        with self._lock:
            self._attach(welcome)
        self._layouts[layout.fingerprint] = layout
        return welcome

    def write(self, blocks: Sequence[Located], source: Sequence[int]) -> list[Outcome]:
        """Copy blocks of one layout to the host; those it holds already cost no copy.

        Whatever is raised, the blocks here are untouched and nothing stays reserved there.
        """
        to = self._joined()
        answer = self._call(
            "reserve", blocks[0].layout, [b.key for b in blocks], self._owner,
            [b.parent for b in blocks],
        )  # fmt: skip
        if isinstance(answer, Refused):
            if answer.why is Why.TOO_LARGE and len(blocks) > 1:
                half = len(blocks) // 2  # the first half makes room below for the second
                first = self.write(blocks[:half], source[:half])
                return first + self.write(blocks[half:], source[half:])
            return [Failed(answer.why, f"host: {answer.detail}")] * len(blocks)
        assert isinstance(answer, Reservation)
        self._settle()
        try:
            self._same_life(to, answer.id)
            return self._fill(to, answer, blocks, source)
        except BaseException as error:
            self._owed.add(answer.id)
            moved = life_of(answer.id) != to.welcome.life
            if moved or not isinstance(error, Unreachable):  # else this is not answered either
                self._settle()
            raise

    def _fill(
        self, to: _Attached, answer: Reservation, blocks: Sequence[Located], source: Sequence[int]
    ) -> list[Outcome]:
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
            known = blocks[i].checksum  # of a block that was not in the sample
            digest = getattr(outcome, "checksum", None) if known is None else known
            if isinstance(outcome, Failed) or digest is None:
                break
            outcomes[i] = Done(digest)
            checksums.append(digest)
        good = len(checksums)
        committed: Committed = self._call("commit", reservation.id, checksums, good)
        for i in todo[good:]:
            if not isinstance(outcomes[i], Failed):
                outcomes[i] = Failed(Why.ORPHANED, "a block before it could not be copied")
        if committed.blocks < good:
            self._mark_lost(blocks, todo[:good], outcomes)
        return outcomes

    def _mark_lost(
        self, blocks: Sequence[Located], stored: list[int], outcomes: list[Outcome]
    ) -> None:
        """The host took fewer blocks than it was given. Either it had got them from somebody else
        meanwhile, or their parent is not there, and they must not leave the pool here."""
        answers = self._call("lookup", [blocks[i].key for i in stored])
        for i, answer in zip(stored, answers, strict=True):
            if isinstance(answer, Absent):
                outcomes[i] = Failed(Why.ORPHANED, "the host does not hold its parent")

    def read(self, blocks: Sequence[Located], into: Sequence[int]) -> list[Outcome]:
        """Copy what the host holds of these blocks into the pool; the rest is `ABSENT`.

        Two calls, and two more for each further part where the host's memory holds only a part.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(blocks):
            n = len(outcomes)
            some, why, detail = self._read(blocks[n:], into[n:])
            outcomes += some
            if not some or why not in PARTLY:
                outcomes += [Failed(why or Why.ABSENT, detail)] * (len(blocks) - len(outcomes))
        return outcomes

    def _read(
        self, blocks: Sequence[Located], into: Sequence[int]
    ) -> tuple[list[Outcome], Why | None, str]:
        """The leading blocks that came, and why no more."""
        of = self._joined()
        try:
            fetched: Fetched = self._call("fetch", blocks[0].layout, [b.key for b in blocks])
        except BadInput as error:  # of whoever asked for them; the host is well
            return [], Why.ABSENT, f"host: {error}"
        lease, n = fetched.lease, len(fetched.lease.keys)
        try:
            self._same_life(of, lease.id)
            found = [
                block._replace(slot=slot, checksum=checksum)
                for block, slot, checksum in zip(
                    blocks, lease.slots, fetched.checksums, strict=False
                )
            ]
            outcomes = of.leg.read(found, into[:n])
            if not of.generations.unchanged(lease.slots, lease.generations):
                lapsed = Failed(Why.LAPSED, "the host reused a slot during the copy")
                return [lapsed] * n, Why.LAPSED, "host"
        finally:
            with suppress(StaleHandle, Unreachable):  # it ends by itself, and the copy is done
                self._link.call("release", lease.id, timeout_s=self._timeout_s)
        bad: list[BlockKey] = []
        for i, (block, outcome) in enumerate(zip(found, outcomes, strict=True)):
            if isinstance(outcome, Done):
                outcomes[i] = Done(block.checksum, source=fetched.found[i])
            elif outcome.why is Why.CORRUPT:
                bad.append(block.key)
        if bad:  # only a sample is compared: the next reader might not notice
            self._call("distrust", bad)
        return outcomes, fetched.why, "host"

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to do: the host keeps its own account."""

    def probe(self) -> Probe:
        """Whether the host answers and its arena can be mapped; measures the copy to and from it.
        Raises `TierBroken` or `Unreachable`."""
        probe = self._rejoin().leg.probe()
        return Probe(self.medium, probe.engine, probe.write_bytes_per_s, probe.read_bytes_per_s)

    def close(self) -> None:
        """Unmap the host's arena. Idempotent; calls that run end normally, later ones raise
        `TierBroken`."""
        with self._lock:
            self._closed = True
            self._detach()

    def _call(self, verb: str, *args: object) -> Any:
        try:
            return self._link.call(verb, *args, timeout_s=self._timeout_s)
        except (StaleHandle, BadInput) as error:
            # A host that was killed and restarted between two calls knows neither our handles
            # nor our layouts: this batch is lost, the next is not.
            with self._lock:
                known = self._attached
            if isinstance(error, StaleHandle) or known is None or not known.arena_is_alive():
                self._leave(known)
                raise Unreachable(f"the host restarted during a copy: {error}") from error
            raise

    def _same_life(self, attached: _Attached, handle: int) -> None:
        """Slots are those of the arena that is mapped here, or this raises `Unreachable`.

        1. The arena of life 7 is mapped.  2. The host is killed and starts as life 8; somebody
        else introduces the same layout.  3. Life 8 answers our call with slots of its own arena.
        """
        if life_of(handle) != attached.welcome.life:
            self._leave(attached)
            raise Unreachable("the host restarted before a copy")

    def _settle(self) -> None:
        self._owed.settle(lambda verb, n: self._link.call(verb, n, timeout_s=self._timeout_s))

    def _joined(self) -> _Attached:
        with self._lock:
            attached = self._attached
        if attached is not None and attached.arena_is_alive():
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
        if self._closed:
            raise TierBroken("the host's tier is closed")
        known = self._attached.welcome if self._attached else None
        same = known is not None and known.node_id == welcome.node_id
        if known is not None and same and known.incarnation >= welcome.incarnation:
            return
        with ExitStack() as undo:
            try:
                arena = attach_pool(welcome.pool)
            except StaleHandle as error:
                raise Unreachable(f"the host ended while it was joined: {error}") from error
            undo.callback(arena.close)
            assert isinstance(arena, Arena)
            arena.pin()
            leg = DramTier(self._pool, arena, self._verify)
            attached = _Attached(welcome, arena, leg, arena.generations)
            undo.pop_all()
        self._detach()
        self._attached = attached

    def _leave(self, attached: _Attached | None) -> None:
        """Unmap an arena, unless another one was joined meanwhile."""
        with self._lock:
            if self._attached is attached:
                self._detach()

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.leg.close()
            self._attached.arena.close()
            self._attached = None
