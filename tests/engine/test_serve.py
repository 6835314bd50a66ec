"""Two replicas under Ray Serve LLM, turned on by one line; one of them is killed while serving."""

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_kit import ENVIRONMENT, PAGE, engine, generate, prompt

pytestmark = pytest.mark.timeout(900)

MODEL = "tiny"
REPLICAS = 2
TOKENS = 640
"""Of a first turn: 20 pages, two complete blocks of the service and a tail."""
ANSWER = 12
PATIENCE_S = 300.0
NAMESPACE = "kv-serve-test"
OF_REPLICAS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or both would share one core
    "OMP_NUM_THREADS": "1",
}


def until(check: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    end = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.2)
    return answer


@dataclass
class Turn:
    """What came back: token ids, and how many of the prompt were not computed."""

    tokens: list[int]
    cached: int


@dataclass
class Served:
    """The application as a client and an operator see it."""

    url: str
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=PATIENCE_S))

    def turn(self, ids: list[int], session: str | None = None, **headers: str) -> Turn:
        body = {
            "model": MODEL, "prompt": ids, "max_tokens": ANSWER, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        named = {"x-session-id": session} if session else {}
        answer = self.client.post(f"{self.url}/v1/completions", json=body, headers=named | headers)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return Turn(found["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def replicas(self) -> dict[str, Any]:
        """The replica actors by name."""
        import ray

        found = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith("SERVE_REPLICA::kv#") and MODEL in actor["name"]:
                try:
                    found[actor["name"]] = ray.get_actor(actor["name"], actor["namespace"])
                except ValueError:
                    continue
        return found

    def reports(self) -> dict[str, dict[str, Any]]:
        """What each replica that answers reports to routers."""
        import ray

        found = {}
        for name, actor in self.replicas().items():
            try:
                stats = ray.get(actor.record_routing_stats.remote(), timeout=30)
            except ray.exceptions.RayError:
                continue
            found[name] = stats["tiered_kv"]
        return found

    def homes(self, session: str) -> list[str]:
        """Replicas that served a session."""
        return [name for name, report in self.reports().items() if session in report["sessions"]]


def conversation(seed: int, turns: int) -> list[list[int]]:
    """What a user says in each turn, as token ids."""
    return [prompt(seed, TOKENS), *(prompt(1000 * seed + i, 40) for i in range(1, turns))]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[int, list[tuple[list[int], list[int]]]]:
    """For each conversation the prompts and answers of its turns, by vLLM alone."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    with engine(tiny_model) as llm:
        for seed in range(1, 9):
            ids: list[int] = []
            for said in conversation(seed, 3):
                ids = [*ids, *said]
                [answer] = generate(llm, [ids], ANSWER)
                found.setdefault(seed, []).append((ids, answer))
                ids = [*ids, *answer]
    return found


@contextmanager
def cluster(root: Path, shm: Path) -> Iterator[None]:
    """A Ray cluster and, in it, a service of this module's own; nothing of them is left."""
    import ray
    from ray import serve

    from tiered_kv.actors import launch
    from tiered_kv.settings import load

    variables = ENVIRONMENT | {
        "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",
        "RAY_worker_niceness": "0",  # or replicas starve beside whatever else runs here
        "TIERED_KV_DRAM_BYTES": "64MiB",
        "TIERED_KV_DRAM_FOLDER": str(shm),
        "TIERED_KV_NVME_BYTES": "64MiB",
        "TIERED_KV_NVME_FOLDER": str(root / "nvme"),
        "TIERED_KV_NVME_FREE_FLOOR_BYTES": "1MiB",
        "TIERED_KV_SERVICE_NAMESPACE": NAMESPACE,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        before = set(psutil.Process().children(recursive=True))
        ray.init(
            address="local", _temp_dir=str(root / "ray"), num_cpus=8, include_dashboard=False,
            object_store_memory=100 << 20, log_to_driver=False,
        )  # fmt: skip
        started = set(psutil.Process().children(recursive=True)) - before
        try:
            yield
        finally:
            serve.shutdown()
            launch.down(load(), flush=False)
            ray.shutdown()
            psutil.wait_procs(started, timeout=60)


def deploy(model: Path, port: int) -> None:
    """Two replicas on the CPU; the line that matters is `server_cls`."""
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(model)},
        server_cls="tiered_kv.integrations.ray_serve:TieredKVServer",
        accelerator_config={"kind": "cpu"},
        engine_kwargs={
            "dtype": "bfloat16", "block_size": PAGE, "max_model_len": 4352, "enforce_eager": True,
            "enable_prompt_tokens_details": True, "seed": 0,
        },
        deployment_config={
            "num_replicas": REPLICAS, "ray_actor_options": {"num_cpus": 0.5},
        },
        runtime_env={"env_vars": ENVIRONMENT | OF_REPLICAS},
        log_engine_metrics=False,
    )  # fmt: skip
    ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}
    app = build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app, name="kv")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def served(tiny_model: Path, expected: object) -> Iterator[Served]:
    """One start for all tests: it takes minutes. `expected` goes first, to have the memory."""
    root = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    shm = Path(tempfile.mkdtemp(prefix="tiered-kv-test-", dir="/dev/shm"))
    port = free_port()
    try:
        with cluster(root, shm):
            deploy(tiny_model, port)
            one = Served(f"http://127.0.0.1:{port}")
            until(lambda: nodes(), "the replicas start a service of their own")
            yield one
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def nodes() -> list[str]:
    """Names of the service's node actors."""
    from tiered_kv.actors import fleet

    return [name for name in fleet.named(NAMESPACE) if name.startswith("node-")]


def saved(session: str, tokens: int) -> bool:
    """Whether the service holds that much of a session."""
    from tiered_kv.errors import TieredKVError
    from tiered_kv.raylink import RayLink

    try:
        held = RayLink(nodes()[0], NAMESPACE).call("resident", session, timeout_s=30)
    except TieredKVError:
        return False
    return bool(held.tokens >= tokens)


# In the order of this file: the last ones kill replicas.


def test_answers_are_those_of_vllm_alone_and_sessions_spread_over_both_replicas(
    served: Served, expected: dict[int, list[tuple[list[int], list[int]]]]
):
    for seed in (1, 2, 3, 4):
        ids, answer = expected[seed][0]
        turn = served.turn(ids, f"s{seed}")
        assert turn.tokens == answer
        assert turn.cached == 0
    homes = [served.homes(f"s{seed}") for seed in (1, 2, 3, 4)]
    assert all(len(home) == 1 for home in homes)
    assert len({home[0] for home in homes}) == REPLICAS


def test_a_second_turn_goes_to_the_replica_that_has_the_first(
    served: Served, expected: dict[int, list[tuple[list[int], list[int]]]]
):
    for seed in (1, 2, 3, 4):
        home = served.homes(f"s{seed}")
        ids, answer = expected[seed][1]
        turn = served.turn(ids, f"s{seed}")
        assert turn.tokens == answer
        assert turn.cached >= TOKENS - PAGE
        assert served.homes(f"s{seed}") == home


def test_a_session_without_a_name_that_can_be_one_is_served_and_counted(
    served: Served, expected: dict[int, list[tuple[list[int], list[int]]]]
):
    ids, answer = expected[5][0]
    before = sum(report["counts"].get("hints.bad", 0) for report in served.reports().values())
    assert served.turn(ids, "no such name!").tokens == answer
    after = sum(report["counts"].get("hints.bad", 0) for report in served.reports().values())
    assert after == before + 1


def test_the_next_turn_of_a_killed_replicas_session_hits_on_the_other_one(
    served: Served, expected: dict[int, list[tuple[list[int], list[int]]]]
):
    sessions = {f"s{seed}": seed for seed in (1, 2, 3, 4)}
    for session, seed in sessions.items():
        whole = (len(expected[seed][1][0]) // PAGE) * PAGE
        until(lambda s=session, n=whole: saved(s, n), f"{session} is saved")
    victim = served.homes("s1")[0]
    moved = [session for session in sessions if served.homes(session) == [victim]]
    with background(served, expected[6][0]) as traffic:
        until(lambda: traffic.ended, "some requests are answered")
        doomed = process_of(served, victim)
        killed = time.monotonic()
        doomed.kill()
        for session in moved:
            ids, answer = expected[sessions[session]][2]
            turn = served.turn(ids, session)
            assert turn.tokens == answer
            assert turn.cached >= TOKENS
        count = len(traffic.ended)
        until(lambda: len(traffic.ended) > count + 5, "requests go on being answered")
    wrong = [error for began, error in traffic.failed if began > killed]
    assert wrong == []
    assert traffic.different == 0
    for session in moved:
        assert victim not in served.homes(session)


def test_a_replica_whose_engine_is_killed_ends_at_once_and_its_sessions_move(
    served: Served, expected: dict[int, list[tuple[list[int], list[int]]]]
):
    until(lambda: len(served.reports()) == REPLICAS, "the killed replica is replaced")
    ids, answer = expected[7][0]
    assert served.turn(ids, "s7").tokens == answer
    until(lambda: saved("s7", TOKENS), "s7 is saved")
    [victim] = served.homes("s7")
    below = process_of(served, victim).children(recursive=True)
    [core] = [process for process in below if "EngineCore" in name(process)]
    core.kill()
    until(lambda: victim not in served.replicas(), "the replica without an engine ends")
    ids, answer = expected[7][1]
    turn = served.turn(ids, "s7")
    assert turn.tokens == answer
    assert turn.cached >= TOKENS - PAGE


@dataclass
class Traffic:
    """One request after the other, each with a time."""

    ended: list[float] = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)
    different: int = 0


@contextmanager
def background(served: Served, turn: tuple[list[int], list[int]]) -> Iterator[Traffic]:
    """Requests of no session from three clients, as long as the block runs."""
    traffic, stop = Traffic(), threading.Event()
    ids, answer = turn

    def client() -> None:
        mine = Served(served.url)
        while not stop.is_set():
            began = time.monotonic()
            try:
                same = mine.turn(ids).tokens == answer
            except (AssertionError, httpx.HTTPError) as error:
                traffic.failed.append((began, repr(error)[:500]))
            else:
                traffic.different += not same
                traffic.ended.append(time.monotonic())

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield traffic
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def process_of(served: Served, replica: str) -> psutil.Process:
    """The process of a replica actor, which this one started by way of Ray."""
    import ray

    pid = served.replicas()[replica].__ray_call__.remote(lambda self: os.getpid())
    return psutil.Process(ray.get(pid, timeout=60))


def name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
