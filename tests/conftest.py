"""Options and fixtures that all layers share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_TESTS = Path(__file__).parent
_LAYERS = ("integration", "fault", "engine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces",
        default=os.environ.get("TIERED_KV_TRACES", str(_TESTS.parents[1] / "shared" / "traces")),
        help="folder with public request traces (or TIERED_KV_TRACES); tests that replay them "
        "are skipped where it is absent",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with the layer of their folder."""
    for item in items:
        folders = item.path.relative_to(_TESTS).parts if item.path.is_relative_to(_TESTS) else ()
        for layer in _LAYERS:
            if layer in folders:
                item.add_marker(layer)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # only where it is needed: many tests run without

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def traces_folder(pytestconfig: pytest.Config) -> Path:
    """The folder with public traces; skips the test where there is none."""
    folder = Path(pytestconfig.getoption("--traces"))
    if not folder.is_dir():
        pytest.skip(f"no traces in {folder}; see --traces")
    return folder


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A folder of this test's own in shared memory, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny_llama() -> "LlamaForCausalLM":
    """A random Llama: 3 layers, 2 KV heads of 16, vocabulary 256, float32, the same every time.

    It makes no sense, and its greedy tokens depend on every key and value of its cache.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        # Wide enough that attention is far from uniform and logits are far from ties.
        initializer_range=0.4,
    )
    torch.set_num_threads(1)  # more would only wait for each other on matrices this small
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240229)
        return LlamaForCausalLM(config).eval()
