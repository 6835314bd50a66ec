"""The layout of a transformers model's KV, and the identity of its weights."""

import hashlib
import json

import torch
import xxhash
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tiered_kv.errors import BadLayout, UnsupportedCache
from tiered_kv.layout import KVLayout

ENGINE = "hf:layers,planes,heads,tokens,dim"
"""Order of the bytes in a block: keys then values of each layer, heads before tokens."""

_DIGEST_CHUNK_BYTES = 64 << 20
# Where a config was loaded from and what it was saved with do not change what it computes.
_NOT_IDENTITY = frozenset(
    (
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "transformers_version",
        "use_cache",
    )
)


def layout_of(
    model: PreTrainedModel, *, block_tokens: int = 256, revision: str | None = None
) -> KVLayout:
    """The layout of blocks of `block_tokens` tokens of this model's KV.

    Without `revision` the weights name themselves: it becomes `weights_digest(model)`, which
    reads all of them once (about 0.1 s a GB in memory), and the same weights share blocks
    wherever they were loaded from. With `revision` nothing is read, and the caller vouches that
    the model's name or path together with `revision` (a commit, say) never stands for two
    different sets of weights.

    Raises `UnsupportedCache` for a model whose cache is not made of plain attention layers, and
    `BadLayout` for a config that does not tell its sizes, for weights that cannot be read, and
    for a `revision` of a model without a name.
    """
    config = model.config.get_text_config(decoder=True)
    layers = new_cache(config).layers
    heads = getattr(config, "num_key_value_heads", None) or _size(config, "num_attention_heads")
    dim = getattr(config, "head_dim", None)
    if dim is None:
        dim = _size(config, "hidden_size") // _size(config, "num_attention_heads")
    if revision is None:
        name, revision = type(model).__name__, weights_digest(model)
    else:
        name = getattr(model.config, "_name_or_path", "")
        if not name or not revision:
            raise BadLayout(
                f"revision {revision!r} of a model named {name!r} does not name its weights: "
                "load it by name, or leave revision out so that the weights are read"
            )
    return KVLayout(
        model=name,
        revision=revision,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=len(layers),
        kv_heads=heads,
        head_dim=dim,
        block_tokens=block_tokens,
        engine=ENGINE,
    )


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache of plain attention layers for this model.

    Raises `UnsupportedCache` naming the first layer of another kind (sliding window, linear
    attention, indexed ...) and for encoder-decoder models.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedCache(
            f"{type(config).__name__} is an encoder-decoder: its cross-attention cache depends "
            "on the encoder's input, which no key covers"
        )
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedCache(
                f"{type(config).__name__} wants {type(layer).__name__} at layer {index}; only "
                "DynamicLayer (plain attention over all tokens) can be saved and resumed exactly"
            )
    return cache


def weights_digest(model: PreTrainedModel) -> str:
    """32 hex digits that change with any bit that this model computes KV from.

    BLAKE2b over the config (without names, paths and versions) and, for each parameter and
    buffer in order of its name, over name, dtype, shape and the xxh3_128 of all its bytes.
    Buffers that checkpoints leave out, such as rotary frequencies, are covered. Weights are not
    sampled: a merged adapter may change a single matrix. The same in every process and on every
    device; weights on a GPU are copied to the host in pieces of 64 MiB.

    Raises `BadLayout` where weights are not in memory (meta, offloaded to disk) and where
    adapters are attached, since these can be switched without changing a weight.
    """
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise BadLayout(
            f"{type(model).__name__} has adapters that can be switched: merge them, or give a "
            "revision for each"
        )
    fields = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_IDENTITY}
    state = hashlib.blake2b(digest_size=16, person=b"tieredkv.weights")
    state.update(json.dumps(fields, sort_keys=True, default=str).encode())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        head = f"\n{name} {tensor.dtype} {list(tensor.shape)} ".encode()
        state.update(head + _tensor_digest(name, tensor.detach()))
    return state.hexdigest()


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """xxh3_128 over the bytes of a tensor in row-major order."""
    if tensor.device.type == "meta":
        raise BadLayout(f"weight {name} is not in memory (device meta): give a revision")
    state = xxhash.xxh3_128()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _DIGEST_CHUNK_BYTES):
        piece = flat[start : start + _DIGEST_CHUNK_BYTES]
        state.update(piece.cpu().numpy().data)
    return state.digest()


def _size(config: PreTrainedConfig, field: str) -> int:
    value = getattr(config, field, None)
    if type(value) is not int or value < 1:
        raise BadLayout(
            f"{type(config).__name__}.{field} must be a positive integer, not {value!r}"
        )
    return value
