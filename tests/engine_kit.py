"""Engines for tests: models made here, settings that suit two cores, no network."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

VOCABULARY = 512
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 32
PAGE = 32
"""Tokens of an engine's block."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in the test's own process
    "VLLM_NO_USAGE_STATS": "1",
}


def make_tiny_llama(folder: Path, seed: int = 20240229) -> Path:
    """A random Llama with a tokenizer of its own, in `folder`; the same every time.

    3 layers, 2 KV heads of 32, vocabulary 512 (the words w3 to w511), 8,192 positions, float32 in
    the file. It makes no sense, and its greedy tokens depend on every key and value of its cache.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        # Wide enough that attention is far from uniform and logits are far from ties.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def connector(name: str = "TieredKVConnector", **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` for an engine with our connector; `extra` are its options."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": "tiered_kv.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def engine_args(model: Path, kv_transfer_config: Any = None, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` (or of its EngineArgs) for a test; `more` wins."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": PAGE,
        "max_model_len": 4352,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": True,
        "seed": 0,
        "kv_transfer_config": kv_transfer_config,
    } | more


@contextmanager
def engine(model: Path, kv_transfer_config: Any = None, **more: Any) -> Iterator["LLM"]:
    """An engine in this process, shut down afterwards. Takes some seconds to start."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if isinstance(kv_transfer_config, dict):
        kv_transfer_config = KVTransferConfig(**kv_transfer_config)
    llm = LLM(**engine_args(model, kv_transfer_config, **more))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def prompt(seed: int, n: int, vocabulary: int = VOCABULARY) -> list[int]:
    """`n` tokens that follow from a seed; a longer one begins with the shorter one."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(3, vocabulary) for _ in range(n)]


def generate(
    llm: "LLM", prompts: Sequence[Sequence[int]], max_tokens: int = 16, **sampling: Any
) -> list[list[int]]:
    """Greedy tokens of each prompt, served together; never ends early."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    inputs = [{"prompt_token_ids": list(one)} for one in prompts]
    done = llm.generate(inputs, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def prepare_environment() -> None:
    """Settings of engines in this process and below; what is set already stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
