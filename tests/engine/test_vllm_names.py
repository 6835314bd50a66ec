"""Names of blocks, from the engine's own hashes."""

import hashlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import cbor2
from connector_kit import GROUP, hashes_of
from service_kit import LAYOUT, SECRET

from tiered_kv.finding import check_asks
from tiered_kv.integrations.vllm.names import Names

RANKS = [replace(LAYOUT, tp_rank=rank, tp_size=2) for rank in range(2)]


def names(secret: bytes = SECRET) -> Names:
    return Names(RANKS, secret, GROUP)


def test_equal_hashes_have_equal_names_in_every_engine() -> None:
    assert names().asks(hashes_of("a", 11)) == names().asks(hashes_of("a", 11))
    assert names().block(hashes_of("a", 8), 1) == names().block(hashes_of("a", 11), 1)


def test_other_hashes_and_other_tenants_have_other_names() -> None:
    mine = names().asks(hashes_of("a", 8))[0].run
    assert set(mine).isdisjoint(names().asks(hashes_of("b", 8))[0].run)
    assert set(mine).isdisjoint(names(b"another").asks(hashes_of("a", 8))[0].run)


def test_every_rank_has_names_of_its_own() -> None:
    first, second = names().asks(hashes_of("a", 11))
    assert set(first.run).isdisjoint(second.run)
    assert first.layout != second.layout


def test_asking_and_saving_use_the_same_names() -> None:
    hashes = hashes_of("a", 11)
    one = names()
    for rank, ask in enumerate(one.asks(hashes)):
        assert ask.run == tuple(one.block(hashes, i)[rank] for i in range(2))
        for block, tails in enumerate(ask.tails):
            assert tails == tuple(
                one.block(hashes, block, pages)[rank] for pages in range(1, len(tails) + 1)
            )


def test_a_tail_never_has_the_name_of_a_complete_block() -> None:
    for pages in range(1, 14):
        (ask, _) = names().asks(hashes_of("a", pages))
        every = [key for tails in ask.tails for key in tails]
        assert set(every).isdisjoint(ask.run)
        assert len(set(every)) == len(every)
        assert len(every) + len(ask.run) == pages


def test_what_is_asked_is_what_a_node_takes() -> None:
    for pages in range(14):
        asks = check_asks(names().asks(hashes_of("a", pages)))
        assert len(asks[0].run) == pages // GROUP
        assert len(asks[0].tails) == pages // GROUP + 1
        assert all(len(tails) == GROUP - 1 for tails in asks[0].tails[:-1])
        assert len(asks[0].tails[-1]) == pages % GROUP


def test_renewed_names_find_nothing_of_before_and_stay_consistent() -> None:
    one, hashes = names(), hashes_of("a", 11)
    before = one.asks(hashes)[0]
    one.renew()
    after = one.asks(hashes)[0]
    assert set(before.run).isdisjoint(after.run)
    assert after.run[1] == one.block(hashes, 1)[0]
    assert after.tails[2][1] == one.block(hashes, 2, 2)[0]
    assert names().asks(hashes)[0] == before  # others go on as they were


def test_blocks_of_one_page_have_no_tails() -> None:
    (ask,) = Names([LAYOUT], SECRET, 1).asks(hashes_of("a", 3))
    assert len(ask.run) == 3
    assert all(not tails for tails in ask.tails)


# -- vLLM's own hashes, computed without vLLM -----------------------------------------------


def outside(tokens: list[int], page: int, extra: tuple[object, ...] | None = None) -> list[bytes]:
    def digest(value: object) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    parent, out = digest("vllm-none-hash"), []
    for start in range(0, len(tokens) - page + 1, page):
        parent = digest((parent, tuple(tokens[start : start + page]), extra))
        out.append(parent)
    return out


def inside(tokens: list[int], page: int, **more: object) -> list[bytes]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_fn = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_fn)
    request = SimpleNamespace(
        all_token_ids=tokens, _all_token_ids=tokens, num_tokens=len(tokens), block_hashes=[],
        mm_features=[], lora_request=None, cache_salt=None, prompt_embeds=None,
        _prompt_embeds_per_block_hashes={}, has_encoder_inputs=False,
    )  # fmt: skip
    for name, value in more.items():
        setattr(request, name, value)
    return [bytes(one) for one in get_request_block_hasher(page, hash_fn)(request)]


def test_names_of_vllms_hashes_can_be_computed_anywhere(monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tokens = list(range(3, 103))
    assert inside(tokens, 16) == outside(tokens, 16)
    assert names().asks(inside(tokens, 16)) == names().asks(outside(tokens, 16))


def test_a_salt_and_an_adapter_change_every_name(monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tokens = list(range(3, 103))
    adapters = [SimpleNamespace(lora_name=n, lora_path=p) for n, p in [("a", "/a"), ("a", "/b")]]
    found = [
        inside(tokens, 16),
        inside(tokens, 16, cache_salt="mine"),
        inside(tokens, 16, cache_salt="yours"),
        *(inside(tokens, 16, lora_request=one) for one in adapters),
    ]
    runs = [set(names().asks(hashes)[0].run) for hashes in found]
    for i, run in enumerate(runs):
        for other in runs[i + 1 :]:
            assert run.isdisjoint(other)
    assert all(len(a & b) == 0 for a, b in pairwise(runs))


def test_another_adapter_or_salt_names_every_block_anew() -> None:
    """vLLM's own requests, hashed by vLLM itself."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(16, hash_fn)

    def run(**identity: object) -> set[bytes]:
        request = Request(
            "r", list(range(128)), SamplingParams(), None, block_hasher=hasher, **identity
        )
        assert len(request.block_hashes) == 8
        return set(names().asks(request.block_hashes)[0].run)

    adapters = [LoRARequest(name, i, f"/adapters/{name}") for i, name in enumerate("ab", 1)]
    runs = [run(), *(run(lora_request=one) for one in adapters), run(cache_salt="s")]
    assert run() == runs[0]
    assert len(set().union(*runs)) == sum(len(one) for one in runs)
