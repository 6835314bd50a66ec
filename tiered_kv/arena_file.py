"""The file behind an arena: where its parts lie, its header, and how its pages come to be.

0        header: one page, below
4096     generations: 8 bytes for every 4096 that the pool covers
2 MiB*n  data: page-aligned, and aligned for huge pages
"""

import errno
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.errors import BadInput, DoesNotFit
from tiered_kv.liveness import check_name
from tiered_kv.pages import Progress, advise_huge, prefault, prefer_node
from tiered_kv.types import ALIGNMENT

SHM_FOLDER = Path(f"/dev/shm/tiered_kv-{os.getuid()}")
SUFFIX = ".arena"
VERSION = 1
HUGE_PAGE = 2 << 20

_MAGIC = b"TKVARENA"
_HEADER = struct.Struct("<8sI64sQQQQ")
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EFBIG, errno.EDQUOT)


def arena_name(node_id: str, incarnation: int, role: str = "") -> str:
    """`<node_id>-<incarnation>[-<role>]`: unique for every life of every pool on a host."""
    return check_name(f"{node_id}-{incarnation}" + (f"-{role}" if role else ""))


def arena_path(folder: Path, name: str) -> Path:
    """The file of an arena."""
    return folder / (check_name(name) + SUFFIX)


@dataclass(frozen=True)
class Header:
    """Who an arena belongs to and how large its parts are. Bytes."""

    node_id: str
    incarnation: int
    capacity_bytes: int
    covers_bytes: int
    """What the generations are for: the data here, or memory of the same size elsewhere."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "covers_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < ALIGNMENT or value % ALIGNMENT:
                raise BadInput(f"{name} must be a positive multiple of {ALIGNMENT}, not {value!r}")
        if not 1 <= len(self.node_id.encode()) <= 64:
            raise BadInput(f"node_id {self.node_id!r} must have 1 to 64 bytes")
        if type(self.incarnation) is not int or not 0 <= self.incarnation < 1 << 64:
            raise BadInput(f"incarnation must be a count, not {self.incarnation!r}")

    @property
    def words(self) -> int:
        """Entries of the generation table."""
        return self.covers_bytes // ALIGNMENT

    @property
    def data_offset(self) -> int:
        """Where the data begins in the file."""
        return -(-(ALIGNMENT + 8 * self.words) // HUGE_PAGE) * HUGE_PAGE

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.capacity_bytes

    def pack(self) -> bytes:
        """The bytes at offset 0."""
        sizes = (self.capacity_bytes, self.covers_bytes, self.data_offset)
        return _HEADER.pack(_MAGIC, VERSION, self.node_id.encode(), self.incarnation, *sizes)

    @classmethod
    def load(cls, path: Path, fd: int) -> "Header":
        """Read and validate. Raises `BadInput`, which names the file and what is wrong with it."""
        raw = os.pread(fd, _HEADER.size, 0)
        if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
            raise BadInput(f"{path} is not an arena file")
        _, version, node_id, incarnation, capacity, covers, data_offset = _HEADER.unpack(raw)
        if version != VERSION:
            raise BadInput(f"{path} has version {version}; this release reads {VERSION}")
        try:
            header = cls(node_id.rstrip(b"\0").decode(), incarnation, capacity, covers)
        except ValueError as error:  # BadInput and UnicodeDecodeError are both
            raise BadInput(f"{path} has a damaged header: {error}") from error
        size = os.fstat(fd).st_size
        if data_offset != header.data_offset or size != header.file_bytes:
            raise BadInput(
                f"{path} has {size} bytes and data at {data_offset}; a capacity of {capacity} "
                f"means {header.file_bytes} and {header.data_offset}"
            )
        return header


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file read/write. The mapping keeps a descriptor of its own, and not `fd`'s lock:
    views may outlive the arena, and its proof of life must not."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins in this process."""
    return int(np.frombuffer(mapping, np.uint8, 1).ctypes.data)


def allocate(
    fd: int, nbytes: int, *, touch: bool, progress: Progress | None, numa_node: int | None
) -> mmap.mmap:
    """Size a new file, reserve every page of it, map it. Blocks: see `prefault`.

    Afterwards no access can fail for lack of memory. With `touch` the pages are made by
    populating: in parallel, as huge pages where the mount allows. Reserving first would make
    small pages of them all (measured, GiB/s: 0.4 against 17 with huge pages). Raises `DoesNotFit`.
    """
    try:
        os.ftruncate(fd, nbytes)
        if not touch:
            os.posix_fallocate(fd, 0, nbytes)
        mapping = map_file(fd, nbytes)
        try:
            address = address_of(mapping)
            if numa_node is not None:
                prefer_node(address, nbytes, numa_node)
            advise_huge(address, nbytes)
            if touch:
                _touch(fd, mapping, address, progress)
        except BaseException:
            mapping.close()  # or whoever keeps the exception keeps the memory
            raise
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        reason = "no page left" if error.errno == errno.EFAULT else error.strerror
        raise DoesNotFit(
            f"{nbytes} bytes of shared memory were refused while they were being reserved "
            f"({reason}); others took memory at the same time"
        ) from error
    return mapping


def _touch(fd: int, mapping: mmap.mmap, address: int, progress: Progress | None) -> None:
    try:
        prefault(address, len(mapping), progress)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, 0, len(mapping))  # or touching could end in SIGBUS
        np.frombuffer(mapping, np.uint8)[::ALIGNMENT] = 0
        if progress is not None:
            progress(len(mapping), len(mapping))
