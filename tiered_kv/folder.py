"""The identity kept beside the NVMe data, and the lock that keeps two services apart.

A folder holds `LOCK` (an exclusive flock, with the pid and node id of its holder as text) and
`node.json` (who this node is, and how often it has started). The incarnation grows durably before
`open` returns, so that no two lives of a node ever carry the same one.
"""

import errno
import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Self

from tiered_kv.errors import DoesNotFit, FolderInUse, TierBroken, TieredKVError

_LOCK = "LOCK"
_NODE = "node.json"


def medium_error(error: OSError, path: Path, doing: str) -> TieredKVError:
    """`DoesNotFit` for a full disk or quota, else `TierBroken`; with errno text and path."""
    text = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFit(text)
    return TierBroken(text)


class Folder:
    """An open, locked folder. Made by `open`; safe from any thread.

    `node_id` is 32 hex digits and stays the same as long as the folder exists; `incarnation`
    counts from 1 and grows at each `open`.
    """

    def __init__(self, path: Path, lock_fd: int, node_id: str, incarnation: int) -> None:
        self.path = path
        self.node_id = node_id
        self.incarnation = incarnation
        self._lock_fd = lock_fd
        stat = os.stat(path)
        self._inode = (stat.st_dev, stat.st_ino)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the folder where needed, lock it, and start a new incarnation of its node.

        Blocks for two fsyncs. Raises `FolderInUse` with the holder, `DoesNotFit` on a full disk,
        `TierBroken` when the folder cannot be made, read or written. On any of them nothing is
        locked and the identity is what it was.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = _lock(path)
        except OSError as error:
            raise medium_error(error, path, "open the folder") from error
        try:
            node_id, incarnation = _next_life(path)
            _tell_holder(lock_fd, node_id)
            return cls(path, lock_fd, node_id, incarnation)
        except OSError as error:
            os.close(lock_fd)
            raise medium_error(error, path, "write the identity in") from error

    def intact(self) -> bool:
        """Whether the path still names the folder that was opened, and its lock is still ours.

        False once it was removed, replaced or unmounted: files that are still open in it can be
        read, but nothing written there will be found again. Two stat calls.
        """
        try:
            stat = os.stat(self.path)
            return (stat.st_dev, stat.st_ino) == self._inode and _names(self.path, self._lock_fd)
        except OSError:
            return False

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _names(path: Path, lock_fd: int) -> bool:
    """Whether the folder's LOCK is the file that `lock_fd` has open."""
    there, ours = os.stat(path / _LOCK), os.fstat(lock_fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _lock(path: Path) -> int:
    """The fd of the locked LOCK file.

    1. A opens LOCK.  2. Somebody removes the folder's files.  3. B creates LOCK and locks it.
    4. A locks the file that has no name any more: both believe to be alone. Therefore the name is
    compared once more under the lock.
    """
    while True:
        lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _names(path, lock_fd):
                return lock_fd
        except BlockingIOError as error:
            holder = os.pread(lock_fd, 200, 0).decode("utf-8", "replace").strip()
            os.close(lock_fd)
            raise FolderInUse(
                f"folder {path} is locked by a live service ({holder or 'holder unknown'})"
            ) from error
        except FileNotFoundError:
            pass  # step 2 happened: the next round creates it again, or finds the folder gone
        except OSError:
            os.close(lock_fd)
            raise
        os.close(lock_fd)


def _tell_holder(lock_fd: int, node_id: str) -> None:
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"pid {os.getpid()}, node {node_id}\n".encode(), 0)


def _next_life(path: Path) -> tuple[str, int]:
    """Node id and new incarnation, on the disk before this returns."""
    former = _read_node(path)
    if former is None:
        _set_aside(path / _NODE)
        former = (uuid.uuid4().hex, 0)
    node_id, incarnation = former[0], former[1] + 1
    text = json.dumps({"node_id": node_id, "incarnation": incarnation})
    fresh = path / f"{_NODE}.tmp"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(fresh, path / _NODE)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # the rename itself
    finally:
        os.close(fd)
    return node_id, incarnation


def _read_node(path: Path) -> tuple[str, int] | None:
    """What node.json says; None when it is absent or damaged."""
    try:
        doc = json.loads((path / _NODE).read_bytes())
        node_id, incarnation = doc["node_id"], doc["incarnation"]
        if uuid.UUID(hex=node_id).hex == node_id and type(incarnation) is int and incarnation > 0:
            return node_id, incarnation
    except (FileNotFoundError, IsADirectoryError):
        pass
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not JSON, not an object, a field absent or of another kind
    return None


def _set_aside(file: Path) -> None:
    """Keep a damaged file for whoever wants to know what happened to it."""
    if file.exists():
        n = 1
        while (aside := file.with_name(f"{file.name}.damaged-{n}")).exists():
            n += 1
        file.rename(aside)
