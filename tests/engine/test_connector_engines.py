"""The connector in several engines, one after the other, beside one service."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import until
from engine_kit import PAGE, engine, generate, prompt
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_kit import Service, connected, running

BLOCK = 256
LENGTHS = (3 * PAGE + 5, BLOCK, BLOCK + PAGE + 1, 3 * BLOCK, 5 * BLOCK + 7)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as one:
        yield one


def test_an_engine_finds_what_another_one_computed(tiny_model: Path, service: Service):
    prompts = [prompt(20 + n, n) for n in LENGTHS]
    with engine(tiny_model) as llm:
        expected = [generate(llm, [one])[0] for one in prompts]
    with connected(tiny_model, service) as (llm, inside):
        assert [generate(llm, [one])[0] for one in prompts] == expected
        inside.settle()
        assert inside.counts["load.requests"] == 0
    with connected(tiny_model, service) as (llm, inside):
        assert [generate(llm, [one])[0] for one in prompts] == expected
        assert inside.counts["load.requests"] == 5
        assert inside.counts["load.failed"] == 0
        # every whole page of the prompts, but for one token of a full hit
        pages = [n // PAGE * PAGE - (n % PAGE == 0) for n in LENGTHS]
        assert inside.counts["load.tokens"] >= sum(pages) - 2 * PAGE


def test_engines_that_differ_never_share(tiny_model: Path, service: Service):
    text = prompt(5, 2 * BLOCK)
    with connected(tiny_model, service) as (llm, inside):
        generate(llm, [text])
        inside.settle()
    others = {
        "tenant": {"extra": {"service": {"tenant_secret": "another"}}},
        "revision": {"extra": {"revision": "another"}},
        "block": {"extra": {"block_tokens": 128}},
        "dtype": {"dtype": "float32"},
        "page": {"block_size": 64},
    }
    loads = {}
    for name, other in others.items():
        with connected(tiny_model, service, **other) as (llm, inside):
            generate(llm, [text])
            loads[name] = inside.counts["load.requests"]
    assert loads == dict.fromkeys(others, 0)


def test_preempted_requests_come_back_and_say_the_same(tiny_model: Path, service: Service):
    prompts = [prompt(100 + i, BLOCK + 2 * PAGE + i) for i in range(6)]
    few = {"num_gpu_blocks_override": 34, "max_num_seqs": 6, "max_model_len": 1024}
    few |= {"dtype": "float32"}  # what was loaded and what is computed anew round differently
    with engine(tiny_model, **few) as llm:
        expected = generate(llm, prompts, max_tokens=160)
    with connected(tiny_model, service, **few) as (llm, inside):
        preemptions = counting_preemptions(inside)
        found = generate(llm, prompts, max_tokens=160)
        inside.settle()
        assert preemptions
        assert inside.counts["load.failed"] == 0
        assert inside.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 33
    assert found == expected


def test_two_hundred_requests_of_eight_sessions_say_what_a_plain_engine_says(
    tiny_model: Path, service: Service
):
    turns = [
        [prompt(200 + session, 150 + 40 * turn + session) for session in range(8)]
        for turn in range(25)
    ]
    with engine(tiny_model) as llm:
        expected = [generate(llm, texts, max_tokens=4) for texts in turns]
    found = []
    with connected(tiny_model, service) as (llm, inside):
        for texts in turns:
            found.append(generate(llm, texts, max_tokens=4))
            inside.forget()
        assert inside.counts["load.requests"] > 100
        assert inside.counts["load.failed"] == 0
    assert found == expected


def counting_preemptions(inside) -> list[str]:
    """Ids of the requests that the engine preempts from now on."""
    gone: list[str] = []
    preempt = inside.scheduler._preempt_request

    def counted(request, *args, **kwargs):
        gone.append(request.request_id)
        return preempt(request, *args, **kwargs)

    inside.scheduler._preempt_request = counted
    return gone


def test_routers_hear_which_pages_the_node_holds(tiny_model: Path, service: Service):
    from vllm.config import KVEventsConfig

    text = prompt(60, 2 * BLOCK + PAGE)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    heard: list[BlockStored | BlockRemoved] = []
    with connected(tiny_model, service, kv_events_config=events) as (llm, inside):
        take = inside.connector.take_events
        inside.connector.take_events = lambda: keep(heard, take())
        hashes = hashes_of_requests(inside)
        generate(llm, [text])
        inside.settle()

        def told() -> set[int]:
            heard.extend(take())
            return {h for e in heard if isinstance(e, BlockStored) for h in e.block_hashes}

        until(lambda: len(told()) >= 2 * BLOCK // PAGE, "the node's pages are announced")
        mine = {maybe_convert_block_hash(h) for h in hashes}
        assert told() <= mine
        assert {event.medium for event in heard} == {"CPU"}
        assert {e.block_size for e in heard if isinstance(e, BlockStored)} == {PAGE}


def keep(heard: list, found) -> list:
    heard.extend(found)
    return []


def hashes_of_requests(inside) -> set[bytes]:
    """The page hashes of all requests that finish from now on."""
    hashes: set[bytes] = set()
    finished = inside.connector.request_finished

    def noted(request, pages):
        hashes.update(request.block_hashes)
        return finished(request, pages)

    inside.connector.request_finished = noted
    return hashes
