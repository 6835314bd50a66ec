"""The command line against a service that runs: one embedded Ray cluster for all tests here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from cli_kit import (
    Ended,
    call,
    gone,
    interrupt,
    process,
    running,
    wait_for_line,
    write_toml,
)
from cluster_kit import Engine, config_in, folders

from tiered_kv.actors import fleet
from tiered_kv.connecting import Cluster
from tiered_kv.demo.model import ModelNotInstalled, default_folder, find_gguf


@pytest.fixture
def on(cluster: Cluster, tmp_path: Path) -> Sequence[str]:
    """The options that name this module's service."""
    return ("--config", write_toml(cluster.config, tmp_path / "kv.toml"))


def pids(cluster: Cluster) -> set[int]:
    found = cluster.status()
    nodes = [*found["nodes"].values(), *found["gpus"].values()]
    return {found["coordinator"]["pid"], *(node["process"]["pid"] for node in nodes)}


def listed(on: Sequence[str], *more: str) -> dict[str, Any]:
    found: dict[str, Any] = call("sessions", "--json", *more, *on).document()
    return found


def test_status_gives_every_actor_in_one_document(cluster: Cluster, on: Sequence[str]) -> None:
    found = call("status", "--json", *on).document()
    (member,) = cluster.members()
    assert found["namespace"] == cluster.config.service.namespace
    assert [m["node_id"] for m in found["members"]] == [member.node_id]
    assert list(found["nodes"]) == [member.actor]
    assert list(found["gpus"]) == list(member.gpus)
    (node,) = found["nodes"].values()
    assert [tier["medium"] for tier in node["tiers"]] == ["dram", "nvme"]
    assert found["coordinator"]["members"] == 1


def test_status_tables_name_tiers_sessions_and_processes(
    cluster: Cluster, engine: Engine, on: Sequence[str]
) -> None:
    engine.save("shown", 2)
    ended = call("status", *on)
    assert (ended.code, ended.err) == (0, "")
    processes = pids(cluster) - {cluster.status()["coordinator"]["pid"]}
    for part in ("dram", "nvme", "hbm", "16 MiB", "online", " recent", *map(str, processes)):
        assert part in ended.out


def test_another_process_gets_one_document_and_nothing_else(cluster: Cluster) -> None:
    where = ray.get_runtime_context().gcs_address
    token = {"RAY_AUTH_MODE": "token"}
    named = ("--set", f"service.namespace={cluster.config.service.namespace}")
    ended = process("status", "--json", "--address", where, *named, env=token)
    assert ended.err == ""
    assert len(ended.document()["nodes"]) == 1

    other = process("sessions", "--address", where, "--set", "service.namespace=x", env=token)
    assert "no service runs in Ray namespace 'x'" in other.failed()
    assert "`tiered-kv up`" in other.err


def test_sessions_are_listed_longest_unused_first_up_to_the_limit(
    engine: Engine, on: Sequence[str]
) -> None:
    for name in ("list-a", "list-b"):
        engine.save(name, 3)
    found = listed(on)
    mine = [row for row in found["sessions"] if row["id"].startswith("list-")]
    assert [row["id"] for row in mine] == ["list-a", "list-b"]
    assert all((row["blocks"], row["tokens"]) == (3, 96) for row in mine)
    assert all(sum(row["tiers"].values()) == 3 for row in mine)
    assert found["not_answering"] == {}

    first = listed(on, "--limit", "1")
    assert first["held"] == found["held"] >= 2
    assert [row["id"] for row in first["sessions"]] == [found["sessions"][0]["id"]]

    table = call("sessions", *on)
    assert "list-a" in table.out
    assert f"{found['held']} of {found['held']} sessions" in table.out


def test_a_session_is_woken_and_forgotten_by_its_name(
    engine: Engine, gpu_engine: Engine, on: Sequence[str]
) -> None:
    gpu_engine.attach()  # an engine has introduced its layout to the GPU
    engine.save("by-name", 4)
    woken = call("sessions", "wake", "by-name", *on)
    assert woken.out == "by-name: on its way up, moves: 1\n"
    forgotten = call("sessions", "forget", "by-name", *on)
    assert forgotten.out.startswith("by-name: forgotten, with 4 blocks")
    assert "by-name" not in {row["id"] for row in listed(on)["sessions"]}
    for verb in ("wake", "forget"):
        line = call("sessions", verb, "by-name", *on).failed()
        assert line == "tiered-kv: no session 'by-name' is held here\n"
    assert "not 1 to 128 of the characters" in call("sessions", "wake", "a b", *on).failed()


def test_up_leaves_alone_what_runs_and_tells_what_differs(
    cluster: Cluster, on: Sequence[str]
) -> None:
    before = pids(cluster)
    ended = call("up", *on, "--set", "nvme.queue_depth=3")
    assert (ended.code, ended.err) == (0, "")
    assert pids(cluster) == before
    (member,) = cluster.members()
    for part in (
        "dram: bytes=16MiB", "tenant_secret=***", f"node {member.node_id[:8]}",
        "runs with nvme.queue_depth = 8, not 3", ray.get_runtime_context().gcs_address,
    ):  # fmt: skip
        assert part in ended.out


def test_a_demo_that_is_interrupted_takes_its_cluster_and_its_folder_with_it(
    tmp_path: Path,
) -> None:
    try:
        find_gguf()
    except ModelNotInstalled as missing:
        pytest.skip(str(missing))
    models = default_folder()
    (tmp_path / "tiered_kv").mkdir()
    (tmp_path / "tiered_kv" / "models").symlink_to(models)
    models.mkdir(parents=True, exist_ok=True)
    with folders() as (root, shm):
        env = {"XDG_CACHE_HOME": str(tmp_path), "RAY_TMPDIR": str(root)}
        config = write_toml(config_in(root, shm), root / "kv.toml")
        with running("demo", "--sessions", "4", "--config", config, env=env) as child:
            wait_for_line(child, "chat-00: reads")
            started = psutil.Process(child.pid).children(recursive=True)
            arenas = list(shm.glob("*.arena"))
            assert len(arenas) == 2
            assert list((tmp_path / "tiered_kv").glob("demo-*"))
            ended = interrupt(child)
        assert ended.failed(130) == "tiered-kv: interrupted\n"
        assert [p.name for p in (tmp_path / "tiered_kv").iterdir()] == ["models"]
        assert gone([str(arena) for arena in arenas])
        assert psutil.wait_procs(started, timeout=30)[1] == []


def test_down_ends_every_actor_and_says_what_it_did(
    cluster: Cluster, engine: Engine, on: Sequence[str]
) -> None:
    engine.save("kept", 5)
    shm = cluster.config.shm_folder
    assert list(shm.glob("*.arena"))
    found = call("down", "--json", *on)
    ended = json.loads(found.out)
    assert ended["left"] == ended["killed"] == []
    assert len(ended["stopped"]) == 3
    assert ended["flushed_blocks"] >= 5
    assert fleet.named(cluster.config.service.namespace) == []
    assert list(shm.glob("*.arena")) == []

    again: Ended = call("down", *on)
    assert "stopped 0 actors, killed 0, wrote 0 blocks" in again.out
    line = call("status", *on).failed()
    assert "start it with `tiered-kv up`" in line
