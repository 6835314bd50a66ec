"""The engine itself, with no connector: what other engine tests build on."""

from pathlib import Path

from engine_kit import KV_HEADS, LAYERS, PAGE, engine, generate, prompt


def test_greedy_tokens_are_the_same_again_and_depend_on_the_whole_prompt(tiny_model: Path):
    first = prompt(1, 10 * PAGE)
    other = [3, *first[1:]] if first[0] != 3 else [4, *first[1:]]
    with engine(tiny_model) as llm:
        [once] = generate(llm, [first])
        assert llm.reset_prefix_cache()
        again, changed = generate(llm, [first, other])
        config = llm.llm_engine.vllm_config.model_config.hf_config
    assert again == once
    assert changed != once
    assert len(set(once)) > 4
    assert (config.num_hidden_layers, config.num_key_value_heads) == (LAYERS, KV_HEADS)


def test_every_package_that_the_engine_needs_is_there():
    import ray.serve.llm

    assert ray.serve.llm.LLMConfig
