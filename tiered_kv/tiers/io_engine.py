"""How blocks get between pool memory and data files: engines with one verb, chosen by name.

An engine runs a batch of reads and writes with a bounded number of them in flight and tells the
caller of each as it ends, so that checksums are taken while the medium works.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tiered_kv.errors import UnknownName

OnDone = Callable[[int, int], None]
"""`on_done(i, result)`: op `i` ended with that many bytes, or with a negative errno."""

Before = Callable[[int], bool]
"""`before(i)`: op `i` is about to start; False skips it, and `on_done` is not called for it."""

MAX_IO_BYTES = 0x7FFFF000
"""The most that Linux moves in one read or write; larger ops continue where it stopped."""


class PoolMemory(Protocol):
    """Memory that an engine moves bytes from and into: 4096-aligned, mapped while it is open."""

    @property
    def address(self) -> int:
        """Virtual address of slot 0."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes from `address` on that slots can lie in."""
        ...

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The writable bytes of a slot, without a copy."""
        ...


class IoOp(NamedTuple):
    """One transfer of all bytes of `view`; `address` is where they lie."""

    write: bool
    fd: int
    offset: int
    view: memoryview
    address: int


class IoEngine(Protocol):
    """Moves bytes. Safe from any thread; calls in several threads share the medium fairly."""

    name: str

    def run(self, ops: Sequence[IoOp], on_done: OnDone, before: Before | None = None) -> None:
        """Carry out all ops, in any order; blocks until every one that was started has ended.

        Both callbacks run in the calling thread, while other ops are in flight and without the
        engine's locks. What they raise is raised here, after the ops in flight have ended: then
        no buffer is touched any more. A transfer that stops short is continued; at the end of a
        file `on_done` gets the bytes that there were.
        """
        ...

    def describe(self) -> str:
        """One line for `status`: the engine, its depth, and what it had to do without."""
        ...

    def close(self) -> None:
        """Wait for running calls, then give back threads, rings and fds. Idempotent."""
        ...


EngineFactory = Callable[[PoolMemory, int], IoEngine]
"""`factory(memory, queue_depth)`. Raises `TierBroken` where this kernel refuses the engine."""

_known: dict[str, EngineFactory] = {}


def register(name: str, factory: EngineFactory) -> None:
    """Make an engine known by a name. A second one of that name replaces the first."""
    _known[name] = factory


def names() -> list[str]:
    """All registered engines."""
    return sorted(_known)


def make(name: str, memory: PoolMemory, queue_depth: int) -> IoEngine:
    """The engine of that name. Raises `UnknownName` with the known ones."""
    if name not in _known:
        raise UnknownName(f"I/O engine {name!r} is not one of {', '.join(names())}")
    return _known[name](memory, queue_depth)
