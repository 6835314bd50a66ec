"""The connector in one engine beside a real service: the same tokens, fewer of them computed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import until
from engine_kit import PAGE, engine, generate, prompt
from vllm_kit import Inside, Service, connected, running

BLOCK = 256
TURN = 2 * BLOCK + 3 * PAGE + 2, 2 * BLOCK + 6 * PAGE
PROMPTS = {
    "turn 1": prompt(2, TURN[0]),
    "turn 2": prompt(2, TURN[1]),
    "zeroed": prompt(3, 4 * BLOCK),
    "flipped": prompt(4, 4 * BLOCK),
    "killed": prompt(10, 3 * BLOCK),
    "after": prompt(11, 3 * BLOCK),
}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    """Greedy tokens without a connector, one prompt at a time: batches round differently."""
    found = {}
    with engine(tiny_model) as llm:
        for name, text in PROMPTS.items():
            assert llm.reset_prefix_cache()
            [found[name]] = generate(llm, [text])
    return found


@pytest.fixture(scope="module")
def service(expected: dict[str, list[int]]) -> Iterator[Service]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def shared(tiny_model: Path, service: Service) -> Iterator[Inside]:
    with connected(tiny_model, service, extra={"verify": 1.0}) as (_, inside):
        yield inside


@pytest.fixture
def inside(shared: Inside) -> Inside:
    shared.joined().forget()
    return shared


def test_a_longer_turn_finds_the_incomplete_block_of_the_one_before(inside, expected):
    llm, before = inside.llm, inside.counts
    [first] = generate(llm, [PROMPTS["turn 1"]], max_tokens=1)
    assert first == expected["turn 1"][:1]
    inside.forget()
    assert generate(llm, [PROMPTS["turn 2"]]) == [expected["turn 2"]]
    assert (inside.counts - before)["load.tokens"] == 2 * BLOCK + 3 * PAGE


def test_zeroed_blocks_change_the_answer_so_they_are_used(inside, expected):
    llm, text = inside.llm, PROMPTS["zeroed"]
    assert generate(llm, [text]) == [expected["zeroed"]]
    inside.forget()
    inside.loader._verify = 0.0
    mapped = inside.connector._link.introduce(inside.worker.layout)
    kept = mapped.tensor.clone()
    mapped.tensor.zero_()
    try:
        assert generate(llm, [text]) != [expected["zeroed"]]
    finally:
        mapped.tensor.copy_(kept)
        inside.loader._verify = 1.0
    inside.forget()
    assert generate(llm, [text]) == [expected["zeroed"]]


def test_a_flipped_bit_is_found_and_the_block_computed_again(inside, expected):
    llm, text, before = inside.llm, PROMPTS["flipped"], inside.counts
    assert generate(llm, [text]) == [expected["flipped"]]
    inside.forget()
    mapped = inside.connector._link.introduce(inside.worker.layout)
    kept = mapped.tensor.clone()
    mapped.tensor.bitwise_xor_(64)
    try:
        assert generate(llm, [text]) == [expected["flipped"]]
    finally:
        mapped.tensor.copy_(kept)
    inside.settle()
    assert (inside.counts - before)["load.corrupt"] >= 1


def test_another_cache_salt_never_hits(inside):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for salt, loads in (("a", 0), ("b", 0), ("a", 1)):
        before = inside.counts
        ask = {"prompt_token_ids": prompt(6, 2 * BLOCK), "cache_salt": salt}
        inside.llm.generate([ask], params, use_tqdm=False)
        inside.forget()
        assert (inside.counts - before)["load.requests"] == loads


def test_requests_with_the_same_prefix_load_it_once(inside):
    head = prompt(7, 6 * BLOCK)
    generate(inside.llm, [head])
    inside.forget()
    before = inside.counts
    generate(inside.llm, [[*head, *prompt(70 + i, 40)] for i in range(4)])
    assert (inside.counts - before)["load.tokens"] == 6 * BLOCK


def test_aborts_during_loads_and_saves_leak_no_page(inside, service):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm, pool = inside.llm, inside.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    texts = [prompt(8, 3 * BLOCK), prompt(9, 3 * BLOCK)]
    generate(llm, texts)
    for steps in range(10):
        inside.forget()
        for i, text in enumerate(texts):
            ask = {"prompt_token_ids": [*text, *prompt(80 + steps, 64)]}
            llm.llm_engine.add_request(f"r{steps}-{i}", ask, params)
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request([f"r{steps}-0", f"r{steps}-1"], internal=False)
        inside.forget()
        assert pool.get_num_free_blocks() == free
    until(lambda: not any(service.call("status")["pending"].values()), "nothing is leased")


def test_a_session_is_known_by_name_and_forgotten_when_it_ends(inside, service):
    from vllm import SamplingParams

    def say(text, **hints):
        params = SamplingParams(
            temperature=0.0, max_tokens=2, ignore_eos=True,
            extra_args={"kv_transfer_params": {"tiered_kv": {"session": "chat-1", **hints}}},
        )  # fmt: skip
        inside.llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
        inside.settle()

    say(prompt(12, 2 * BLOCK + PAGE))
    session = service.call("session", "chat-1")
    assert (session.n_tokens, len(session.run), session.tail) == (2 * BLOCK + PAGE, 3, True)
    say(prompt(12, 3 * BLOCK))
    assert len(service.call("session", "chat-1").run) == 3
    say(prompt(12, 3 * BLOCK + PAGE), ended=True)
    until(
        lambda: all(row["id"] != "chat-1" for row in service.call("list_sessions")),
        "the session has ended",
    )


def test_a_node_that_is_killed_during_a_load_is_found_again(inside, service, expected, monkeypatch):
    llm, killed = inside.llm, []
    assert generate(llm, [PROMPTS["killed"]]) == [expected["killed"]]
    inside.forget()
    pid, take = service.pid(), inside.loader._take

    def kill_first(*args):
        if not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return take(*args)

    monkeypatch.setattr(inside.loader, "_take", kill_first)
    assert generate(llm, [PROMPTS["killed"]]) == [expected["killed"]]
    assert killed == [pid]
    inside.forget()
    assert generate(llm, [PROMPTS["killed"]]) == [expected["killed"]]
    inside.forget()
    until(lambda: service.cluster.members(), "the node is back")
    inside.joined()
    assert generate(llm, [PROMPTS["after"]]) == [expected["after"]]
    inside.forget()
    before = inside.counts
    assert generate(llm, [PROMPTS["after"]]) == [expected["after"]]
    assert (inside.counts - before)["load.requests"] == 1
