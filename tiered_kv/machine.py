"""Facts about this machine: for `doctor`, for budgets, and beside every benchmark result.

Reading only, a few milliseconds, and no fact is missed so badly that it raises: what cannot be
read is None, 0 or a sentence. The name of the host is not among them.
"""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiered_kv.gpus import Gpu, gpus
from tiered_kv.memory import (
    ROOT,
    available_bytes,
    cgroup_limit,
    may_lock_any,
    meminfo,
    memlock_bytes,
    mount_of,
    text_of,
    total_bytes,
)

_IO_URING_SETUP = 425  # the same number on every architecture of ours
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Cpu:
    """`cores` are those that this process may run on."""

    model: str
    cores: int
    machine: str


@dataclass(frozen=True)
class Memory:
    """Bytes. Totals and what is available count a cgroup's limit, which is None without one."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    swap_bytes: int
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None when unlimited. Void with `may_lock_any` (CAP_IPC_LOCK)."""
    may_lock_any: bool


@dataclass(frozen=True)
class Shm:
    """/dev/shm. `huge` is its mount option (never, advise, within_size, always); huge pages for
    arenas need one of the last three."""

    size_bytes: int
    free_bytes: int
    huge: str
    thp_enabled: str
    thp_shmem_enabled: str


@dataclass(frozen=True)
class NumaNode:
    """One node and its memory."""

    number: int
    cpus: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Disk:
    """What lies under a path, or under its nearest parent that exists."""

    path: str
    mount: str
    fstype: str
    size_bytes: int
    free_bytes: int
    direct_io: str
    """"works", or why a file cannot be opened with O_DIRECT there."""


@dataclass(frozen=True)
class Machine:
    """All of it."""

    cpu: Cpu
    kernel: str
    memory: Memory
    shm: Shm | None
    io_uring: str
    """"works", or why not."""
    numa: tuple[NumaNode, ...]
    disks: tuple[Disk, ...]
    gpus: tuple[Gpu, ...]
    gpus_note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def facts(paths: Iterable[Path] = (), root: Path = ROOT) -> Machine:
    """Look at the machine, and at the disks under `paths`. `root`: see `memory`."""
    found, note = gpus()
    return Machine(
        cpu=cpu(root),
        kernel=platform.release(),
        memory=memory(root),
        shm=shm(root),
        io_uring=io_uring(root),
        numa=numa(root),
        disks=tuple(disk(path) for path in paths),
        gpus=found,
        gpus_note=note,
    )


def cpu(root: Path = ROOT) -> Cpu:
    """Model and usable cores."""
    names = re.findall(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return Cpu(names[0] if names else "unknown", len(os.sched_getaffinity(0)), platform.machine())


def memory(root: Path = ROOT) -> Memory:
    """Memory and the limits on it."""
    limit = cgroup_limit(root)
    return Memory(
        total_bytes=total_bytes(root),
        available_bytes=available_bytes(root),
        cgroup_limit_bytes=None if limit is None else limit.limit_bytes,
        swap_bytes=meminfo(root).get("SwapTotal", 0),
        memlock_bytes=memlock_bytes(),
        may_lock_any=may_lock_any(root),
    )


def shm(root: Path = ROOT) -> Shm | None:
    """/dev/shm; None where there is none."""
    try:
        size = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    mount = mount_of(Path("/dev/shm"), root)
    options = mount.options if mount else ()
    thp = root / "sys/kernel/mm/transparent_hugepage"
    return Shm(
        size_bytes=size.f_blocks * size.f_frsize,
        free_bytes=size.f_bavail * size.f_frsize,
        huge=next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never"),
        thp_enabled=_chosen(text_of(thp / "enabled")),
        thp_shmem_enabled=_chosen(text_of(thp / "shmem_enabled")),
    )


def io_uring(root: Path = ROOT) -> str:
    """ "works", or why a ring cannot be set up. Makes a ring of one entry and closes it."""
    disabled = text_of(root / "proc/sys/kernel/io_uring_disabled").strip()
    params = (ctypes.c_char * 120)()
    fd = _libc.syscall(_IO_URING_SETUP, 1, params)
    if fd >= 0:
        os.close(fd)
        return "works"
    code = ctypes.get_errno()
    if code == errno.EPERM:
        return f"not permitted (kernel.io_uring_disabled={disabled or '?'}, or a seccomp filter)"
    return f"not available: {os.strerror(code)}"


def numa(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """NUMA nodes in order."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        sizes = dict(re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", text_of(folder / "meminfo")))
        nodes.append(
            NumaNode(
                number=int(folder.name.removeprefix("node")),
                cpus=text_of(folder / "cpulist").strip(),
                total_bytes=int(sizes.get("MemTotal", 0)) << 10,
                free_bytes=int(sizes.get("MemFree", 0)) << 10,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.number))


def disk(path: Path) -> Disk:
    """The file system under `path`. Opens an unnamed file there, so that nothing is left."""
    there = path.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    mount = mount_of(there)
    size = os.statvfs(there)
    return Disk(
        path=str(path),
        mount=mount.point if mount else "unknown",
        fstype=mount.fstype if mount else "unknown",
        size_bytes=size.f_blocks * size.f_frsize,
        free_bytes=size.f_bavail * size.f_frsize,
        direct_io=_direct_io(there),
    )


def _direct_io(folder: Path) -> str:
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"an unnamed file cannot be opened with O_DIRECT: {error.strerror}"
    os.close(fd)
    return "works"


def _chosen(text: str) -> str:
    """`always [madvise] never` -> `madvise`."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"
