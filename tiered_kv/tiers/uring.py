"""The kernel's io_uring over ctypes and mmap: setup, submit, wait, reap, registered buffers.

Only the ABI lives here; see `io_uring.py` for the engine. A ring belongs to one thread at a time.
Numbers and layouts are those of linux/io_uring.h; syscall numbers are the same on all
architectures since Linux 5.1.
"""

import ctypes
import errno
import mmap
import os
import struct

from tiered_kv.pages import fence

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OFF_SQES = 0x10000000
_SETUP_CLAMP, _SETUP_COOP_TASKRUN = 1 << 4, 1 << 8
_FEAT_SINGLE_MMAP, _FEAT_NODROP = 1 << 0, 1 << 1
_ENTER_GETEVENTS = 1
_REGISTER_BUFFERS, _REGISTER_CLONE_BUFFERS = 0, 30
_READ_FIXED, _WRITE_FIXED, _READ, _WRITE = 4, 5, 22, 23
_PARAMS = struct.Struct("<10I 8IQ 8IQ")
_SQE = struct.Struct("<BBHiQQIIQH22x")  # opcode flags ioprio fd off addr len rw user_data buf
_CQE = struct.Struct("<QiI")  # user_data result flags
_U32 = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: calls release the GIL
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _call(number: int, *args: object) -> int:
    result = int(_syscall(ctypes.c_long(number), *args))
    return -ctypes.get_errno() if result < 0 else result


class Ring:
    """One submission and completion queue of `entries` ops. Raises `OSError` where refused."""

    def __init__(self, entries: int) -> None:
        self.fd, params = _setup(entries)
        sq_entries, cq_entries, features = params[0], params[1], params[5]
        sq, cq = params[10:19], params[19:28]
        if not features & _FEAT_SINGLE_MMAP or not features & _FEAT_NODROP:
            os.close(self.fd)
            raise OSError(errno.ENOSYS, "io_uring of this kernel is too old")
        self.entries: int = min(sq_entries, entries)
        size = max(sq[6] + 4 * sq_entries, cq[5] + _CQE.size * cq_entries)
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            self._map = mmap.mmap(self.fd, size, flags=shared)
            self._sqes = mmap.mmap(self.fd, 64 * sq_entries, flags=shared, offset=_OFF_SQES)
        except OSError:
            os.close(self.fd)
            raise
        self._words = memoryview(self._map).cast("I")
        self._sq_head, self._sq_tail, self._sq_mask = sq[0] // 4, sq[1] // 4, sq_entries - 1
        self._cq_head, self._cq_tail, self._cq_mask = cq[0] // 4, cq[1] // 4, cq_entries - 1
        self._cqes = cq[5]
        self.registered = False  # set by the owner once its buffers are
        for i in range(sq_entries):  # SQE i always goes through array slot i
            self._words[sq[6] // 4 + i] = i

    def push(
        self, write: bool, fd: int, offset: int, address: int, nbytes: int, tag: int, buffer: int
    ) -> None:
        """Queue one op; the caller sees to it that `busy < entries`. Not yet submitted.

        `buffer` is the index of the registered buffer it lies in, or -1 for none.
        """
        if buffer < 0:
            code, buffer = (_WRITE if write else _READ), 0
        else:
            code = _WRITE_FIXED if write else _READ_FIXED
        words, tail = self._words, self._words[self._sq_tail]
        _SQE.pack_into(
            self._sqes,
            (tail & self._sq_mask) * 64,
            *(code, 0, 0, fd, offset, address, nbytes, 0, tag, buffer),
        )
        words[self._sq_tail] = (tail + 1) & _U32

    @property
    def unsubmitted(self) -> int:
        """Ops that were pushed and that the kernel has not taken."""
        return (self._words[self._sq_tail] - self._words[self._sq_head]) & _U32

    @property
    def in_flight(self) -> int:
        """Ops that the kernel took and that were not reaped: their buffers are in use.

        Read from the rings themselves, where every taken op is answered exactly once, so that it
        is right after any interruption.
        """
        return (self._words[self._sq_head] - self._words[self._cq_head]) & _U32

    @property
    def busy(self) -> int:
        """Ops pushed and not reaped."""
        return (self._words[self._sq_tail] - self._words[self._cq_head]) & _U32

    def enter(self, wait: int) -> int:
        """Submit what was pushed and wait until at least `wait` ops can be reaped.

        Returns 0 or more, or a negative errno: EINTR when a signal came first, EAGAIN or EBUSY
        when the kernel is short of memory. What was submitted is read from the rings afterwards.
        """
        flags = _ENTER_GETEVENTS if wait else 0
        return _call(
            _ENTER,
            *(self.fd, self.unsubmitted, wait, flags),
            *(ctypes.c_void_p(None), ctypes.c_size_t(0)),
        )

    def reap(self) -> list[tuple[int, int]]:
        """`(tag, result)` of the ops that ended; result as in `OnDone`. Does not wait."""
        words = self._words
        head, tail = words[self._cq_head], words[self._cq_tail]
        if head == tail:
            return []
        fence()  # a weakly ordered CPU may have read the entries below before the tail above
        found = []
        while head != tail:
            at = self._cqes + (head & self._cq_mask) * _CQE.size
            tag, result, _ = _CQE.unpack_from(self._map, at)
            found.append((tag, result))
            head = (head + 1) & _U32
        words[self._cq_head] = head
        return found

    def take_back(self) -> list[int]:
        """Unqueue what the kernel has not taken; returns the tags."""
        words, tags = self._words, []
        head, tail = words[self._sq_head], words[self._sq_tail]
        while tail != head:
            tail = (tail - 1) & _U32
            tags.append(struct.unpack_from("<Q", self._sqes, (tail & self._sq_mask) * 64 + 32)[0])
        words[self._sq_tail] = head
        return tags

    def register(self, address: int, nbytes: int, chunk_bytes: int) -> int:
        """Pin memory as buffers of `chunk_bytes` each. 0, or a negative errno (see `setrlimit`
        MEMLOCK). Blocks while pages are faulted in."""
        starts = range(0, nbytes, chunk_bytes)
        iovecs = b"".join(
            struct.pack("<QQ", address + at, min(chunk_bytes, nbytes - at)) for at in starts
        )
        return _call(_REGISTER, self.fd, _REGISTER_BUFFERS, iovecs, len(starts))

    def clone_buffers(self, other: "Ring") -> int:
        """Share the registered buffers of another ring (Linux 6.12). 0 or a negative errno."""
        request = struct.pack("<8I", other.fd, *[0] * 7)
        return _call(_REGISTER, self.fd, _REGISTER_CLONE_BUFFERS, request, 1)

    def close(self) -> None:
        """Unmap and close. Only when nothing is in flight."""
        self._words.release()
        self._map.close()
        self._sqes.close()
        os.close(self.fd)


def _setup(entries: int) -> tuple[int, tuple[int, ...]]:
    """The ring's fd and the parameters the kernel filled in; the newest flags it knows."""
    result = -errno.EINVAL
    for flags in (_SETUP_CLAMP | _SETUP_COOP_TASKRUN, _SETUP_CLAMP):
        params = ctypes.create_string_buffer(_PARAMS.size)
        struct.pack_into("<I", params, 8, flags)
        result = _call(_SETUP, entries, params)
        if result >= 0:
            os.set_inheritable(result, False)
            return result, _PARAMS.unpack(params.raw)
        if result != -errno.EINVAL:
            break
    raise OSError(-result, os.strerror(-result))
