"""The engine's KV tensors as pages of bytes, and copies between pages and blocks.

An engine page (vLLM's block) lies in one or more planes: memory in which page `i` starts at
`i * stride` and is `page_bytes` long. Where a layer's pages are apart from other layers' (the
LBHNC layout, the only one on CPUs) every layer is a plane; where all layers of a page are
neighbours (BLHNC) they are one plane, and a page is one copy. A block of `group` pages holds, for
each plane, the plane's `group` pages one after the other, so that neighbouring pages of a plane
are one copy. What the bytes of a page mean is the engine's own: `identity.py` puts it into the key.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiered_kv.errors import UnsupportedCache
from tiered_kv.integrations.vllm.plans import Span


@dataclass(frozen=True, slots=True)
class Plane:
    """`memory` is flat uint8 over all pages of the plane; `layers` names whose KV they hold."""

    memory: torch.Tensor
    stride: int
    page_bytes: int
    layers: tuple[str, ...]


class Piece(NamedTuple):
    """`nbytes` at `page_at` of a plane's memory belong at `slot_at` of a block."""

    plane: int
    page_at: int
    slot_at: int
    nbytes: int


class Pages:
    """All planes of one worker. Knows no service; every call is safe from any thread."""

    def __init__(self, planes: Sequence[Plane], group: int) -> None:
        """Blocks of `group` pages."""
        self.planes = tuple(planes)
        self.group = group
        self.page_bytes = sum(plane.page_bytes for plane in planes)
        starts = [0]
        for plane in planes:
            starts.append(starts[-1] + group * plane.page_bytes)
        self._starts = starts
        self._plane_of = {name: i for i, plane in enumerate(planes) for name in plane.layers}

    @property
    def payload_bytes(self) -> int:
        """Bytes of a whole block."""
        return self._starts[-1]

    @property
    def is_cuda(self) -> bool:
        """Whether the engine's KV is on a GPU."""
        return bool(self.planes[0].memory.is_cuda)

    def plane_of(self, layer: str) -> int | None:
        """The plane that holds a layer; None for a layer without a cache of its own here."""
        return self._plane_of.get(layer)

    def pieces(self, span: Span, planes: Iterable[int] | None = None) -> Iterator[Piece]:
        """The copies of a span, neighbouring pages merged. O(pages * planes)."""
        runs = _runs(span)
        for index in range(len(self.planes)) if planes is None else planes:
            plane = self.planes[index]
            size, start = plane.page_bytes, self._starts[index]
            dense = plane.stride == size
            for page, at, n in runs:
                if dense:
                    yield Piece(index, page * size, start + at * size, n * size)
                else:
                    for i in range(n):
                        yield Piece(index, (page + i) * plane.stride, start + (at + i) * size, size)


def _runs(span: Span) -> list[tuple[int, int, int]]:
    """(first page, place in the block, number) of each run of neighbouring pages."""
    runs: list[tuple[int, int, int]] = []
    for at, page in enumerate(span.pages, span.first):
        if runs and runs[-1][0] + runs[-1][2] == page:
            first, place, n = runs[-1]
            runs[-1] = first, place, n + 1
        else:
            runs.append((page, at, 1))
    return runs


def planes_of(caches: dict[str, torch.Tensor], n_pages: int) -> list[Plane]:
    """The planes of an engine's registered tensors, in the order of their first layers: memory
    lies elsewhere in every process, and equal engines share blocks.

    Raises `UnsupportedCache` naming the layer whose tensor is not a row of dense pages.
    """
    rows: dict[tuple[int, int, int], list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in caches.items():
        for address, stride, nbytes, view in _rows(name, tensor, n_pages):
            rows.setdefault((address, stride, nbytes), []).append(name)
            tensors.setdefault(address, view)
    merged: list[tuple[int, int, int, list[str]]] = []
    for (address, stride, nbytes), names in sorted(rows.items()):
        if merged:
            first, other, size, layers = merged[-1]
            if stride == other and first + size == address and size + nbytes <= stride:
                merged[-1] = first, other, size + nbytes, layers + names
                continue
        merged.append((address, stride, nbytes, list(names)))
    place = {name: i for i, name in enumerate(caches)}
    merged.sort(key=lambda one: (min(place[name] for name in one[3]), one[0]))
    return [
        Plane(_memory(tensors[address], n_pages, stride, nbytes), stride, nbytes, tuple(names))
        for address, stride, nbytes, names in merged
    ]


def _rows(
    name: str, tensor: torch.Tensor, n_pages: int
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(address, stride, bytes, view) of a layer's pages: one row, or one for K and one for V."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedCache(
            f"layer {name} keeps {type(tensor).__name__} and not a tensor of attention pages"
        )
    if tensor.dim() > 1 and tensor.shape[0] == 2 and tensor.shape[1] == n_pages:
        for half in (tensor[0], tensor[1]):
            yield from _rows(name, half, n_pages)
        return
    split, rest = divmod(tensor.shape[0], n_pages)  # kernels may cut a page into several
    inner = tensor[0]
    if rest or split < 1 or not _dense(inner) or (split > 1 and not _dense(tensor)):
        raise UnsupportedCache(
            f"layer {name} has a cache of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}, which is not {n_pages} pages of bytes"
        )
    item = tensor.element_size()
    yield tensor.data_ptr(), tensor.stride(0) * item * split, inner.numel() * item * split, tensor


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory without holes, in whatever order."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _memory(tensor: torch.Tensor, n_pages: int, stride: int, nbytes: int) -> torch.Tensor:
    """Flat uint8 over the memory from a plane's first to its last page."""
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    length = (n_pages - 1) * stride + nbytes
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, start, (length,), (1,))
    return flat
