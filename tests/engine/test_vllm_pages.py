"""Engine pages as bytes: planes of real tensors, and copies against the shortest loop."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.errors import UnsupportedCache
from tiered_kv.integrations.vllm import copying as copying_module
from tiered_kv.integrations.vllm.copying import HostCopying, copying
from tiered_kv.integrations.vllm.pages import Pages, Plane, planes_of
from tiered_kv.integrations.vllm.plans import Span
from tiered_kv.integrations.vllm.requests import spans

N = 12
HEADS, TOKENS, DIM, LAYERS = 2, 4, 8, 3
PAGE_BYTES = 2 * HEADS * TOKENS * 2 * DIM  # of a layer, bfloat16


def layers_apart() -> dict[str, torch.Tensor]:
    """LBHNC: every layer has its own tensor of pages."""
    return {
        f"l{i}": torch.zeros(N, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16) for i in range(LAYERS)
    }


def layers_together() -> dict[str, torch.Tensor]:
    """BLHNC: all layers of a page are neighbours in one memory."""
    memory = torch.zeros(N, LAYERS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    return {f"l{i}": memory[:, i] for i in range(LAYERS)}


def halves() -> dict[str, torch.Tensor]:
    """[2, blocks, ...]: K of all pages, then V of all pages."""
    return {
        f"l{i}": torch.zeros(2, N, TOKENS, HEADS, DIM, dtype=torch.bfloat16) for i in range(LAYERS)
    }


def kernel_pages() -> dict[str, torch.Tensor]:
    """Kernels that cut each page into two of their own."""
    return {
        f"l{i}": torch.zeros(2 * N, HEADS, TOKENS // 2, 2 * DIM, dtype=torch.bfloat16)
        for i in range(LAYERS)
    }


def strided() -> dict[str, torch.Tensor]:
    """Logical [pages, heads, tokens, dim] over memory of [pages, tokens, heads, dim]."""
    return {
        f"l{i}": torch.zeros(N, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
        for i in range(LAYERS)
    }


SHAPES = [layers_apart, layers_together, halves, kernel_pages, strided]


def page_elements(name: str, tensor: torch.Tensor, page: int) -> torch.Tensor:
    """All elements of one page of a layer, by the tensor's own meaning."""
    if tensor.shape[0] == 2:
        return tensor[:, page]
    split = tensor.shape[0] // N
    return tensor[page * split : (page + 1) * split]


def test_layers_apart_are_a_plane_each() -> None:
    planes = planes_of(layers_apart(), N)
    assert [p.layers for p in planes] == [("l0",), ("l1",), ("l2",)]
    assert {(p.stride, p.page_bytes) for p in planes} == {(PAGE_BYTES, PAGE_BYTES)}


def test_planes_are_in_the_order_of_layers_wherever_their_memory_is() -> None:
    memory = torch.zeros(LAYERS, 2, N, 64)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        tensors = {f"l{i}": memory[at] for i, at in enumerate(order)}
        planes = planes_of(tensors, N)
        assert [p.layers for p in planes] == [(f"l{i}",) for i in range(LAYERS) for _ in "kv"]
        starts = [p.memory.data_ptr() for p in planes]
        assert starts[::2] == [tensors[f"l{i}"][0].data_ptr() for i in range(LAYERS)]


def test_neighbouring_layers_are_one_plane_in_the_order_of_their_bytes() -> None:
    (plane,) = planes_of(dict(reversed(layers_together().items())), N)
    assert plane.layers == ("l0", "l1", "l2")
    assert plane.stride == plane.page_bytes == LAYERS * PAGE_BYTES
    assert plane.memory.numel() == N * LAYERS * PAGE_BYTES


def test_keys_and_values_apart_are_two_planes_a_layer() -> None:
    planes = planes_of(halves(), N)
    assert len(planes) == 2 * LAYERS
    assert {p.page_bytes for p in planes} == {PAGE_BYTES // 2}


def test_pages_that_kernels_split_are_whole_pages() -> None:
    planes = planes_of(kernel_pages(), N)
    assert {(p.stride, p.page_bytes) for p in planes} == {(PAGE_BYTES, PAGE_BYTES)}


def test_layers_that_share_their_cache_are_copied_once() -> None:
    tensor = layers_apart()["l0"]
    (plane,) = planes_of({"l0": tensor, "l7": tensor}, N)
    assert plane.layers == ("l0", "l7")


def test_padding_between_pages_belongs_to_no_plane() -> None:
    memory = torch.zeros(N, 2 * PAGE_BYTES, dtype=torch.uint8)
    (plane,) = planes_of({"l0": memory[:, :PAGE_BYTES]}, N)
    assert (plane.stride, plane.page_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    assert plane.memory.numel() == (N - 1) * 2 * PAGE_BYTES + PAGE_BYTES


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(N + 1, 8),  # not so many pages
        torch.zeros(N - 1, 8),
        torch.zeros(N, 8)[:, ::2],  # holes within a page
        torch.zeros(1, 8).expand(N, 8)[:, :1].expand(N, 8),  # one element for all
        torch.zeros(2 * N, 8, 8)[:, :4],  # split pages with holes between the parts
    ],
    ids=["more", "fewer", "holes", "expanded", "split-with-holes"],
)
def test_what_is_no_row_of_dense_pages_is_refused_by_its_name(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedCache, match=r"layer model\.layers\.3\.attn"):
        planes_of({"model.layers.3.attn": tensor}, N)


def test_a_layer_that_keeps_no_tensor_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedCache, match="layer mamba keeps list"):
        planes_of({"mamba": [torch.zeros(N, 8)]}, N)  # type: ignore[dict-item]


def test_the_planes_memory_is_the_engines_own() -> None:
    tensors = layers_apart()
    plane = planes_of(tensors, N)[0]
    plane.memory.fill_(1)
    assert tensors[plane.layers[0]].view(torch.uint8).eq(1).all()


def test_layers_are_found_by_their_planes() -> None:
    pages = Pages(planes_of(layers_together(), N), 4)
    assert pages.plane_of("l2") == 0
    assert pages.plane_of("no such layer") is None
    assert pages.page_bytes == LAYERS * PAGE_BYTES
    assert pages.payload_bytes == 4 * pages.page_bytes
    assert not pages.is_cuda


# -- pieces ---------------------------------------------------------------------------------


@st.composite
def memories(draw: st.DrawFn) -> tuple[Pages, list[Span]]:
    group = draw(st.integers(1, 5))
    planes = []
    for i in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 7))
        stride = size + draw(st.sampled_from([0, 0, 3]))
        planes.append(Plane(torch.zeros((N - 1) * stride + size, dtype=torch.uint8), stride, size,
                            (f"l{i}",)))  # fmt: skip
    some = draw(st.permutations(range(N)))[: draw(st.integers(1, N))]
    first = draw(st.integers(0, group - 1))
    return Pages(planes, group), list(spans(some, first, group))


def naive(pages: Pages, span: Span) -> list[tuple[int, int, int]]:
    """(plane, byte of its memory, byte of the block), one by one."""
    out, start = [], 0
    for index, plane in enumerate(pages.planes):
        for i, page in enumerate(span.pages):
            for byte in range(plane.page_bytes):
                place = start + (span.first + i) * plane.page_bytes + byte
                out.append((index, page * plane.stride + byte, place))
        start += pages.group * plane.page_bytes
    return out


@given(memories())
def test_pieces_are_the_bytes_of_the_shortest_loop(case: tuple[Pages, list[Span]]) -> None:
    pages, parts = case
    for span in parts:
        found = [
            (p.plane, p.page_at + i, p.slot_at + i)
            for p in pages.pieces(span)
            for i in range(p.nbytes)
        ]
        assert sorted(found) == sorted(naive(pages, span))


@given(memories(), st.data())
def test_pieces_of_some_planes_are_those_of_all_planes(
    case: tuple[Pages, list[Span]], data: st.DataObject
) -> None:
    pages, parts = case
    some = data.draw(st.lists(st.integers(0, len(pages.planes) - 1), unique=True))
    wanted = [p for p in pages.pieces(parts[0]) if p.plane in some]
    assert sorted(pages.pieces(parts[0], iter(some))) == sorted(wanted)


def test_neighbouring_pages_are_one_copy_a_plane() -> None:
    pages = Pages(planes_of(layers_together(), N), 4)
    assert len(list(pages.pieces(Span(0, (3, 4, 5, 6))))) == 1
    assert len(list(pages.pieces(Span(0, (3, 4, 8, 9))))) == 2
    assert len(list(pages.pieces(Span(0, (4, 3))))) == 2


# -- copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_request_that_was_copied_out_comes_back_into_other_pages(make, group: int) -> None:
    tensors = make()
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    pages = Pages(planes_of(tensors, N), group)
    copies = copying(pages)
    source, target = [9, 2, 3, 4, 11], [0, 1, 5, 10, 6]
    parts = spans(source, 0, group)
    slots = [torch.full((pages.payload_bytes + 64,), 77, dtype=torch.uint8) for _ in parts]
    copies.into_slots(slots, parts)
    others = {n: [page_elements(n, t, p).clone() for p in (7, 8)] for n, t in tensors.items()}
    copies.into_pages(slots, spans(target, 0, group))
    for name, tensor in tensors.items():
        for a, b in zip(source, target, strict=True):
            assert page_elements(name, tensor, a).equal(page_elements(name, tensor, b))
        for page, before in zip((7, 8), others[name], strict=True):
            assert page_elements(name, tensor, page).equal(before)
    assert all(slot[pages.payload_bytes :].eq(77).all() for slot in slots)


def test_part_of_a_block_fills_its_pages_only() -> None:
    tensors = layers_apart()
    pages = Pages(planes_of(tensors, N), 4)
    whole = torch.frombuffer(
        bytearray(random.Random(3).randbytes(pages.payload_bytes)), dtype=torch.uint8
    )
    copying(pages).into_pages([whole], [Span(1, (5, 6))])
    back = torch.zeros_like(whole)
    copying(pages).into_slots([back], [Span(1, (5, 6))])
    start = 0
    for plane in pages.planes:
        one = slice(start + plane.page_bytes, start + 3 * plane.page_bytes)
        assert back[one].equal(whole[one])
        back[one] = 0
        start += 4 * plane.page_bytes
    assert back.eq(0).all()
    for tensor in tensors.values():
        assert tensor[:5].eq(0).all()
        assert tensor[7:].eq(0).all()


def test_copies_by_planes_fill_one_layer_after_the_other() -> None:
    tensors = layers_apart()
    pages = Pages(planes_of(tensors, N), 4)
    slot = torch.full((pages.payload_bytes,), 1, dtype=torch.uint8)
    copies = copying(pages)
    for index, plane in enumerate(pages.planes):
        copies.into_pages([slot], [Span(0, (0, 1))], [index])
        done = {name for p in pages.planes[: index + 1] for name in p.layers}
        for name, tensor in tensors.items():
            assert bool(tensor[:2].view(torch.uint8).eq(1).all()) == (name in done), plane.layers


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 6), st.integers(0, 3))
def test_copies_that_are_split_between_threads_are_the_same(blocks: int, cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying_module, "SPLIT_BYTES", 1)
        patch.setattr(copying_module.os, "cpu_count", lambda: 4)
        tensors = layers_apart()
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        pages = Pages(planes_of(tensors, N), 2)
        copies = HostCopying(pages)
        parts = spans(list(range(2 * blocks - (cut % 2))), 0, 2)
        slots = [torch.zeros(pages.payload_bytes, dtype=torch.uint8) for _ in parts]
        copies.into_slots(slots, parts)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        copies.into_pages(slots, parts)
        n = 2 * blocks - (cut % 2)
        assert all(tensor[:n].equal(before[name][:n]) for name, tensor in tensors.items())
        assert all(tensor[n:].eq(0).all() for tensor in tensors.values())


def test_a_failure_of_either_half_is_raised_after_both_have_ended() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying_module, "SPLIT_BYTES", 1)
        patch.setattr(copying_module.os, "cpu_count", lambda: 4)
        pages = Pages(planes_of(layers_apart(), N), 1)
        good = torch.zeros(pages.payload_bytes, dtype=torch.uint8)
        short = torch.zeros(1, dtype=torch.uint8)
        parts = spans([0, 1], 0, 1)
        for slots in ([good, short], [short, good]):
            with pytest.raises(ValueError, match="broadcast"):
                HostCopying(pages).into_slots(slots, parts)


# -- spans ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 99), max_size=20), st.integers(0, 30), st.integers(1, 6))
def test_spans_put_each_page_at_its_place_in_its_block(
    ids: list[int], first: int, group: int
) -> None:
    parts = spans(ids, first, group)
    found = [
        ((first // group + i) * group + span.first + j, page)
        for i, span in enumerate(parts)
        for j, page in enumerate(span.pages)
    ]
    assert found == list(enumerate(ids, first))
    assert all(span.first + len(span.pages) <= group for span in parts)
