"""What the connector's two sides tell each other, once an engine step. Plain values, picklable."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.layout import KVLayout
from tiered_kv.sessions import Session
from tiered_kv.types import BlockKey, Lease


@dataclass(frozen=True, slots=True)
class Introduction(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once: the layout of its blocks, and the name under which it
    proves that it lives and will own what is reserved for it."""

    layout: KVLayout
    owner: str


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a block of ours and the engine pages that hold it: `pages[i]` is page
    `first + i` of the block."""

    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one request to bring into engine pages. `keys[rank]` name them in prefix order;
    `leases[rank]` covers the first of them, `checksums[rank]` are theirs; the others have to be
    fetched."""

    request: str
    spans: tuple[Span, ...]
    keys: tuple[tuple[BlockKey, ...], ...]
    leases: tuple[Lease, ...]
    checksums: tuple[tuple[int | None, ...], ...]
    by_layer: bool = False  # the engine waits layer by layer in this very step


@dataclass(frozen=True, slots=True)
class Said:
    """What a request tells of its session's future; see `Node.hint`."""

    ended: bool
    stopped: str
    pause_s: float | None
    priority: int | None

    def verb(self) -> dict[str, Any]:
        """As arguments of `hint`."""
        return {
            "ended": self.ended,
            "stopped": None if self.ended else self.stopped,
            "pause_s": self.pause_s,
            "priority": self.priority,
        }


@dataclass(frozen=True, slots=True)
class Store:
    """Computed blocks of one request to keep. `parents[rank]` is the block before the first.

    With `last` the engine holds the request's pages until the worker has copied them. `sessions`
    (one a rank) are put when the blocks are, and then told what the request `said`.
    """

    request: str
    spans: tuple[Span, ...]
    keys: tuple[tuple[BlockKey, ...], ...]
    parents: tuple[BlockKey | None, ...]
    sessions: tuple[Session, ...] = ()
    last: bool = False
    said: Said | None = None


@dataclass(frozen=True, slots=True)
class Step(KVConnectorMetadata):
    """The scheduler to its workers: what to do in this step. The pages of `preempted` requests
    are given to others in it."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    preempted: frozenset[str] = frozenset()


@dataclass(slots=True)
class Told(KVConnectorWorkerMetadata):
    """The workers to the scheduler: what was copied since the last step, summed over the ranks."""

    loaded_bytes: int = 0
    load_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    """How many stores of a request have ended, however; each rank counts its own."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Told":
        """Both together."""
        assert isinstance(other, Told)
        return Told(
            self.loaded_bytes + other.loaded_bytes,
            self.load_s + other.load_s,
            dict(Counter(self.counts) + Counter(other.counts)),
            dict(Counter(self.stored) + Counter(other.stored)),
        )
