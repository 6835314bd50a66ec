"""Tests with a real vLLM: they run in `.venv-engine` (make test-engine), and fail without it."""

from pathlib import Path

import pytest
from engine_kit import make_tiny_llama, prepare_environment

LONG_S = 300

prepare_environment()  # before anything imports vLLM


def pytest_configure(config: pytest.Config) -> None:
    # vLLM and what it imports warn in many ways that are not ours to mend.
    config.addinivalue_line("filterwarnings", "ignore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine alone takes half a minute to start on busy cores."""
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with a tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, converted once into the user's cache."""
    from tiered_kv.demo.model import converted

    return converted()
