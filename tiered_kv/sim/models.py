"""Models as the planner sees them: bytes of KV and weights, and FLOPs a token.

The built-in table holds the shapes of the models' own `config.json` (Hugging Face), and goes
through the same reader as a file that a user names.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.layout import DTYPE_BYTES
from tiered_kv.policies.load_or_recompute import Prefill

MAX_SIZE = 10**9
"""No field of a config is larger; such values are mistakes."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`kv_bytes` are of one token over all layers; `width` is heads times head size, the size of
    attention that its FLOPs depend on. MoE: `active` parameters are used for a token."""

    name: str
    params: float
    active: float
    layers: int
    width: int
    kv_bytes: int
    weight_bytes: float
    notes: tuple[str, ...] = ()

    def prefill(self, flops: float) -> Prefill:
        """On GPUs that do so many FLOPs a second: two a parameter and token, and four a layer,
        width and pair of tokens for the scores and their use. `n` tokens from the beginning on
        are `n**2 / 2` pairs (causal)."""
        return Prefill(2 * self.active / flops, 2 * self.layers * self.width / flops)

    def weights_read(self, batch: float) -> float:
        """Bytes of weights that one decode step of a batch reads: of a mixture of experts those
        that at least one of the batch's tokens uses, taken as independent."""
        if self.active >= self.params:
            return self.weight_bytes
        touched = 1.0 - math.pow(1 - self.active / self.params, max(1.0, batch))
        return self.weight_bytes * touched


_LLAMA = {"model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256}

BUILT_IN: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA | {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": _LLAMA | {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
    "llama-3.1-405b": _LLAMA | {
        "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
        "num_attention_heads": 128,
    },
    "qwen3-32b": {
        "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "head_dim": 128,
        "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
        "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
}  # fmt: skip
BUILT_IN["llama-3.3-70b"] = BUILT_IN["llama-3.1-70b"]


def model(name: str, weights: str = "bfloat16", kv: str = "bfloat16") -> ModelSpec:
    """A model by its name in the table, or by the path of a `config.json` (or its folder), with
    weights and KV of these dtypes. Raises `UnknownName`, `BadInput`, `OSError`."""
    for what, dtype in (("weights", weights), ("KV", kv)):
        if dtype not in DTYPE_BYTES:
            raise UnknownName(f"{what} dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    path = Path(name)
    if name in BUILT_IN:
        return from_config(name, BUILT_IN[name], weights, kv)
    if path.suffix == ".json" or path.is_dir():
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BadInput(f"{file}: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise BadInput(f"{file}: a model's config is an object, not a {type(config).__name__}")
        return from_config(str(file), config, weights, kv)
    raise UnknownName(
        f"model {name!r} is neither one of {', '.join(sorted(BUILT_IN))} nor a config.json"
    )


def from_config(
    name: str, config: Mapping[str, Any], weights: str = "bfloat16", kv: str = "bfloat16"
) -> ModelSpec:
    """Read a Hugging Face config of a decoder with gated MLPs: dense, MoE or MLA.

    Raises `BadInput` that names the field. Sliding windows and linear attention are counted as
    full attention, and `notes` says so.
    """
    text = config.get("text_config") or config
    fields = _Fields(name, text)
    layers, hidden = fields["num_hidden_layers"], fields["hidden_size"]
    heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim", hidden // heads)
    attention, width, kept = _attention(fields, hidden, heads, head_dim)
    mlp_all, mlp_active, dense = _mlp(fields, hidden, layers)
    vocab = fields["vocab_size"] * hidden
    tied = bool(config.get("tie_word_embeddings", False))
    total = layers * attention + mlp_all + dense + vocab * (1 if tied else 2)
    active = layers * attention + mlp_active + dense + vocab  # an embedding is looked up
    notes = []
    windows = text.get("sliding_window") and text.get("use_sliding_window", True)
    if windows or set(text.get("layer_types") or ()) - {"full_attention"}:
        notes.append("all layers are counted as full attention: an upper bound of its KV")
    return ModelSpec(
        name=name,
        params=float(total),
        active=float(min(active, total)) if mlp_active < mlp_all else float(total),
        layers=layers,
        width=width,
        kv_bytes=layers * kept * DTYPE_BYTES[kv],
        weight_bytes=float(total * DTYPE_BYTES[weights]),
        notes=tuple(notes),
    )


def _attention(fields: "_Fields", hidden: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """Parameters of a layer's attention, its width, and values of KV it keeps for a token."""
    latent = fields.get("kv_lora_rank", 0)
    if not latent:
        kv_heads = fields.get("num_key_value_heads", heads)
        params = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return params, heads * head_dim, 2 * kv_heads * head_dim
    rope, nope, value = (fields[f] for f in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank = fields.get("q_lora_rank", 0)
    query = heads * (rope + nope)
    params = rank * (hidden + query) if rank else hidden * query
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return params, heads * (rope + nope + value) // 2, latent + rope


def _mlp(fields: "_Fields", hidden: int, layers: int) -> tuple[int, int, int]:
    """Parameters of all MLPs, of those that a token uses, and of dense layers among experts."""
    experts = fields.get("n_routed_experts", fields.get("num_local_experts", 0))
    experts = experts or fields.get("num_experts", 0)
    if not experts:
        dense = layers * 3 * hidden * fields["intermediate_size"]
        return dense, dense, 0
    size = fields.get("moe_intermediate_size", 0) or fields["intermediate_size"]
    shared, chosen = fields.get("n_shared_experts", 0), fields["num_experts_per_tok"]
    first = min(layers, fields.get("first_k_dense_replace", 0))
    each, sparse = 3 * hidden * size, layers - first
    router = sparse * hidden * experts
    dense = first * 3 * hidden * fields["intermediate_size"] if first else 0
    return (
        sparse * each * (experts + shared) + router,
        sparse * each * (min(chosen, experts) + shared) + router,
        dense,
    )


class _Fields:
    """Sizes of a config by name; each a whole number."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config

    def __getitem__(self, field: str) -> int:
        value = self._config.get(field)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise BadInput(f"{self._name}: {field} = {value!r} must be a positive whole number")
        return value

    def get(self, field: str, default: int) -> int:
        """The same, with a value for a field that is absent, null or 0."""
        return self[field] if self._config.get(field) else default
