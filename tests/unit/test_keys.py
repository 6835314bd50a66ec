"""Keys are the same everywhere, and never the same for different contents."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiered_kv.errors import BadInput
from tiered_kv.keys import KEY_BYTES, MAX_TOKEN, chain, from_engine, namespace, pack_tokens
from tiered_kv.layout import KVLayout

DOC = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
A = KVLayout("acme/tiny", "float16", layers=2, kv_heads=1, head_dim=8, block_tokens=4)
B = dataclasses.replace(
    A, dtype="bfloat16", revision="r2", tp_rank=1, tp_size=2, engine="vllm:flash"
)
LAYOUTS = {"A": A, "B": B}
SECRET = b"tenant-1"

# Published, and repeated here so that neither a change of the code nor of the page goes unseen.
VECTORS = {
    ("A", "1 2 3 4"): "0de17630b19b7da10ba37aef5026f0c6",
    ("A", "1 2 3"): "3e06cd0f4fe22283575b35949afb0708",
    ("A", "1 2 3 4 5 6 7 8 9"): (
        "0de17630b19b7da10ba37aef5026f0c6 ff09a7d1294bb8b2611d7abacfb09162 "
        "e79ecb178d187f4a4c88f8cb4ed206de"
    ),
    ("A", "0 4294967295 65536 255"): "202a14e0ac66fc09a9dd7b6c085f1f9b",
    ("B", "1 2 3 4"): "565c691ec92e12ee1ee0b3af24814c3c",
}

tokens = st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=12)
quick = settings(deadline=None, print_blob=True)


def rows(section: str) -> list[list[str]]:
    """The rows of the table below the line that starts with `section`."""
    table = DOC.split(f"\n{section}")[1].split("\n\n")[1].splitlines()[2:]
    return [line.replace("`", "").strip("| ").split(" | ") for line in table]


def hexes(keys: list) -> str:
    return " ".join(key.hex() for key in keys)


@pytest.mark.parametrize(("name", "text"), list(VECTORS))
def test_published_vectors_hold(name: str, text: str) -> None:
    found = chain(LAYOUTS[name], SECRET, [int(token) for token in text.split()])
    assert hexes(found.keys) == VECTORS[name, text]


def test_the_published_page_says_what_the_code_does() -> None:
    layouts, spaces = rows("Layouts"), rows("Namespaces")
    chains, engines = rows("Chains"), rows("Engine keys")
    assert [len(layouts), len(spaces), len(chains), len(engines)] == [2, 4, 16, 4]
    for name, _, fingerprint in layouts:
        assert LAYOUTS[name].fingerprint.hex() == fingerprint
    for name, secret, root in spaces:
        assert namespace(LAYOUTS[name], bytes.fromhex(secret)).hex() == root
    for name, secret, text, keys in chains:
        found = chain(LAYOUTS[name], bytes.fromhex(secret), [int(token) for token in text.split()])
        assert hexes(found.keys) == keys
    for name, secret, text, keys in engines:
        hashes = [bytes.fromhex(one) for one in text.split()]
        assert hexes(from_engine(LAYOUTS[name], bytes.fromhex(secret), hashes)) == keys


def test_keys_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    code = (
        "import json; from tiered_kv.keys import chain; from tiered_kv.layout import KVLayout;"
        f"c = chain(KVLayout(**{dataclasses.asdict(B)!r}), {SECRET!r}, range(9));"
        "print(json.dumps([k.hex() for k in c.keys]))"
    )
    mine = [key.hex() for key in chain(B, SECRET, range(9)).keys]
    for seed in ("0", "4711"):
        out = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert json.loads(out.stdout) == mine


@quick
@given(one=tokens, other=tokens)
def test_equal_keys_mean_equal_tokens_from_the_first_one_on(one: list[int], other: list[int]):
    mine, theirs = chain(A, SECRET, one).keys, chain(A, SECRET, other).keys
    for i in range(min(len(mine), len(theirs))):
        assert (mine[i] == theirs[i]) == (one[: 4 * i + 4] == other[: 4 * i + 4])
    assert not set(mine[1:]) & set(theirs[:1]), "a key knows its place"


@quick
@given(seen=tokens)
def test_an_incomplete_block_has_another_key_than_the_complete_one(seen: list[int]) -> None:
    found = chain(A, SECRET, seen)
    assert found.tail == (len(seen) % 4 != 0)
    assert len(found.keys) == -(-len(seen) // 4)
    assert all(len(key) == KEY_BYTES for key in found.keys)
    grown = chain(A, SECRET, [*seen, 7])
    whole = len(seen) // 4
    assert grown.keys[:whole] == found.keys[:whole]
    assert not set(grown.keys[whole:]) & set(found.keys[whole:])


def test_an_incomplete_block_is_not_padded_with_a_token() -> None:
    assert chain(A, SECRET, [1, 2, 3]).keys != chain(A, SECRET, [1, 2, 3, 0]).keys


@quick
@given(
    seen=tokens, one=st.binary(min_size=1, max_size=64), other=st.binary(min_size=1, max_size=64)
)
def test_tenants_never_share_a_key(seen: list[int], one: bytes, other: bytes) -> None:
    # an HMAC-like key is padded with zeros only where the hash does so: BLAKE2b counts its length
    assume(one != other)
    assert not set(chain(A, one, seen).keys) & set(chain(A, other, seen).keys)
    assert namespace(A, one) != namespace(A, other)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "acme/other"}, {"revision": "r3"}, {"dtype": "bfloat16"}, {"layers": 3},
        {"kv_heads": 2}, {"head_dim": 4}, {"planes": 1}, {"engine": "x"}, {"tp_size": 2},
    ],
    ids=str,
)  # fmt: skip
def test_layouts_and_revisions_never_share_a_key(change: dict) -> None:
    other = dataclasses.replace(A, **change)
    assert not set(chain(A, SECRET, range(8)).keys) & set(chain(other, SECRET, range(8)).keys)


def test_ranks_never_share_a_key() -> None:
    zero, one = (dataclasses.replace(A, tp_size=2, tp_rank=rank) for rank in (0, 1))
    assert not set(chain(zero, SECRET, range(8)).keys) & set(chain(one, SECRET, range(8)).keys)


def test_tokens_may_come_as_any_integers() -> None:
    expected = pack_tokens([1, 2, 70000])
    assert expected == bytes([1, 0, 0, 0, 2, 0, 0, 0, 0x70, 0x11, 1, 0])
    for given_ in (
        (1, 2, 70000),
        np.array([1, 2, 70000], dtype=np.int32),
        np.array([1, 2, 70000], dtype=np.uint64),
        np.array([1, 0, 2, 0, 70000])[::2],
    ):
        assert pack_tokens(given_) == expected


def test_no_tokens_have_no_keys() -> None:
    assert chain(A, SECRET, []) == ([], 0)
    assert chain(A, SECRET, np.array([], dtype=np.int64)) == ([], 0)


@pytest.mark.parametrize(
    "bad",
    [[-1], [1 << 32], [1 << 63], [1 << 64], [-(1 << 63), 1 << 63], [1, "2"], ["2"], [1.0], [1.5],
     [True], [None], [[1, 2]], [[1], [2, 3]], 7, None, "12", b"12", {1: 2}, np.float32([1.0])],
    ids=repr,
)  # fmt: skip
def test_what_is_no_token_is_refused(bad: object) -> None:
    with pytest.raises(BadInput, match="token"):
        chain(A, SECRET, bad)  # type: ignore[arg-type]


def test_a_token_that_does_not_fit_is_named() -> None:
    with pytest.raises(BadInput, match=r"token -5 is not in 0\.\.4294967295"):
        pack_tokens([1, -5, -6])


@pytest.mark.parametrize("secret", [b"", b"x" * 65, "tenant", None, bytearray(b"x")])
def test_what_is_no_secret_is_refused_without_showing_it(secret: object) -> None:
    with pytest.raises(BadInput, match="tenant secret") as caught:
        namespace(A, secret)  # type: ignore[arg-type]
    assert "xx" not in str(caught.value)


@quick
@given(seen=st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=4))
def test_no_tokens_look_like_an_engines_hash(seen: list[int]) -> None:
    assert from_engine(A, SECRET, [pack_tokens(seen)]) != chain(A, SECRET, seen).keys


def test_engine_keys_keep_their_order_and_their_namespace() -> None:
    hashes = [bytes([i]) * 32 for i in range(3)]
    keys = from_engine(A, SECRET, hashes)
    assert keys == [key for one in hashes for key in from_engine(A, SECRET, [one])]
    assert len(set(keys) | set(from_engine(B, SECRET, hashes))) == 6
    assert not set(keys) & set(from_engine(A, b"tenant-2", hashes))


@pytest.mark.parametrize("bad", [b"", 7, "ab", None])
def test_what_is_no_engine_hash_is_refused(bad: object) -> None:
    with pytest.raises(BadInput, match="block hash"):
        from_engine(A, SECRET, [b"fine", bad])  # type: ignore[list-item]
