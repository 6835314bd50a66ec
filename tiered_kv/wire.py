"""What crosses between processes, and the handles that make a stale one harmless."""

import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.policies.load_or_recompute import Decision
from tiered_kv.pool import PoolHandle
from tiered_kv.sessions import Session
from tiered_kv.types import BlockKey, Fingerprint, Lease, Medium, Why

HANDLE_BITS = 40
"""A handle is `life_number << 40 | number`: 10^12 of them a life, and none outlives it."""


NO_LEASE = 0
"""The id of an empty lease that pins nothing: there is nothing to release."""


def life_number(node_id: str, incarnation: int) -> int:
    """One number for a life of a node.

    The incarnation alone would not do: a node whose folder was wiped is another node, and counts
    from 1 again.
    """
    return incarnation << 32 | zlib.crc32(node_id.encode())


def life_of(handle: int) -> int:
    """Which life of a node gave a reservation or lease away.

    Its slots are those of that life's pool, and of no other: whoever has another one mapped must
    not touch a byte of it.
    """
    return handle >> HANDLE_BITS


class Link(Protocol):
    """How a process calls a node: in process, or through a Ray actor."""

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a verb of `Node` and wait. Blocks; safe from any thread.

        Raises `Unreachable` when there is no answer in `timeout_s`, and what the verb raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to `hello`: whom one talks to, and how to map its pool."""

    node_id: str
    incarnation: int
    medium: Medium
    pool: PoolHandle
    shm_folder: str
    describe: str

    @property
    def life(self) -> int:
        """See `life_number`: what `life_of` says of each handle of this life."""
        return life_number(self.node_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to `fetch` and `wake`: the leading blocks that are readable now.

    `found[i]` says where block i was when it was asked for; `missed` of the run are not covered,
    for reason `why`.
    """

    lease: Lease
    found: tuple[Medium, ...]
    missed: int
    why: Why | None
    seconds: float
    checksums: tuple[int | None, ...] = ()
    session: Session | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What one rank of an engine wants to know of a request; see `Node.find`.

    `run` has the keys of its complete blocks. `tails[i]` are the names that block i may have as
    long as it is incomplete, shortest first: one list a block of the run, and at most one more for
    the block behind it. Without them only complete blocks are found.
    """

    layout: Fingerprint
    run: tuple[BlockKey, ...]
    tails: tuple[tuple[BlockKey, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to `find`: what all ranks hold of a request, and what of it is worth loading.

    `blocks` leading complete blocks are held by every rank, in whatever tier, and behind them the
    tail `tails[blocks][tail - 1]` (0: none). Worth loading are the blocks `skip` to `skip + load`,
    a tail counted as one block more. `leases` has one a rank: the leading part of these blocks
    that is in the pool now; the others are on their way, `fetch` waits for them. An empty lease
    has the id `NO_LEASE` and needs no release. `found` has the slowest tier of each block to load
    among the ranks. `decision` has the estimates in seconds; None where there was nothing to
    decide. `checksums[rank]` has one for each leased block, None where it is not sealed yet.
    """

    blocks: int
    tail: int
    load: int
    leases: tuple[Lease, ...]
    found: tuple[Medium, ...]
    decision: Decision | None
    checksums: tuple[tuple[int | None, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """Answer to `hint`: the session's blocks, and in how many seconds they are expected to be
    wanted again; infinite for never, None where the hint says nothing about it."""

    run: tuple[BlockKey, ...]
    return_s: float | None


class BlockEvent(NamedTuple):
    """A copy of a block came to a medium (`stored`) or left it."""

    number: int
    key: BlockKey
    medium: Medium
    stored: bool


@dataclass(frozen=True, slots=True)
class Events:
    """Answer to `events`. Ask for those from `next` on the next time.

    A reader whose number is below `first` has missed some: it forgets what it knew of this node,
    and `items` say what is held now.
    """

    first: int
    next: int
    items: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer to `end_session`: the blocks that only this session may have had, in prefix order,
    and which of them were dropped there. Those from which others descend stayed."""

    only: tuple[BlockKey, ...]
    gone: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer to `commit`: how many blocks are held because of it, how many of the session's run
    are on a medium that outlives the processes, and the incomplete block that it replaced."""

    blocks: int
    durable: int = 0
    superseded: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Handles:
    """Turns numbers of one life of a node into handles and back."""

    life: int
    bits: int = field(default=HANDLE_BITS)

    def out(self, number: int) -> int:
        """The handle to give away."""
        return self.life << self.bits | number

    def back(self, handle: int) -> int:
        """The number behind it. Raises `StaleHandle` for one of another life of this process."""
        if type(handle) is not int:
            raise BadInput(f"{handle!r} is not a handle")
        if handle >> self.bits != self.life:
            raise StaleHandle(f"handle {handle:#x} is not of this life of the node, {self.life:#x}")
        return handle & ((1 << self.bits) - 1)
