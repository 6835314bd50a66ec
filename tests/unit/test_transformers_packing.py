from collections.abc import Callable

import pytest
import torch
from transformers import (
    BartConfig,
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    StaticCache,
)
from transformers.cache_utils import Cache, DynamicLayer, MtpCache, QuantizedLayer

from tiered_kv.errors import BadLayout, UnsupportedCache
from tiered_kv.integrations.transformers import (
    check_cache,
    layout_of,
    new_cache,
    pack,
    pack_slot,
    slot_tensor,
    unpack,
    weights_digest,
)
from tiered_kv.layout import KVLayout
from tiered_kv.types import ALIGNMENT

BLOCK = 16
STALE = 0xA5


def prompt(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 256, (1, n), generator=generator)


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[DynamicCache, int]:
    cache = new_cache(model.config)
    with torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache).logits
    return cache, int(logits[0, -1].argmax())


def greedy(model: LlamaForCausalLM, cache: DynamicCache, token: int, n: int) -> list[int]:
    tokens = [token]
    with torch.inference_mode():
        while len(tokens) < n:
            logits = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


def dirty_pool(layout: KVLayout, blocks: int) -> torch.Tensor:
    return torch.full((blocks * layout.block_bytes,), STALE, dtype=torch.uint8)


def save(cache: DynamicCache, layout: KVLayout) -> list[torch.Tensor]:
    n = check_cache(cache, layout)
    slots = [index * layout.block_bytes for index in range(-(-n // layout.block_tokens))]
    pool = dirty_pool(layout, len(slots))
    for index, slot in enumerate(slots):
        tokens = min(layout.block_tokens, n - index * layout.block_tokens)
        pack_slot(cache, layout, index, tokens, pool, slot)
    return [slot_tensor(pool, slot, layout) for slot in slots]


@pytest.fixture(scope="module")
def layout(tiny_llama: LlamaForCausalLM) -> KVLayout:
    return layout_of(tiny_llama, block_tokens=BLOCK)


# Round trips


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 100])
def test_a_round_trip_keeps_every_bit(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, n: int
) -> None:
    cache, _ = prefill(tiny_llama, prompt(n))
    back = unpack(save(cache, layout), layout, n, tiny_llama.config)
    assert check_cache(back, layout) == n
    for before, after in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(before.keys.view(torch.int32), after.keys.view(torch.int32))
        assert torch.equal(before.values.view(torch.int32), after.values.view(torch.int32))
        assert after.keys.is_contiguous()
        assert after.values.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_round_trip_keeps_every_bit_of_nan_and_negative_zero(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, dtype: torch.dtype
) -> None:
    layout = KVLayout("m", str(dtype).removeprefix("torch."), 3, 2, 16, block_tokens=BLOCK)
    bits = torch.arange(2 * 32 * 16, dtype=torch.int32).mul(37).to(torch.int16)
    bits[:3] = torch.tensor([-32768, 0x7FC1, -1])  # -0.0 and two NaNs
    planes = bits.view(dtype).view(1, 2, 32, 16)
    cache = DynamicCache()
    for index in range(3):
        cache.update(planes, planes.flip(-1), index)
    back = unpack(save(cache, layout), layout, 32, tiny_llama.config)
    for layer in back.layers:
        assert torch.equal(layer.keys.view(torch.int16), planes.view(torch.int16))
        assert torch.equal(layer.values.view(torch.int16), planes.flip(-1).view(torch.int16))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 47, 48, 100])
def test_greedy_generation_from_an_unpacked_cache_equals_the_uninterrupted_run(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, n: int
) -> None:
    cache, token = prefill(tiny_llama, prompt(n))
    back = unpack(save(cache, layout), layout, n, tiny_llama.config)
    uninterrupted = greedy(tiny_llama, cache, token, 32)
    assert len(set(uninterrupted)) > 4  # a run of equal tokens would prove little
    assert greedy(tiny_llama, back, token, 32) == uninterrupted


def test_generate_continues_from_an_unpacked_cache(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    ids = prompt(50)
    whole = tiny_llama.generate(ids, max_new_tokens=32, do_sample=False)
    cache, _ = prefill(tiny_llama, ids[:, :40])
    back = unpack(save(cache, layout), layout, 40, tiny_llama.config)
    resumed = tiny_llama.generate(ids, past_key_values=back, max_new_tokens=32, do_sample=False)
    assert resumed.tolist() == whole.tolist()


def test_one_wrong_bit_of_a_block_changes_what_is_generated(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    cache, token = prefill(tiny_llama, prompt(40))
    blocks = save(cache, layout)
    blocks[0][0, 1, 0, 3, 5] *= -64  # sign and exponent of one value
    back = unpack(blocks, layout, 40, tiny_llama.config)
    assert greedy(tiny_llama, back, token, 32) != greedy(tiny_llama, cache, token, 32)


def test_an_unpacked_cache_does_not_refer_to_its_blocks(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    cache, _ = prefill(tiny_llama, prompt(BLOCK))
    blocks = save(cache, layout)  # a single full block: nothing forces a copy
    back = unpack(blocks, layout, BLOCK, tiny_llama.config)
    blocks[0].fill_(7)
    for before, after in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(before.keys, after.keys)
        assert torch.equal(before.values, after.values)


def test_a_leading_part_of_the_blocks_gives_a_leading_part_of_the_cache(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    cache, _ = prefill(tiny_llama, prompt(60))
    back = unpack(save(cache, layout)[:2], layout, 27, tiny_llama.config)
    for before, after in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(before.keys[:, :, :27], after.keys)


# What a block holds


def test_an_incomplete_block_has_zeros_where_there_is_no_token(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    cache, _ = prefill(tiny_llama, prompt(BLOCK + 3))
    pool = dirty_pool(layout, 1)
    pack_slot(cache, layout, 1, 3, pool, 0)
    block = slot_tensor(pool, 0, layout)
    assert torch.equal(block[:, 0, :, :3], torch.stack([x.keys[0, :, 16:] for x in cache.layers]))
    assert block[:, :, :, 3:].count_nonzero() == 0


def test_padding_of_a_slot_is_zeroed_and_neighbours_are_left_alone() -> None:
    layout = KVLayout("m", "float32", 1, 1, 6, block_tokens=5)  # 240 bytes of 4096
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 5, 6), torch.ones(1, 1, 5, 6), 0)
    pool = dirty_pool(layout, 3)
    pack_slot(cache, layout, 0, 5, pool, ALIGNMENT)
    assert pool[ALIGNMENT + layout.payload_bytes : 2 * ALIGNMENT].count_nonzero() == 0
    assert (pool[:ALIGNMENT] == STALE).all()
    assert (pool[2 * ALIGNMENT :] == STALE).all()


def test_a_slot_tensor_is_a_view_of_the_pool(layout: KVLayout) -> None:
    pool = dirty_pool(layout, 3)
    block = slot_tensor(pool, layout.block_bytes, layout)
    assert tuple(block.shape) == layout.shape
    assert block.data_ptr() == pool.data_ptr() + layout.block_bytes
    block.fill_(1.0)
    assert (pool[: layout.block_bytes] == STALE).all()
    assert pool[layout.block_bytes : 2 * layout.block_bytes].view(torch.float32).eq(1).all()


@pytest.mark.parametrize("slot", [-ALIGNMENT, 8, 2 * ALIGNMENT])
def test_a_slot_outside_the_pool_or_off_alignment_is_refused(slot: int) -> None:
    layout = KVLayout("m", "float32", 1, 1, 6, block_tokens=5)
    with pytest.raises(BadLayout, match=f"slot {slot} "):
        slot_tensor(dirty_pool(layout, 2), slot, layout)


def test_a_pool_that_is_not_flat_bytes_is_refused(layout: KVLayout) -> None:
    with pytest.raises(BadLayout, match=r"flat uint8, not torch\.float32"):
        slot_tensor(torch.zeros(1 << 20), 0, layout)


@pytest.mark.parametrize(("index", "tokens"), [(-1, 16), (0, 0), (0, 17), (2, 9), (3, 1)])
def test_a_range_that_the_cache_does_not_hold_is_refused_and_nothing_is_written(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, index: int, tokens: int
) -> None:
    cache, _ = prefill(tiny_llama, prompt(40))
    pool = dirty_pool(layout, 1)
    with pytest.raises(BadLayout, match="within the 40 tokens"):
        pack_slot(cache, layout, index, tokens, pool, 0)
    assert (pool == STALE).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.to(torch.bfloat16), "bfloat16"),
        (lambda block: block[:, :, :, :8], r"\[3, 2, 2, 8, 16\]"),
        (lambda block: block.transpose(3, 4).contiguous().transpose(3, 4), "strides"),
    ],
)
def test_a_block_of_another_shape_dtype_or_order_is_refused(
    tiny_llama: LlamaForCausalLM,
    layout: KVLayout,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    cache, _ = prefill(tiny_llama, prompt(BLOCK))
    block = change(torch.zeros(layout.shape))
    with pytest.raises(BadLayout, match=message):
        pack(cache, layout, 0, BLOCK, block)
    with pytest.raises(BadLayout, match=message):
        unpack([block], layout, BLOCK, tiny_llama.config)


@pytest.mark.parametrize(("blocks", "n"), [(0, 0), (1, 17), (2, 16), (1, 0)])
def test_blocks_that_are_not_just_enough_are_refused(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, blocks: int, n: int
) -> None:
    with pytest.raises(BadLayout, match=f"{blocks} blocks of 16"):
        unpack([torch.zeros(layout.shape)] * blocks, layout, n, tiny_llama.config)


# Caches that are refused


def small(kind: type[PreTrainedConfig], **fields: object) -> PreTrainedConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return kind(**{**sizes, **fields})


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (small(MistralConfig, sliding_window=8), "DynamicSlidingWindowLayer at layer 0"),
        (small(Gemma2Config, sliding_window=8), "DynamicSlidingWindowLayer at layer 0"),
        (small(JambaConfig, attn_layer_period=2, attn_layer_offset=0), "LinearAttention"),
        (small(Qwen3NextConfig), "LinearAttentionLayer at layer 0"),
    ],
    ids=["mistral", "gemma2", "jamba", "qwen3-next"],
)
def test_models_with_other_layers_are_refused_by_the_layers_class_and_index(
    config: PreTrainedConfig, layer: str
) -> None:
    with pytest.raises(UnsupportedCache, match=layer):
        new_cache(config)
    cache = DynamicCache(config=config)
    name = layer.split()[0]
    with pytest.raises(UnsupportedCache, match=rf"layer \d is a {name}"):
        check_cache(cache)


def test_an_encoder_decoder_model_and_its_cache_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="BartConfig is an encoder-decoder"):
        new_cache(BartConfig(d_model=16, encoder_layers=1, decoder_layers=1))
    with pytest.raises(UnsupportedCache, match="a EncoderDecoderCache cannot"):
        check_cache(EncoderDecoderCache(DynamicCache(), DynamicCache()))


def test_a_static_cache_is_refused(tiny_llama: LlamaForCausalLM, layout: KVLayout) -> None:
    cache = StaticCache(config=tiny_llama.config, max_cache_len=32)
    with torch.inference_mode():
        tiny_llama(input_ids=prompt(8), past_key_values=cache)
    with pytest.raises(UnsupportedCache, match="a StaticCache cannot"):
        pack(cache, layout, 0, 8, torch.zeros(layout.shape))


def test_a_quantized_layer_is_refused() -> None:
    class Rounded(QuantizedLayer):  # the back ends of QuantizedCache are not installed
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor.round()

        def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
            return q_tensor

    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
    cache.layers.append(Rounded())
    cache.layers[1].update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
    with pytest.raises(UnsupportedCache, match="layer 1 is a Rounded"):
        check_cache(cache)


def test_a_subclass_of_a_dynamic_cache_is_refused() -> None:
    with pytest.raises(UnsupportedCache, match="a MtpCache cannot"):
        check_cache(MtpCache())


def test_a_cache_that_moves_its_layers_by_itself_is_refused() -> None:
    cache = DynamicCache()
    cache.offloading = True  # its constructor wants an accelerator
    with pytest.raises(UnsupportedCache, match="offloading=True"):
        check_cache(cache)


# Caches of another layout


def filled(*shapes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> Cache:
    cache = DynamicCache()
    for index, shape in enumerate(shapes):
        cache.update(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), index)
    return cache


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (filled((2, 2, 4, 16), (2, 2, 4, 16), (2, 2, 4, 16)), "batch 1"),
        (filled((1, 2, 4, 16), (1, 2, 5, 16), (1, 2, 4, 16)), "layer 1 holds 5 tokens"),
        (filled((1, 2, 4, 16), (1, 4, 4, 16), (1, 2, 4, 16)), "layer 1 has 4 heads"),
        (filled((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 8)), "layer 2 has 2 heads of 8"),
        (filled((1, 2, 4, 16), (1, 2, 4, 16)), "2 layers, the layout 3"),
        (filled(*[(1, 2, 4, 16)] * 3, dtype=torch.float16), "float16"),
    ],
    ids=["batch", "length", "heads", "dim", "layers", "dtype"],
)
def test_a_cache_of_another_layout_is_refused_by_its_value(
    layout: KVLayout, cache: Cache, message: str
) -> None:
    with pytest.raises(BadLayout, match=message):
        check_cache(cache, layout)


def test_a_cache_that_was_never_filled_holds_no_tokens(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    assert check_cache(DynamicCache(), layout) == 0
    assert check_cache(DynamicCache(config=tiny_llama.config), layout) == 0


def test_a_layer_without_tokens_beside_filled_ones_is_refused(layout: KVLayout) -> None:
    cache = filled((1, 2, 4, 16), (1, 2, 4, 16))
    cache.layers.append(DynamicLayer())
    with pytest.raises(BadLayout, match="layer 2 holds 0 tokens"):
        check_cache(cache, layout)


# Layouts


def test_the_layout_says_what_the_cache_of_the_model_has(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (3, 2, 16)
    assert layout.dtype == "float32"
    assert layout.engine.startswith("hf:")
    cache, _ = prefill(tiny_llama, prompt(4))
    assert check_cache(cache, layout) == 4


def twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copy = LlamaForCausalLM(LlamaConfig(**model.config.to_dict())).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def test_equal_weights_have_equal_layouts_wherever_they_came_from(
    tiny_llama: LlamaForCausalLM, layout: KVLayout
) -> None:
    other = twin(tiny_llama)
    other.config._name_or_path = "some/where/else"
    assert layout_of(other, block_tokens=BLOCK).fingerprint == layout.fingerprint


def test_a_single_bit_of_any_weight_changes_the_layout(tiny_llama: LlamaForCausalLM) -> None:
    other = twin(tiny_llama)
    seen = {weights_digest(other)}
    names = [name for name, _ in [*other.named_parameters(), *other.named_buffers()]]
    for name in names:
        tensor = dict([*other.named_parameters(), *other.named_buffers()])[name]
        tensor.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        seen.add(weights_digest(other))
    assert any("inv_freq" in name for name in names)  # not in any checkpoint, but in every key
    assert len(seen) == 1 + len(names)


def test_the_same_bytes_in_another_shape_or_dtype_change_the_layout(
    tiny_llama: LlamaForCausalLM,
) -> None:
    other = twin(tiny_llama)
    seen = {weights_digest(other)}
    weight = other.model.layers[0].mlp.gate_proj.weight
    for change in (weight.reshape(64, 96), weight.view(torch.int32)):
        other.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(
            change.detach(), requires_grad=False
        )
        seen.add(weights_digest(other))
    assert len(seen) == 3


def test_a_config_that_computes_something_else_changes_the_layout(
    tiny_llama: LlamaForCausalLM,
) -> None:
    other = twin(tiny_llama)
    other.config.rms_norm_eps = 0.1
    assert weights_digest(other) != weights_digest(tiny_llama)


def test_a_given_revision_belongs_to_the_models_name(tiny_llama: LlamaForCausalLM) -> None:
    other = twin(tiny_llama)
    with pytest.raises(BadLayout, match="does not name its weights"):
        layout_of(other, revision="main")
    other.config._name_or_path = "org/model"
    layout = layout_of(other, revision="0123abc")
    assert (layout.model, layout.revision) == ("org/model", "0123abc")


def test_weights_that_are_not_in_memory_ask_for_a_revision(
    tiny_llama: LlamaForCausalLM,
) -> None:
    with torch.device("meta"):
        ghost = LlamaForCausalLM(tiny_llama.config)
    with pytest.raises(BadLayout, match="not in memory"):
        layout_of(ghost)


def test_adapters_that_can_be_switched_ask_for_a_revision(tiny_llama: LlamaForCausalLM) -> None:
    other = twin(tiny_llama)
    other._hf_peft_config_loaded = True  # what load_adapter sets
    with pytest.raises(BadLayout, match="adapters"):
        layout_of(other)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 40])
def test_a_round_trip_through_a_gpu_keeps_every_bit(
    tiny_llama: LlamaForCausalLM, layout: KVLayout, n: int
) -> None:
    cache, _ = prefill(tiny_llama, prompt(n))
    near = unpack(save(cache, layout), layout, n, tiny_llama.config, "cuda")
    assert near.layers[0].keys.is_cuda
    back = unpack(save(near, layout), layout, n, tiny_llama.config)
    for before, after in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(before.keys, after.keys)
        assert torch.equal(before.values, after.values)
