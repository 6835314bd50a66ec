"""The nouns. A reader who knows this page can read any other module.

All of them are values: frozen, without behaviour, safe to send to another process. Sizes are
bytes, times are seconds, slots are byte offsets inside one tier's address space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""16 bytes that name a block: its tokens, all tokens before it, its layout and its tenant."""

Fingerprint = NewType("Fingerprint", bytes)
"""16 bytes that name a layout (`KVLayout.fingerprint`)."""

SessionId = NewType("SessionId", str)
Run = Sequence[BlockKey]
"""Keys in prefix order, from the first block on. A hit is the leading part of a run."""

ALIGNMENT = 4096
"""Bytes. O_DIRECT wants offsets, addresses and lengths in multiples of the logical block size,
which is 512 or 4096 on every drive we know; 4096 is also the page size."""


class Medium(StrEnum):
    """Where a copy of a block can be, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    HOST = "host"  # the node below a GPU, seen from the GPU's hierarchy: DRAM or NVMe


class Why(StrEnum):
    """Why something was refused, missed or dropped. `status` counts them by these names."""

    ABSENT = "absent"  # nobody holds it
    FULL = "full"  # nothing more can leave the tier
    DEMOTING = "demoting"  # room is being made; ask again
    TOO_LARGE = "too_large"  # more than the tier can ever hold
    CORRUPT = "corrupt"  # bytes do not match their checksum; that copy was dropped
    IO_ERROR = "io_error"  # the medium failed
    DEADLINE = "deadline"  # not finished in time
    OFFLINE = "offline"  # the tier is taken out after repeated failures
    ORPHANED = "orphaned"  # its parent has gone, so it could never be hit
    LAPSED = "lapsed"  # a lease ended while its reader copied; the copy was thrown away
    OWNER_DIED = "owner_died"  # the process that reserved it is dead
    UNREACHABLE = "unreachable"  # a process of the service does not answer
    PRESSURE = "pressure"  # dropped without a lower copy, to make room
    SLOWER = "slower"  # loading it is modelled to take longer than computing it again


@dataclass(frozen=True, slots=True)
class Held:
    """Resident in these tiers, fastest first."""

    tiers: tuple[Medium, ...]


@dataclass(frozen=True, slots=True)
class Coming:
    """Not in the fastest tier yet, and on its way to this one."""

    tier: Medium


@dataclass(frozen=True, slots=True)
class Absent:
    """Not here."""


Answer = Held | Coming | Absent


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to fill for the blocks of a run that are not held, invisible until committed.

    `keys[i]` belongs into the `nbytes` at `slots[i]`; `generations[i]` is what the slot carries
    while it is being filled. The other `held` blocks of the run need no copy. Ends by commit,
    abort or the proven death of `owner`, never by time.
    """

    id: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    nbytes: int
    held: int
    owner: str
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """The leading blocks of a run, readable at `slots` until released or expired.

    A reader copies and then compares the slots' generations with `generations`: a slot that was
    given to another block meanwhile has moved on, and its copy is thrown away.
    """

    id: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    nbytes: int
    expires_s: float
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was reserved and nothing changed."""

    why: Why
    detail: str = ""


class Located(NamedTuple):
    """One copy of a block in a tier: what a tier needs to read, write or index it."""

    key: BlockKey
    parent: BlockKey | None
    slot: int
    nbytes: int
    layout: Fingerprint
    checksum: int | None = None
    """xxh3_64 over all `nbytes`; None until sealed."""


@dataclass(frozen=True, slots=True)
class Done:
    """A block of a batch arrived. `checksum` is its xxh3_64 where the copy took or compared it.

    `copied` is False when the target had it already, `source` says where a node below found it.
    """

    checksum: int | None = None
    copied: bool = True
    source: Medium | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A block of a batch did not arrive; its target holds garbage, its source is untouched."""

    why: Why
    detail: str = ""


Outcome = Done | Failed


class MoveKind(IntEnum):
    """Classes of moves; the smaller value goes first."""

    RESTORE = 0  # up: somebody waits
    STORE = 1  # down, and the upper copy stays: write-behind
    DEMOTE = 2  # down, and the upper copy leaves


@dataclass(frozen=True, slots=True)
class Move:
    """A batch of equally sized blocks to copy from one tier to another.

    Sources are pinned and targets reserved until `Hierarchy.done` is told the outcome of each.
    `HOST` has no slots of ours: its side is empty.
    """

    id: int
    kind: MoveKind
    source: Medium
    target: Medium
    blocks: tuple[Located, ...]  # slot = source slot
    targets: tuple[int, ...]
    nbytes: int  # of one block


@dataclass(frozen=True, slots=True)
class Usage:
    """One tier at one moment. `used_bytes` counts filled, reserved and incoming slots."""

    medium: Medium
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    blocks: int
    high: float
    low: float
    online: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """What a tier's start-up self-test measured: it wrote, read back and compared."""

    medium: Medium
    engine: str
    write_bytes_per_s: float
    read_bytes_per_s: float
