"""How much memory a process may still take, and what bounds it. Reads /proc and /sys only.

`root` is where the machine's file system is mounted: `/`, or a folder with a made-up machine.
"""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiered_kv.errors import DoesNotFit

ROOT = Path("/")
HEADROOM_BYTES = 256 << 20
"""What must stay available after an arena was made, for the rest of the process."""

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number instead of "max"
_CAP_IPC_LOCK = 14


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. `root` is the part of the file system that is mounted."""

    point: str
    root: str
    fstype: str
    options: tuple[str, ...]


def mounts(root: Path = ROOT) -> list[Mount]:
    """All mounts of this process, in order: a later one hides an earlier one on the same point."""
    found = []
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 4 and len(kind) > 2:
            found.append(
                Mount(_plain(fields[4]), _plain(fields[3]), kind[0], tuple(kind[2].split(",")))
            )
    return found


def mount_of(path: Path, root: Path = ROOT) -> Mount | None:
    """The mount that a path lies on."""
    real = os.path.realpath(path)
    best = None
    for mount in mounts(root):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    pairs = (line.partition(":") for line in text_of(root / "proc/meminfo").splitlines())
    return {k: int(v.split()[0]) << 10 for k, _, v in pairs if v.strip().endswith("kB")}


class CgroupLimit(NamedTuple):
    """A memory limit that holds for this process, its own or a parent group's."""

    limit_bytes: int
    room_bytes: int  # what is not used, or only by page cache that can go at once


def cgroup_limit(root: Path = ROOT) -> CgroupLimit | None:
    """The tightest memory limit of cgroup v2 or v1; None where nothing is limited."""
    found = [limit for folder in _cgroup_folders(root) if (limit := _limit_of(folder))]
    return min(found, key=lambda limit: limit.room_bytes, default=None)


def total_bytes(root: Path = ROOT) -> int:
    """Memory that this process could ever have: of the machine or of its cgroup."""
    total = meminfo(root).get("MemTotal", 0)
    limit = cgroup_limit(root)
    return total if limit is None else min(total, limit.limit_bytes)


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be taken now without swapping or being killed."""
    available = meminfo(root).get("MemAvailable", 0)
    limit = cgroup_limit(root)
    return available if limit is None else min(available, limit.room_bytes)


def check_fits(folder: Path, nbytes: int, what: str) -> None:
    """Raise `DoesNotFit`, with both numbers, unless a shared memory file of `nbytes` fits now."""
    disk = os.statvfs(folder)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if nbytes > free:
        raise DoesNotFit(
            f"{what} needs {nbytes} bytes, but {folder} has {free} free of {size}; "
            "give /dev/shm a larger size (docker: --shm-size, Kubernetes: emptyDir sizeLimit)"
        )
    available = available_bytes()
    if nbytes + HEADROOM_BYTES > available:
        raise DoesNotFit(
            f"{what} needs {nbytes} bytes and {HEADROOM_BYTES} must stay for the rest, but only "
            f"{available} of {total_bytes()} bytes of memory are available"
        )


def memlock_bytes() -> int | None:
    """RLIMIT_MEMLOCK (soft); None when unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def may_lock_any(root: Path = ROOT) -> bool:
    """Whether this process has CAP_IPC_LOCK, which makes RLIMIT_MEMLOCK void."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", text_of(root / "proc/self/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The folder of this process's memory cgroup and of each parent that is visible."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for mount in mounts(root):
            v2 = mount.fstype == "cgroup2" and number == "0" and not controllers
            v1 = mount.fstype == "cgroup" and "memory" in controllers.split(",")
            if v2 or (v1 and "memory" in mount.options):
                yield from _upwards(root / mount.point.lstrip("/"), mount.root, path)


def _upwards(top: Path, mounted: str, path: str) -> Iterator[Path]:
    base = mounted.rstrip("/")
    inside = path[len(base) :] if path == base or path.startswith(base + "/") else ""
    parts = [p for p in inside.split("/") if p and p != ".."]
    for n in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:n])


def _limit_of(folder: Path) -> CgroupLimit | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = text_of(folder / limit_name).strip(), text_of(folder / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            match = re.search(
                rf"^{cache_name} (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
            )
            cache = int(match[1]) if match else 0
            return CgroupLimit(int(limit), max(0, int(limit) - int(used) + cache))
    return None


def text_of(path: Path) -> str:
    """A file's text; empty when it is not there or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _plain(field: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field)
