"""What the bytes of an engine's blocks mean, so that only equal engines share them.

The bytes of a page are opaque to us: which order K and V have in it depends on vLLM's version, the
attention backend, the instruction set and the KV cache layout. All of that is in the layout's
`engine` field and so in every key. Caches that are not one group of plain attention are refused
at the start, by name.
"""

import hashlib
import json
import platform as machine
import sys
from typing import TYPE_CHECKING, Any

import torch

from tiered_kv.errors import BadLayout, UnsupportedCache
from tiered_kv.integrations.vllm import weights
from tiered_kv.integrations.vllm.options import Options
from tiered_kv.integrations.vllm.pages import Pages
from tiered_kv.layout import DTYPE_BYTES, KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raise `UnsupportedCache` for an engine whose cache cannot be kept exactly."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    model = vllm_config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "none"
        raise UnsupportedCache(
            f"{model} has {len(groups)} KV cache groups ({kinds}); TieredKVConnector keeps one "
            "group of plain attention. Where all layers are attention, "
            "disable_hybrid_kv_cache_manager=True makes them one group"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedCache(
            f"{model} keeps a {type(spec).__name__}; TieredKVConnector keeps FullAttentionSpec and "
            "MLAAttentionSpec, whose pages hold every token"
        )
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedCache(
            f"{model}: calculate_kv_scales=True scales the cache differently in every process"
        )
    if getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedCache(
            f"an engine over {parallel.nnodes} hosts: all ranks must be on one host, whose node "
            "keeps their blocks"
        )
    for what in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise UnsupportedCache(
                f"{what}={getattr(parallel, what)}: a page then holds tokens of all over a block"
            )
    algo = cache.prefix_caching_hash_algo
    if not algo.startswith("sha256"):
        raise UnsupportedCache(
            f"prefix_caching_hash_algo={algo!r} does not name blocks across processes; use "
            "'sha256_cbor'"
        )
    if getattr(spec, "tokens_per_state", 1) > 1:
        raise UnsupportedCache(
            f"{model} keeps one state for {spec.tokens_per_state} tokens; TieredKVConnector keeps "
            "caches with a state for each"
        )
    hashed = _either(kv_cache_config, cache, "hash_block_size") or spec.block_size
    if hashed != spec.block_size:
        raise UnsupportedCache(
            f"{model}: blocks are hashed every {hashed} tokens and kept every {spec.block_size}"
        )


def page_tokens(kv_cache_config: "KVCacheConfig") -> int:
    """Tokens of an engine page."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def group_size(options: Options, page: int) -> int:
    """Engine pages of a block of ours: as many as fit into `block_tokens`, at least one."""
    return max(1, options.block_tokens // page)


def layout_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", pages: Pages, options: Options,
    rank: int,
) -> KVLayout:  # fmt: skip
    """The layout of this rank's blocks. May read the weights' files once, see `weights`.

    Raises `BadLayout` for weights without a name and pages that are no whole elements.
    """
    group = kv_cache_config.kv_cache_groups[0]
    spec, model, parallel = (
        group.kv_cache_spec, vllm_config.model_config, vllm_config.parallel_config,
    )  # fmt: skip
    tokens = spec.block_size * pages.group
    revision = options.revision or weights.revision_of(
        weights.local(
            model.model, getattr(model, "revision", None), vllm_config.load_config.download_dir
        ),
        model.hf_config.to_dict(), str(vllm_config.load_config.load_format), model.seed,
    )  # fmt: skip
    layers = len(group.layer_names)
    dtype = str(spec.dtype).removeprefix("torch.")
    heads, dim = _shape(spec, pages, layers, dtype)
    planes = pages.page_bytes // (layers * heads * dim * spec.block_size * DTYPE_BYTES[dtype])
    return KVLayout(
        model="/".join(model.architectures) or model.hf_config.model_type,
        revision=revision,
        dtype=dtype,
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        planes=planes,
        block_tokens=tokens,
        engine=_engine(vllm_config, kv_cache_config, pages),
        tp_rank=rank,
        tp_size=parallel.world_size,
    )


def _shape(spec: "KVCacheSpec", pages: Pages, layers: int, dtype: str) -> tuple[int, int]:
    """(KV heads, head_dim) that account for every byte of a page, in one or two planes."""
    if dtype not in DTYPE_BYTES:
        raise BadLayout(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    per_token, rest = divmod(pages.page_bytes, layers * spec.block_size * DTYPE_BYTES[dtype])
    heads, dim = getattr(spec, "num_kv_heads", 1), getattr(spec, "head_size", 0)
    if rest == 0 and dim and per_token in (heads * dim, 2 * heads * dim):
        return heads, dim
    if rest:
        raise BadLayout(f"pages of {pages.page_bytes} bytes are not {layers} layers of {dtype}")
    return 1, per_token  # padded or uneven heads: the bytes are opaque all the same


def _engine(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", pages: Pages) -> str:
    """Everything else that the bytes depend on, as one line."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    details = {
        "spec": repr(group.kv_cache_spec),
        "layers": list(group.layer_names),
        "planes": [(plane.page_bytes, plane.layers) for plane in pages.planes],
        "quantization": str(vllm_config.model_config.quantization),
        "model_dtype": str(vllm_config.model_config.dtype),
        "pp": parallel.pipeline_parallel_size,
        "positions": _positions(vllm_config),
        "speculative": str(vllm_config.speculative_config),
        "hash": _hash_name(cache.prefix_caching_hash_algo),
    }
    digest = hashlib.blake2b(json.dumps(details, sort_keys=True).encode(), digest_size=8)
    backends = ",".join(sorted(b.get_name() for b in get_current_attn_backends(vllm_config)))
    layout = _either(kv_cache_config, cache, "kv_cache_layout") or "-"
    return (
        f"vllm:{vllm.__version__}:{_device(pages)}:{backends}:{layout}:{cache.cache_dtype}:"
        f"{group.kv_cache_spec.block_size}:{digest.hexdigest()}"
    )


def _either(kv_cache_config: "KVCacheConfig", cache_config: object, name: str) -> Any:
    """What the engine's core has resolved, or what was configured: vLLM moved such fields."""
    return getattr(kv_cache_config, name, None) or getattr(cache_config, name, None)


def _positions(vllm_config: "VllmConfig") -> int:
    """What positions mean: some scalings of RoPE depend on the longest context that is allowed."""
    config = vllm_config.model_config.hf_config.to_dict()
    text = json.dumps(config, default=str)
    scaled = any(f'"{name}"' in text for name in ("longrope", "su", "dynamic"))
    return int(vllm_config.model_config.max_model_len) if scaled else 0


def _device(pages: Pages) -> str:
    """The device or the instruction set that the kernels choose by."""
    if pages.is_cuda:
        return f"{torch.cuda.get_device_name()}".replace(" ", "-")
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{machine.machine()}-{torch.backends.cpu.get_cpu_capability()}{'-amx' if amx else ''}"


def _hash_name(algo: str) -> str:
    """`sha256` pickles: its hashes are those of one version of Python."""
    if algo == "sha256":
        return f"{algo}-{sys.version_info.major}.{sys.version_info.minor}"
    return algo
