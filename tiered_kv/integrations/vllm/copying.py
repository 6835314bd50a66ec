"""Copies between the engine's pages and slots of the node's pool. The calling thread waits."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.integrations.vllm.pages import Pages
from tiered_kv.integrations.vllm.plans import Span

Slot = torch.Tensor
"""Flat uint8 over one block in the pool."""
SPLIT_BYTES = 16 << 20
"""Copies of more bytes are shared between two threads: measured here 13 ms for 94 MB in one, 5 to
9 ms in two. A third has no memory bandwidth left to use."""


class Copying(Protocol):
    """Safe from several threads at once, for different pages."""

    def into_pages(
        self, slots: Sequence[Slot], spans: Sequence[Span], planes: Sequence[int] | None = None
    ) -> None:
        """Copy each block's span into the engine's pages; only these planes, if given."""
        ...

    def into_slots(self, slots: Sequence[Slot], spans: Sequence[Span]) -> None:
        """Copy each span of the engine's pages into its block. `ready` was called before."""
        ...

    def ready(self) -> object:
        """A mark of what the engine has computed by now, for `after`. Engine's thread; no wait."""
        ...

    def after(self, mark: object) -> None:
        """Copies that this thread starts from now on see what was computed before the mark."""
        ...


class HostCopying:
    """By the CPU. One call a run of neighbouring pages, the GIL released in between."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._planes: list[NDArray[np.uint8]] = [p.memory.numpy() for p in pages.planes]
        threads = min(2, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kv-copy")
        self._threads = threads

    def into_pages(
        self, slots: Sequence[Slot], spans: Sequence[Span], planes: Sequence[int] | None = None
    ) -> None:
        self._split(slots, spans, planes, True)

    def into_slots(self, slots: Sequence[Slot], spans: Sequence[Span]) -> None:
        self._split(slots, spans, None, False)

    def ready(self) -> object:
        return None

    def after(self, mark: object) -> None:
        return

    def _split(
        self, slots: Sequence[Slot], spans: Sequence[Span], planes: Sequence[int] | None, up: bool
    ) -> None:
        nbytes = sum(len(span.pages) for span in spans) * self._pages.page_bytes
        if self._threads < 2 or len(slots) < 2 or planes is not None or nbytes < SPLIT_BYTES:
            self._copy(slots, spans, planes, up)
            return
        half = len(slots) // 2
        other = self._pool.submit(self._copy, slots[half:], spans[half:], planes, up)
        try:
            self._copy(slots[:half], spans[:half], planes, up)
        finally:
            other.result()  # it must have ended, whatever happens here

    def _copy(
        self, slots: Sequence[Slot], spans: Sequence[Span], planes: Sequence[int] | None, up: bool
    ) -> None:
        for slot, span in zip(slots, spans, strict=True):
            block: NDArray[np.uint8] = slot.numpy()
            for index, at, place, nbytes in self._pages.pieces(span, planes):
                plane = self._planes[index]
                if up:
                    plane[at : at + nbytes] = block[place : place + nbytes]
                else:
                    block[place : place + nbytes] = plane[at : at + nbytes]


class CudaCopying:
    """By the GPU's copy engines, on side streams: one for each direction.

    Full speed and true overlap need a pinned pool (`Arena.pin`).
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        device = pages.planes[0].memory.device
        self._up = torch.cuda.Stream(device=device)
        self._down = torch.cuda.Stream(device=device)

    def into_pages(
        self, slots: Sequence[Slot], spans: Sequence[Span], planes: Sequence[int] | None = None
    ) -> None:
        self._copy(self._up, slots, spans, planes, True)

    def into_slots(self, slots: Sequence[Slot], spans: Sequence[Span]) -> None:
        self._copy(self._down, slots, spans, None, False)

    def ready(self) -> object:
        mark = torch.cuda.Event()
        mark.record()  # on the engine's own stream
        return mark

    def after(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._down.wait_event(mark)

    def _copy(
        self, stream: "torch.cuda.Stream", slots: Sequence[Slot], spans: Sequence[Span],
        planes: Sequence[int] | None, up: bool,
    ) -> None:  # fmt: skip
        arrived = torch.cuda.Event(blocking=True)  # sleeps instead of spinning on a core
        with torch.cuda.stream(stream):
            for slot, span in zip(slots, spans, strict=True):
                for index, at, place, nbytes in self._pages.pieces(span, planes):
                    there = self._pages.planes[index].memory[at : at + nbytes]
                    here = slot[place : place + nbytes]
                    if up:
                        there.copy_(here, non_blocking=True)
                    else:
                        here.copy_(there, non_blocking=True)
            arrived.record(stream)
        arrived.synchronize()


def copying(pages: Pages) -> Copying:
    """The one for where the engine's KV is."""
    return CudaCopying(pages) if pages.is_cuda else HostCopying(pages)
