"""Copies between a transformers cache and blocks. Pure: no client, no clock, nothing kept.

A block is a tensor `[layers, 2, kv_heads, block_tokens, head_dim]`, plane 0 keys, plane 1 values.
A layer of a cache has keys and values of shape `[1, kv_heads, tokens, head_dim]`.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from tiered_kv.errors import BadLayout, UnsupportedCache
from tiered_kv.integrations.hf_layout import new_cache
from tiered_kv.layout import KVLayout
from tiered_kv.types import ALIGNMENT


def check_cache(cache: Cache, layout: KVLayout | None = None) -> int:
    """How many tokens `cache` holds; 0 when it was never filled.

    Raises `UnsupportedCache`, naming the class and the layer, unless it is a `DynamicCache` of
    nothing but plain `DynamicLayer`s: a subclass may keep state that a copy of keys and values
    does not have. Raises `BadLayout`, naming the value, unless the batch is 1, all layers have
    the same length and, with `layout`, its dtype, heads, head_dim and number of layers.
    O(layers), a few microseconds each.
    """
    if type(cache) is not DynamicCache:
        raise UnsupportedCache(f"a {type(cache).__name__} cannot be saved; only a DynamicCache can")
    if cache.offloading:
        raise UnsupportedCache("a DynamicCache with offloading=True moves its layers by itself")
    tokens: int | None = None
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedCache(
                f"layer {index} is a {type(layer).__name__}; only DynamicLayer can be saved"
            )
        held = layer.get_seq_length()
        if tokens is None:
            tokens = held
        if held != tokens:
            raise BadLayout(f"layer {index} holds {held} tokens and layer 0 holds {tokens}")
        if held:
            _check_layer(index, layer, layout)
    if tokens and layout is not None and len(cache.layers) != layout.layers:
        raise BadLayout(f"the cache has {len(cache.layers)} layers, the layout {layout.layers}")
    return tokens or 0


def _check_layer(index: int, layer: DynamicLayer, layout: KVLayout | None) -> None:
    keys, values = _planes(layer)
    if keys.shape != values.shape or keys.ndim != 4 or keys.shape[0] != 1:
        raise BadLayout(
            f"layer {index} has keys {list(keys.shape)} and values {list(values.shape)}; both "
            "must be [1, kv_heads, tokens, head_dim] (one sequence, batch 1)"
        )
    if layout is None:
        return
    have = (keys.shape[1], keys.shape[3], keys.dtype, values.dtype)
    dtype = dtype_of(layout)
    if have != (layout.kv_heads, layout.head_dim, dtype, dtype):
        raise BadLayout(
            f"layer {index} has {have[0]} heads of {have[1]} in {keys.dtype} and {values.dtype}, "
            f"the layout {layout.kv_heads} of {layout.head_dim} in {dtype}"
        )


def pack(cache: Cache, layout: KVLayout, index: int, tokens: int, out: torch.Tensor) -> None:
    """Copy tokens `[index * block_tokens, + tokens)` of all layers into the block `out`.

    `out` has `layout.shape`, on any device; all of it is written, zeros where there is no token,
    so that nothing of an earlier owner remains. Padding beyond `out` is `pack_slot`'s. Returns
    when the bytes have arrived. One gather when the devices are the same, otherwise a gather
    beside the cache and one copy across. Raises what `check_cache` raises, and `BadLayout` for a
    range that the cache does not hold; nothing was written then.
    """
    held = check_cache(cache, layout)
    _check_block(out, layout)
    start = index * layout.block_tokens
    if index < 0 or not 1 <= tokens <= layout.block_tokens or start + tokens > held:
        raise BadLayout(
            f"tokens [{start}, {start + tokens}) of a block of {layout.block_tokens} are not "
            f"within the {held} tokens of the cache"
        )
    planes = [
        plane.detach()[0, :, start : start + tokens]
        for layer in _plain(cache)
        for plane in _planes(layer)
    ]
    devices = {plane.device for plane in planes}
    with torch.no_grad():
        if devices == {out.device} and tokens == layout.block_tokens:
            torch.cat(planes, out=out.view(-1, tokens, layout.head_dim))  # one call: twice as fast
        elif len(devices) == 1 and out.device not in devices:
            staged = torch.stack(planes).view(*layout.shape[:3], tokens, layout.head_dim)
            out[:, :, :, :tokens].copy_(staged)
        else:
            for target, plane in zip(out.flatten(0, 1).unbind(0), planes, strict=True):
                target[:, :tokens].copy_(plane)
        out[:, :, :, tokens:].zero_()


def pack_slot(
    cache: Cache,
    layout: KVLayout,
    index: int,
    tokens: int,
    pool: torch.Tensor,
    slot: int,
) -> None:
    """`pack` into a slot of a pool, its padding included: all `block_bytes` are defined then."""
    pack(cache, layout, index, tokens, slot_tensor(pool, slot, layout))
    pool[slot + layout.payload_bytes : slot + layout.block_bytes].zero_()


def unpack(
    blocks: Sequence[torch.Tensor],
    layout: KVLayout,
    n_tokens: int,
    config: PreTrainedConfig,
    device: torch.device | str = "cpu",
) -> DynamicCache:
    """A cache with the first `n_tokens` tokens of `blocks`, a run from the first block on.

    One allocation a layer; keys and values are contiguous. Nothing refers to `blocks` after the
    return, so their slots may be released. A block on another device crosses in one copy. Raises
    `BadLayout` when `blocks` are not just enough for `n_tokens` or differ from the layout, and
    `UnsupportedCache` when `config` is of a model that wants another kind of cache.
    """
    if n_tokens < 1 or len(blocks) != -(-n_tokens // layout.block_tokens):
        raise BadLayout(
            f"{len(blocks)} blocks of {layout.block_tokens} tokens do not hold {n_tokens} tokens "
            "without a block to spare"
        )
    cache = new_cache(config.get_text_config(decoder=True))
    if len(cache.layers) != layout.layers:
        raise BadLayout(f"the model has {len(cache.layers)} layers, the layout {layout.layers}")
    for block in blocks:
        _check_block(block, layout)
    for layer, planes in zip(_plain(cache), _join(blocks, layout, n_tokens, device), strict=True):
        keys, values = planes[0].unsqueeze(0), planes[1].unsqueeze(0)
        layer.lazy_initialization(keys, values)
        # Assigned rather than given to `update`, which would copy everything once more.
        layer.keys, layer.values = keys, values
    return cache


def _join(
    blocks: Sequence[torch.Tensor],
    layout: KVLayout,
    n_tokens: int,
    device: torch.device | str,
) -> list[torch.Tensor]:
    """For each layer `[2, kv_heads, n_tokens, head_dim]` on `device`, contiguous."""
    last = n_tokens - (len(blocks) - 1) * layout.block_tokens
    parts = [*blocks[:-1], blocks[-1][:, :, :, :last]]
    if all(part.device == torch.device(device) for part in parts):
        by_layer = zip(*(part.unbind(0) for part in parts), strict=True)
        return [torch.cat(pieces, dim=2) for pieces in by_layer]
    # From another device a whole block at a time: the fewest copies across, and no more than one
    # block of the target's memory beside the cache.
    shape = (2, layout.kv_heads, n_tokens, layout.head_dim)
    layers = [
        torch.empty(shape, dtype=dtype_of(layout), device=device) for _ in range(layout.layers)
    ]
    for index, part in enumerate(parts):
        start = index * layout.block_tokens
        for target, source in zip(layers, part.to(device).unbind(0), strict=True):
            target[:, :, start : start + source.shape[2]].copy_(source)
    return layers


def slot_tensor(pool: torch.Tensor, slot: int, layout: KVLayout) -> torch.Tensor:
    """The block at byte offset `slot` of a flat uint8 `pool`: a view of `layout.shape`, no copy.

    Raises `BadLayout` for a pool that is not flat, contiguous uint8 and for a slot that is not
    aligned or does not fit.
    """
    if pool.dtype is not torch.uint8 or pool.ndim != 1 or not pool.is_contiguous():
        raise BadLayout(f"a pool is flat uint8, not {pool.dtype} of shape {list(pool.shape)}")
    if slot < 0 or slot % ALIGNMENT or slot + layout.block_bytes > pool.numel():
        raise BadLayout(
            f"slot {slot} of {layout.block_bytes} bytes is not a multiple of {ALIGNMENT} within "
            f"a pool of {pool.numel()} bytes"
        )
    payload = pool[slot : slot + layout.payload_bytes]
    return payload.view(dtype_of(layout)).view(layout.shape)


def dtype_of(layout: KVLayout) -> torch.dtype:
    """The torch dtype of a layout."""
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_block(block: torch.Tensor, layout: KVLayout) -> None:
    if tuple(block.shape) != layout.shape or block.dtype is not dtype_of(layout):
        raise BadLayout(
            f"a block is {layout.dtype} of shape {list(layout.shape)}, not {block.dtype} of "
            f"{list(block.shape)}"
        )
    if not block.is_contiguous():
        raise BadLayout(f"a block is contiguous; this one has strides {block.stride()}")


def _plain(cache: Cache) -> list[DynamicLayer]:
    """The layers of a cache that was checked or made here, with their type."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


def _planes(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer that holds tokens."""
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values
