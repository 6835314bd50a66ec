"""Engines in processes of their own beside one service: two of them, and one of two ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import PAGE, engine, generate, prompt
from engine_script import SCRIPT
from vllm_kit import Service, running

BLOCK = 256
LENGTHS = (3 * PAGE + 5, 2 * BLOCK, 3 * BLOCK + PAGE + 1)
PROMPTS = [prompt(40 + n, n) for n in LENGTHS]
PROCESS_S = 500
pytestmark = pytest.mark.timeout(1500)
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    with engine(tiny_model) as llm:
        return [generate(llm, [text])[0] for text in PROMPTS]


@pytest.fixture(scope="module")
def service(expected: Any) -> Iterator[Service]:
    with running() as one:
        yield one


def answers(model: Path, kv: Any, **args: Any) -> list[dict[str, Any]]:
    job = {
        "model": str(model), "kv": kv, "args": args, "prompts": PROMPTS, "max_tokens": 16,
        "join_s": 4.0, "save_s": 1.0, "env": APART,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(job), capture_output=True, text=True,
        timeout=PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_two_processes_share_what_the_first_computed(tiny_model, service, expected):
    first = answers(tiny_model, service.options())
    second = answers(tiny_model, service.options())
    assert [one["tokens"] for one in first] == expected
    assert [one["cached"] for one in first] == [0, 0, 0]
    assert [one["tokens"] for one in second] == expected
    assert [one["cached"] for one in second] == [3 * PAGE, 2 * BLOCK - 1, 3 * BLOCK + PAGE]


def test_two_ranks_say_with_the_service_what_they_say_without_it(tiny_model, service):
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    plain = answers(tiny_model, None, **ranks)
    first = answers(tiny_model, service.options(), **ranks)
    second = answers(tiny_model, service.options(), **ranks)
    assert [one["tokens"] for one in first] == [one["tokens"] for one in plain]
    assert [one["cached"] for one in first] == [0, 0, 0]
    assert [one["tokens"] for one in second] == [one["tokens"] for one in plain]
    assert [one["cached"] for one in second] == [3 * PAGE, 2 * BLOCK - 1, 3 * BLOCK + PAGE]
