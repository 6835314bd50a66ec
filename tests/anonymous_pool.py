"""Pool memory for tests that need no arena: one anonymous mapping."""

import ctypes
import mmap


class AnonymousPool:
    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(-1, capacity_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._view = memoryview(self._map)

    def view(self, slot, nbytes):
        if not 0 <= slot <= self.capacity_bytes - nbytes:
            raise ValueError(f"slot {slot} of {nbytes} bytes is outside {self.capacity_bytes}")
        return self._view[slot : slot + nbytes]

    def close(self):
        self._view.release()
        self._map.close()
