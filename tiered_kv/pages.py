"""System calls on mapped pages that Python does not offer. Linux, x86-64 and arm64."""

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from tiered_kv.errors import BadInput

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) by the thread that waits."""

PREFAULT_CHUNK = 64 << 20
MAX_THREADS = 8
"""Zeroing pages is bound by memory bandwidth; a few cores reach it."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_PREFERRED = 1
_MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
_MACHINE = platform.machine()
_MBIND = {"x86_64": 237, "aarch64": 235}.get(_MACHINE)
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(_MACHINE)

_libc = ctypes.CDLL(None, use_errno=True)  # its functions are called without the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


def advise_huge(address: int, nbytes: int) -> bool:
    """Ask for 2 MiB pages; False where the kernel has none. On /dev/shm it takes effect only when
    the mount has `huge=advise` (or within_size, always), and only before the pages exist."""
    return bool(_libc.madvise(address, nbytes, _MADV_HUGEPAGE) == 0)


def populate(address: int, nbytes: int) -> None:
    """Make pages present and writable. Keeps what is in them. Releases the GIL.

    Raises `OSError`: EINVAL before Linux 5.14, ENOMEM or EFAULT when there is no memory for them
    (EFAULT is what a later access would have raised as SIGBUS).
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"populating {nbytes} bytes: {os.strerror(code)}")


def prefault(address: int, nbytes: int, progress: Progress | None = None) -> None:
    """`populate` in chunks over a few threads. Blocks until done.

    Raises what `populate` and `progress` raise, after the running chunks ended; the others are
    not begun.
    """
    end = address + nbytes
    chunks = [(a, min(PREFAULT_CHUNK, end - a)) for a in range(address, end, PREFAULT_CHUNK)]
    done = 0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "prefault") as pool:
        futures = {pool.submit(populate, a, n): n for a, n in chunks}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                if progress is not None:
                    progress(done, nbytes)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Place pages that do not exist yet on this NUMA node, on others only when it is full.

    Preferred, not bound: a bound mapping whose node is full gets the process killed. Raises
    `BadInput` for a node that this machine does not have.
    """
    if not 0 <= node < 1024 or _MBIND is None:
        raise BadInput(f"numa_node {node} cannot be used on this {_MACHINE} machine")
    mask = (ctypes.c_ulong * 17)()
    mask[node // 64] = 1 << node % 64
    call = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_PREFERRED, mask)
    if _libc.syscall(_MBIND, *call, ctypes.c_ulong(1025), 0) != 0:
        code = ctypes.get_errno()
        if code != errno.ENOSYS:  # a kernel without NUMA has one node
            raise BadInput(f"numa_node {node} cannot be used: {os.strerror(code)}")


def fence() -> None:
    """A full memory barrier where loads or stores are reordered; nothing on x86-64 (see
    `generations`). About a microsecond on arm64."""
    if _MACHINE != "x86_64":
        full_barrier()


def full_barrier() -> None:
    """membarrier(GLOBAL_EXPEDITED): the caller has executed a full barrier when it returns."""
    if _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"membarrier is missing on this {_MACHINE} machine")
