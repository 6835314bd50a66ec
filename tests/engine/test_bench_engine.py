"""`tiered-kv bench engine` in its smallest form, and vLLM's own tiers as it runs them."""

import sys
from pathlib import Path

import psutil
import pytest
from engine_kit import PAGE, engine, generate, prompt

from tiered_kv.bench.engine import Load, Plan, run
from tiered_kv.bench.engine_contenders import Pythons, peer, region_of
from tiered_kv.bench.peers.vllm_tiers import Run, runs

SMALL = Load(prompts=2, prompt_tokens=64, answer_tokens=2)


@pytest.mark.timeout(600)
def test_the_benchmark_measures_our_connector_and_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path
):
    steps: list[tuple[int, int]] = []
    said: list[str] = []
    plan = Plan(
        Pythons(Path(sys.executable), None), tmp_path / "data", tiny_model, sizes=(1024,),
        rounds=2, peers=("lmcache",), load=SMALL,
    )  # fmt: skip
    before = set(psutil.Process().children(recursive=True))
    found = {r.name: r for r in run(plan, lambda _, done, total: steps.append((done, total)),
                                    said.append)}  # fmt: skip
    assert list(found) == [
        "engine/ttft/1024/dram",
        "engine/ttft/1024/nvme",
        "engine/zero-hit-throughput",
        "engine/different-answers",
    ]
    assert found["engine/different-answers"].value == 0
    for result in found.values():
        assert result.name.endswith("answers") or (result.value > 0 and result.ratio), result
    assert steps == sorted(steps)
    assert all(0 <= done < total for done, total in steps)
    assert said[0].startswith("lmcache is left out: make setup-peers")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list((tmp_path / "data").iterdir()) == []
    assert list(Path("/dev/shm").glob(f"*{region_of('')}*")) == []


@pytest.mark.parametrize("name", ["vllm-cpu-tier", "vllm-fs"])
def test_vllms_own_tiers_give_the_tokens_that_were_computed(
    tiny_model: Path, tmp_path: Path, name: str
):
    one = peer(name, tmp_path, Pythons(Path(sys.executable), None))
    assert one.connector is not None
    first, longer = prompt(1, 16 * PAGE), prompt(1, 20 * PAGE + 5)
    with engine(tiny_model, dict(one.connector)) as llm:
        computed = generate(llm, [first])
        whole = generate(llm, [longer])
        generate(llm, [prompt(2, 8)])  # its steps carry out what was to be stored
        assert llm.reset_prefix_cache(reset_connector=name == "vllm-fs")
        [again] = llm.generate([{"prompt_token_ids": longer}], _greedy(), use_tqdm=False)
        assert again.num_cached_tokens >= 16 * PAGE
        assert [list(again.outputs[0].token_ids)] == whole
        assert llm.reset_prefix_cache()
        assert generate(llm, [first]) == computed


def test_pages_are_merged_as_far_as_both_sides_count_up():
    assert list(runs([], [], 0, 1)) == []
    assert list(runs([4, 5, 6, 9], [7, 8, 2, 3], 0, 1)) == [
        Run(4, 7, 0, 2),
        Run(6, 2, 0, 1),
        Run(9, 3, 0, 1),
    ]


def test_pages_in_larger_chunks_stay_within_their_chunk():
    # Chunks 3 and 4 of four pages; the first page of chunk 3 is left out.
    assert list(runs([10, 11, 12, 13, 20], [3, 4], 1, 4)) == [
        Run(10, 3, 1, 3),
        Run(13, 4, 0, 1),
        Run(20, 4, 1, 1),
    ]


def _greedy():
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
