"""What crosses between processes, and the handles that make a stale one harmless."""

import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiered_kv.errors import BadInput, StaleHandle
from tiered_kv.pool import PoolHandle
from tiered_kv.sessions import Session
from tiered_kv.types import BlockKey, Lease, Medium, Why

HANDLE_BITS = 40
"""A handle is `life_number << 40 | number`: 10^12 of them a life, and none outlives it."""


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
