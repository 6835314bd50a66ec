"""The data files: one large, preallocated file a device, opened past the page cache."""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tiered_kv.errors import BadInput, DoesNotFit, FolderInUse, TierBroken
from tiered_kv.folder import medium_error
from tiered_kv.types import ALIGNMENT

_STEP_BYTES = 1 << 30
"""Preallocation goes in steps of this, so that progress can be shown and an interruption leaves
a file that is visibly too short."""

_LOCK_WAIT_S = 10.0
"""How long a predecessor's writes may take to end; a live service is reported after it."""

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)` of the space that had to be allocated."""


class Stripes:
    """Open data files, stripe `i` on device `i`. Made by `open`; safe from any thread."""

    def __init__(self, files: Sequence[Path], stripe_bytes: int) -> None:
        self.files = tuple(files)
        self.stripe_bytes = stripe_bytes
        self.fds: tuple[int, ...] = ()
        self._closed = False
        self._cached: set[int] = set()  # fds of files whose file system refuses O_DIRECT
        self.allocated_bytes = 0  # by this `open`; 0 when every file was there in full

    @classmethod
    def open(
        cls,
        folders: Sequence[Path],
        stripe_bytes: int,
        *,
        free_floor_bytes: int = 0,
        name: str = "blocks",
        progress: Progress | None = None,
    ) -> Self:
        """Open `name`.data in each folder, `stripe_bytes` (a multiple of 4096) each.

        Files of the right size are left alone, shorter ones are extended (the new part reads as
        zeros), longer ones are cut. Blocks while the file system allocates. Raises `DoesNotFit`
        when allocation would leave less than `free_floor_bytes` free, `FolderInUse` when another
        process has a file open, `TierBroken` for other failures; files keep their former size.
        """
        if stripe_bytes < ALIGNMENT or stripe_bytes % ALIGNMENT:
            raise BadInput(f"a stripe of {stripe_bytes} bytes is no multiple of {ALIGNMENT}")
        # The name has no number: folders that change their order leave no orphan behind.
        files = [folder / f"{name}.data" for folder in folders]
        stripes = cls(files, stripe_bytes)
        try:
            for file in files:
                stripes._add(file)
            stripes._resize(free_floor_bytes, progress)
        except BaseException:
            stripes.close()
            raise
        return stripes

    def settle(self, fd: int, offset: int, nbytes: int) -> None:
        """Keep a file without O_DIRECT out of the page cache, where it would push out the pool.

        Nothing to do, and nothing is done, for files with O_DIRECT.
        """
        if fd in self._cached:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Make everything written so far survive a power failure. Raises `TierBroken`."""
        for file, fd in zip(self.files, self.fds, strict=True):
            if self._closed:
                raise TierBroken(f"{file} is closed")
            try:
                os.fdatasync(fd)
            except OSError as error:
                raise TierBroken(f"cannot sync {file}: {error.strerror}") from error

    def intact(self) -> bool:
        """Whether every file still has its name and size. One fstat a file."""
        if self._closed:
            return False
        stats = [os.fstat(fd) for fd in self.fds]
        return all(s.st_nlink > 0 and s.st_size == self.stripe_bytes for s in stats)

    def describe(self) -> str:
        """One line for `status`."""
        slow = [str(f) for f, fd in zip(self.files, self.fds, strict=True) if fd in self._cached]
        text = f"{len(self.files)} x {self.stripe_bytes} bytes, "
        if not slow:
            return text + "O_DIRECT"
        return text + f"through the page cache (O_DIRECT refused) for {', '.join(slow)}"

    def close(self) -> None:
        """Close and unlock all files. Idempotent."""
        if not self._closed:
            self._closed = True
            for fd in self.fds:
                os.close(fd)

    def _add(self, file: Path) -> None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, direct = _open_direct(file)
        except OSError as error:
            raise medium_error(error, file, "open") from error
        self.fds += (fd,)
        if not direct:
            self._cached.add(fd)
        if any(os.path.sameopenfile(fd, other) for other in self.fds[:-1]):
            raise BadInput(f"device folder {file.parent} is named twice")
        _lock(fd, file)

    def _resize(self, free_floor_bytes: int, progress: Progress | None) -> None:
        sizes = [os.fstat(fd).st_size for fd in self.fds]
        total = self._check_space(sizes, free_floor_bytes)
        done = 0
        for file, fd, size in zip(self.files, self.fds, sizes, strict=True):
            at = min(size, self.stripe_bytes)
            try:
                if size > self.stripe_bytes:
                    os.ftruncate(fd, self.stripe_bytes)
                while at < self.stripe_bytes:
                    step = min(_STEP_BYTES, self.stripe_bytes - at)
                    os.posix_fallocate(fd, at, step)
                    at, done = at + step, done + step
                    if progress is not None:
                        progress(done, total)
            except OSError as error:
                os.ftruncate(fd, size)
                raise medium_error(
                    error, file, f"allocate {self.stripe_bytes} bytes for"
                ) from error
        self.allocated_bytes = total

    def _check_space(self, sizes: Sequence[int], free_floor_bytes: int) -> int:
        """Bytes to allocate. Raises `DoesNotFit` when a device would go below the floor."""
        wanted: dict[int, int] = {}  # device -> bytes; two folders may share one
        for fd, size in zip(self.fds, sizes, strict=True):
            device = os.fstat(fd).st_dev
            wanted[device] = wanted.get(device, 0) + max(0, self.stripe_bytes - size)
        for file, fd in zip(self.files, self.fds, strict=True):
            more = wanted[os.fstat(fd).st_dev]
            volume = os.fstatvfs(fd)
            free = volume.f_bavail * volume.f_frsize
            if more and free - more < free_floor_bytes:
                raise DoesNotFit(
                    f"{file}: {more} bytes more are wanted, {free} are free, and "
                    f"{free_floor_bytes} must stay free: {max(0, free - free_floor_bytes)} fit"
                )
        return sum(wanted.values())


def _lock(fd: int, file: Path) -> None:
    """Lock a data file: two services with folders of their own may name one device folder.

    A killed process has to be waited for: 1. A is killed with writes in flight; its folder's lock
    ends at once.  2. B opens the folder.  3. The kernel ends A's writes, over B's new blocks. The
    writes in flight hold the data file open, and with it this lock, until they have ended.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise FolderInUse(f"data file {file} is in use by a live service") from error
            time.sleep(0.005)
        except OSError as error:
            raise medium_error(error, file, "lock") from error


def _open_direct(file: Path) -> tuple[int, bool]:
    """The open file, and whether it goes past the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, flags, 0o600), False
    # Some file systems take the flag and then refuse every read or write.
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            os.preadv(fd, [page], 0)
            return fd, True
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
    return os.open(file, flags, 0o600), False
