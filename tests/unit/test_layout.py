"""A layout says what bytes mean, and refuses what cannot mean anything."""

import dataclasses
import subprocess
import sys

import pytest

from tiered_kv.errors import BadInput, BadLayout
from tiered_kv.layout import DTYPE_BYTES, KVLayout
from tiered_kv.types import ALIGNMENT

LAYOUT = KVLayout("meta-llama/Llama-3.1-8B", "bfloat16", layers=32, kv_heads=8, head_dim=128)
OTHER = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "dtype": "float16",
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 64,
    "revision": "0e9e39f",
    "block_tokens": 128,
    "planes": 1,
    "engine": "vllm:0.11",
    "tp_rank": 1,
    "tp_size": 3,
}


def test_sizes_of_a_known_model_are_right() -> None:
    assert LAYOUT.token_bytes == 128 * 1024
    assert LAYOUT.payload_bytes == LAYOUT.block_bytes == 32 << 20
    assert LAYOUT.shape == (32, 2, 8, 256, 128)


def test_blocks_are_padded_to_the_io_alignment() -> None:
    odd = KVLayout("m", "float16", layers=3, kv_heads=1, head_dim=5, block_tokens=7)
    assert odd.payload_bytes == 3 * 2 * 5 * 2 * 7
    assert odd.block_bytes == ALIGNMENT


def test_a_latent_cache_has_one_plane() -> None:
    latent = KVLayout("m", "bfloat16", layers=27, kv_heads=1, head_dim=576, planes=1)
    assert latent.token_bytes == 27 * 576 * 2


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    assert LAYOUT.fingerprint.hex() == "eb50795770beff94cdec991491a95fd2"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KVLayout)])
def test_the_fingerprint_changes_with_every_field(field: str) -> None:
    base = dataclasses.replace(LAYOUT, tp_size=2)
    other = dataclasses.replace(base, **{field: OTHER[field]})
    assert other.fingerprint != base.fingerprint


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    code = (
        "from tiered_kv.layout import KVLayout;"
        f"print(KVLayout(**{dataclasses.asdict(LAYOUT)!r}).fingerprint.hex())"
    )
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert out.stdout.strip() == LAYOUT.fingerprint.hex()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float64"),
        ("layers", 0),
        ("layers", -1),
        ("layers", 2.0),
        ("layers", True),
        ("kv_heads", 0),
        ("head_dim", "128"),
        ("block_tokens", 0),
        ("tp_size", 0),
        ("tp_rank", 1),
        ("tp_rank", -1),
        ("tp_rank", False),
        ("planes", 3),
        ("planes", 0),
        ("model", ""),
        ("engine", ""),
        ("block_tokens", 1 << 20),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadLayout) as caught:
        dataclasses.replace(LAYOUT, **{field: value})
    assert isinstance(caught.value, BadInput)
    assert field in str(caught.value) or "block of" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("planes", True), ("planes", 2.0), ("dtype", ["float16"]), ("model", 5),
                         ("revision", None), ("engine", b"vllm")]
)  # fmt: skip
def test_a_field_of_another_type_is_refused_so_that_equal_layouts_have_equal_fingerprints(
    field: str, value: object
) -> None:
    with pytest.raises(BadLayout, match=field):
        dataclasses.replace(LAYOUT, **{field: value})


def test_every_known_dtype_is_accepted() -> None:
    for dtype, width in DTYPE_BYTES.items():
        assert dataclasses.replace(LAYOUT, dtype=dtype).token_bytes == 32 * 2 * 8 * 128 * width


def test_the_description_names_all_that_could_differ() -> None:
    text = dataclasses.replace(LAYOUT, revision="0e9e39f", tp_rank=1, tp_size=2).describe()
    for part in ("Llama-3.1-8B", "0e9e39f", "bfloat16", "32x8x128", "256 tokens", "tp 1/2", "hf:"):
        assert part in text
    assert LAYOUT.fingerprint.hex() in LAYOUT.describe()
