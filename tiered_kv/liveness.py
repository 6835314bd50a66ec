"""Proof of life: a process lives exactly as long as it holds the flock of a file.

The kernel drops the lock when the process ends, however it ends, and keeps it while the process
is stopped, swapped out or hung. So "the lock can be taken" proves death, while no clock, pid
(they are reused) or silence does. All calls are a few system calls and never wait.

A locked file gets its name only after it was locked: it is created without one (O_TMPFILE) and
linked. Otherwise this could happen:

1. A creates `x.alive`.
2. B finds `x.alive` unlocked, concludes that its owner is dead, gives A's slots away.
3. A locks `x.alive` and fills the slots that it still believes to own.

For the same reason nobody removes a leftover without holding its lock and comparing inodes:

1. B and C open the same leftover. B locks it, unlinks it, leaves.
2. A creates a new file of that name.
3. C locks the file it had opened (nobody else has that inode) and would unlink A's.
"""

import fcntl
import json
import os
import re
import stat
import time
import weakref
from pathlib import Path

from tiered_kv.errors import BadInput

_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,199}", re.ASCII)
SUFFIX = ".alive"
_PUBLISH_TRIES = 20


def check_name(name: str) -> str:
    """`name`, when it can be a file name of ours. Raises `BadInput` otherwise."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"{name!r} is not a name of letters, digits, '_', '.', '-' (1 to 200)")
    return name


def private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700 where it is missing.

    Raises `BadInput` for one that another user made or may write to: /dev/shm is open to all,
    and whoever owns the folder could replace what we map.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = os.lstat(folder)
    except OSError as error:
        raise BadInput(f"the folder {str(folder)!r} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise BadInput(
            f"{str(folder)!r} must be a folder of user {os.geteuid()} that no other user may "
            f"write to; it has owner {info.st_uid} and mode {stat.filemode(info.st_mode)}"
        )
    return folder


class Alive:
    """A file that stays locked until `close` or the end of this process.

    A fork shares the open file and would keep the lock alive beyond its parent, therefore forked
    children drop it at once; an exec closes it.
    """

    def __init__(self, folder: Path) -> None:
        """A locked file in `folder` that has no name yet. Raises `BadInput` where the file system
        cannot do that (tmpfs, ext4, xfs and btrfs can)."""
        self.path: Path | None = None
        try:
            self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadInput(
                f"{str(folder)!r} cannot hold unnamed files: {error.strerror}"
            ) from error
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else can know this inode
        _held.add(self)

    def publish(self, path: Path) -> None:
        """Give the file its name, in place of a leftover of a dead process.

        Raises `BadInput` when a live process has that name; its file is untouched.
        """
        for _ in range(_PUBLISH_TRIES):
            try:
                # An absolute source makes src_dir_fd unused; naming one makes Python call
                # linkat(AT_SYMLINK_FOLLOW), without which the link would be to the symlink.
                os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd)
            except FileExistsError:
                if not remove_if_dead(path):
                    time.sleep(0.01)  # live, or a probe has its shared lock for a moment
            else:
                self.path = path
                return
        raise BadInput(f"{str(path)!r} is held by a live process, or is not a file of ours")

    def close(self) -> None:
        """Remove the name and let the lock go. Idempotent."""
        fd, self.fd = self.fd, -1
        path, self.path = self.path, None
        if fd < 0:
            return
        _held.discard(self)
        if path is not None:
            path.unlink(missing_ok=True)  # still locked: nobody took it for a leftover
        os.close(fd)

    def _forget(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.path = -1, None


_held: "weakref.WeakSet[Alive]" = weakref.WeakSet()


def _forget_inherited() -> None:
    for alive in list(_held):
        alive._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def hold(folder: Path, name: str) -> Alive:
    """Prove by `<folder>/<name>.alive` that this process lives, until `close` or its end.

    The file's text (pid, start, program) is for humans. Raises `BadInput` when the name cannot be
    one or a live process holds it.
    """
    path = private_folder(folder) / (check_name(name) + SUFFIX)
    alive = Alive(folder)
    try:
        program = Path("/proc/self/comm").read_text().strip()
        facts = {"pid": os.getpid(), "started_unix_s": int(time.time()), "program": program}
        os.write(alive.fd, json.dumps(facts).encode() + b"\n")
        alive.publish(path)
    except BaseException:
        alive.close()
        raise
    return alive


def is_alive(folder: Path, name: str) -> bool:
    """Whether the process that holds `name` lives; False when there is no such file.

    Takes nothing away from anybody. May answer True once more for a dead process whose leftover
    is being removed at this moment, never False for a live one.
    """
    return is_locked(folder / (check_name(name) + SUFFIX))


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock of this file."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        # Shared, so that two probes do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_if_dead(path: Path) -> bool:
    """Unlink a leftover; True when this call did. A live owner's file is never touched."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            return False  # the name belongs to a newer file by now
        path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def _open(path: Path) -> int | None:
    """A descriptor of a regular file, or None. Never follows a symlink, waits for no pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be opened: {error.strerror}") from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None
