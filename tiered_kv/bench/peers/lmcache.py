"""LMCache's multiprocess connector under vLLM for CPUs: what keeps the two from starting together.

vLLM 0.32 looks through the attributes of every loaded module for kernels to replace. LMCache loads
numba before that, whose handle of LLVM's library (`llvmlite.binding.ffi.lib`) makes up any
attribute it is asked for, `__dict__` too, as a function; vLLM then fails on it.
"""


def prepare() -> None:
    """Give the library's handle an empty `__dict__`. Nothing else of either is touched."""
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}
