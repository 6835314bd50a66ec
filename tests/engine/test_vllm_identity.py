"""Which engines are refused at the start, by name, and which of them share blocks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tiered_kv.errors import BadLayout, UnsupportedCache
from tiered_kv.integrations.vllm import identity
from tiered_kv.integrations.vllm.options import options
from tiered_kv.integrations.vllm.pages import Pages, planes_of
from tiered_kv.layout import KVLayout

PAGE, HEADS, DIM, LAYERS, N = 16, 2, 32, 3, 8
FULL = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=DIM, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16, sliding_window=64
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=PAGE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16,
    attention_chunk_size=64,
)  # fmt: skip
MAMBA = MambaSpec(block_size=PAGE, shapes=((4, 4),), dtypes=(torch.float32,))
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


class HF(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def config(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as identity reads; `a__b` changes field b of section a."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model", revision=None, architectures=["LlamaForCausalLM"], seed=0,
            hf_config=HF(model_type="llama", hidden_size=64), quantization=None,
            dtype=torch.bfloat16, max_model_len=4096,
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256_cbor", cache_dtype="auto", calculate_kv_scales=False,
            kv_cache_layout=None,
        ),
        parallel_config=SimpleNamespace(
            world_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, nnodes=1,
        ),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        speculative_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(getattr(made, section), field, value)
    return made


def cache(*specs: Any, names: list[str] = NAMES, **more: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(list(names), spec) for spec in specs]
    return KVCacheConfig(N, [], groups, **more)


def check(made: SimpleNamespace, kept: KVCacheConfig) -> None:
    identity.check_supported(made, kept)  # type: ignore[arg-type]


# -- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FULL, MLA], ids=lambda spec: type(spec).__name__)
def test_one_group_of_plain_attention_is_kept(spec: Any) -> None:
    check(config(), cache(spec))


@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, MAMBA], ids=lambda spec: type(spec).__name__)
def test_a_cache_that_does_not_hold_every_token_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(UnsupportedCache, match=rf"org/model keeps a {type(spec).__name__}"):
        check(config(), cache(spec))


def test_full_attention_that_only_computes_with_a_window_is_kept() -> None:
    check(config(), cache(replace(FULL, sliding_window=64)))


def test_a_hybrid_model_is_refused_with_the_names_of_its_groups() -> None:
    with pytest.raises(UnsupportedCache, match=r"2 KV cache groups \(FullAttention.*, Mamba"):
        check(config(), cache(FULL, MAMBA))
    with pytest.raises(UnsupportedCache, match=r"disable_hybrid_kv_cache_manager=True"):
        check(config(), cache(FULL, WINDOW))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UnsupportedCache, match=r"0 KV cache groups \(none\)"):
        check(config(), cache())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales=True"),
        ({"cache_config__prefix_caching_hash_algo": "builtin"}, "hash_algo='builtin'"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "use 'sha256_cbor'"),
        ({"cache_config__hash_block_size": 8}, "hashed every 8 tokens and kept every 16"),
        ({"parallel_config__nnodes": 2}, "over 2 hosts"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"parallel_config__prefill_context_parallel_size": 4}, "prefill_context_parallel_size=4"),
    ],
)
def test_settings_that_cannot_be_kept_exactly_are_named(changes: Any, named: str) -> None:
    with pytest.raises(UnsupportedCache, match=named):
        check(config(**changes), cache(FULL))


def test_hashes_that_the_engines_core_resolved_otherwise_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="hashed every 8 tokens"):
        check(config(), cache(FULL, hash_block_size=8))
    check(config(), cache(FULL, hash_block_size=PAGE))


# -- who shares with whom -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    monkeypatch.setattr(utils, "get_current_attn_backends", lambda config: [backend])
    return backend


def layout(
    made: SimpleNamespace | None = None, kept: KVCacheConfig | None = None, group: int = 4,
    rank: int = 0, width: int | None = None, **given: Any,
) -> KVLayout:  # fmt: skip
    kept = kept or cache(FULL)
    spec = kept.kv_cache_groups[0].kv_cache_spec
    width = width or spec.page_size_bytes
    names = kept.kv_cache_groups[0].layer_names
    tensors = {name: torch.zeros(N, width, dtype=torch.uint8) for name in names}
    pages = Pages(planes_of(tensors, N), group)
    return identity.layout_of(made or config(), kept, pages, options(given), rank)  # type: ignore[arg-type]


def test_the_layout_says_what_a_block_holds() -> None:
    found = layout()
    assert found.model == "LlamaForCausalLM"
    assert (found.layers, found.kv_heads, found.head_dim, found.planes) == (LAYERS, HEADS, DIM, 2)
    assert (found.block_tokens, found.dtype) == (4 * PAGE, "bfloat16")
    assert found.payload_bytes == 4 * LAYERS * FULL.page_size_bytes
    assert found.engine.startswith("vllm:")
    assert "CPU_ATTN" in found.engine


def test_a_joint_latent_is_one_plane() -> None:
    found = layout(kept=cache(MLA))
    assert (found.kv_heads, found.head_dim, found.planes) == (1, DIM, 1)


def test_pages_with_padding_are_bytes_like_any_other() -> None:
    found = layout(width=FULL.page_size_bytes + 64)
    assert found.payload_bytes == 4 * LAYERS * (FULL.page_size_bytes + 64)


def test_pages_that_are_no_whole_tokens_are_refused() -> None:
    with pytest.raises(BadLayout, match="are not 3 layers of bfloat16"):
        layout(width=FULL.page_size_bytes + 1)


def test_equal_engines_share() -> None:
    assert layout() == layout()
    assert layout().fingerprint == layout(config(model_config__model="/a/copy")).fingerprint


DIFFERENT: dict[str, dict[str, Any]] = {
    "seed of dummy weights": {"model_config__seed": 1},
    "architecture": {"model_config__architectures": ["MistralForCausalLM"]},
    "config": {"model_config__hf_config": HF(model_type="llama", hidden_size=64, rope_theta=5e5)},
    "quantization": {"model_config__quantization": "awq"},
    "model dtype": {"model_config__dtype": torch.float16},
    "cache dtype": {"cache_config__cache_dtype": "fp8"},
    "configured layout": {"cache_config__kv_cache_layout": "BLHNC"},
    "hash": {"cache_config__prefix_caching_hash_algo": "sha256"},
    "world size": {"parallel_config__world_size": 2},
    "pipeline": {"parallel_config__pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_whatever_changes_bytes_or_names_is_in_the_fingerprint(changes: dict[str, Any]) -> None:
    assert layout(config(**changes)).fingerprint != layout().fingerprint


def test_ranks_page_sizes_layers_dtypes_and_revisions_do_not_share() -> None:
    two = config(parallel_config__world_size=2)
    half = replace(FULL, block_size=8)
    found = [
        layout(),
        layout(two, rank=0),
        layout(two, rank=1),
        layout(group=2),
        layout(kept=cache(half), group=8),  # the same tokens in smaller pages
        layout(kept=cache(FULL, names=NAMES[:2])),
        layout(kept=cache(FULL, names=[name.upper() for name in NAMES])),
        layout(kept=cache(replace(FULL, dtype=torch.float16))),
        layout(kept=cache(FULL, kv_cache_layout="LBNHC")),
        layout(revision="mine"),
        layout(revision="yours"),
    ]
    assert len({one.fingerprint for one in found}) == len(found)


def test_another_backend_or_instruction_set_does_not_share(
    backend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layout()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "get_name", lambda: "OTHER")
        assert layout().fingerprint != first.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE")
        assert layout().fingerprint != first.fingerprint
    assert layout().fingerprint == first.fingerprint


def test_the_longest_context_counts_only_where_positions_depend_on_it() -> None:
    def of(rope: dict[str, Any] | None, length: int) -> bytes:
        hf = HF(model_type="llama", rope_scaling=rope)
        made = config(model_config__hf_config=hf, model_config__max_model_len=length)
        return layout(made).fingerprint

    for rope in (None, {"rope_type": "llama3"}):
        assert of(rope, 4096) == of(rope, 8192)
    for rope in ({"rope_type": "longrope"}, {"type": "su"}, {"rope_type": "dynamic"}):
        assert of(rope, 4096) != of(rope, 8192)


def test_blocks_are_whole_pages_and_at_least_one() -> None:
    for tokens, page, group in ((256, 16, 16), (256, 48, 5), (16, 16, 1), (16, 128, 1)):
        assert identity.group_size(options({"block_tokens": tokens}), page) == group
    assert identity.page_tokens(cache(FULL)) == PAGE
