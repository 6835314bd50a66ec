"""The sample clusters: `ray_cluster.yaml` against Ray's own schema, KubeRay's by its fields."""

import copy
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import fill_node_type_min_max_workers, validate_config

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
CLUSTER = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
KUBERAY = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())
STARTS = ["head_start_ray_commands", "worker_start_ray_commands"]
GIB = 1 << 30


def start_options(commands: list[str]) -> dict[str, str]:
    """Options of the one `ray start` among shell commands, as the shell splits them."""
    (start,) = [c[c.index("ray start") :] for c in commands if "ray start" in c]
    words = [word.partition("=") for word in shlex.split(start) if word.startswith("--")]
    return {name: value for name, _, value in words}


def test_ray_accepts_the_cluster_file() -> None:
    jsonschema.validate(CLUSTER, SCHEMA)
    filled = {"cluster_synced_files": [], **copy.deepcopy(CLUSTER)}
    fill_node_type_min_max_workers(filled)
    validate_config(filled)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.pop("provider"),
        lambda c: c.update(object_store_memory=1),
        lambda c: c.update(max_workers="4"),
        lambda c: c["available_node_types"]["head"].pop("node_config"),
        lambda c: c["available_node_types"]["gpu_worker"]["resources"].update(tiered_kv=0.5),
        lambda c: c["setup_commands"].append({"a mapping": "where YAML saw a colon"}),
    ],
)
def test_the_schema_refuses_a_damaged_cluster_file(damage: Callable[[dict[str, Any]], Any]) -> None:
    broken = copy.deepcopy(CLUSTER)
    damage(broken)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_workers_fit_within_the_limits_of_the_cluster() -> None:
    workers = [
        kind
        for name, kind in CLUSTER["available_node_types"].items()
        if name != CLUSTER["head_node_type"]
    ]
    assert all(0 <= kind["min_workers"] <= kind["max_workers"] for kind in workers)
    assert sum(kind["min_workers"] for kind in workers) <= CLUSTER["max_workers"]
    assert any(kind["resources"].get("GPU") for kind in workers)


def test_every_node_offers_the_resource_to_the_autoscaler_and_to_ray_start() -> None:
    for kind in CLUSTER["available_node_types"].values():
        assert kind["resources"]["tiered_kv"] == 1
    for start in STARTS:
        assert json.loads(start_options(CLUSTER[start])["--resources"]) == {"tiered_kv": 1}


def test_the_object_store_leaves_shared_memory_to_the_arena() -> None:
    for start in STARTS:
        assert int(start_options(CLUSTER[start])["--object-store-memory"]) <= 2 * GIB


def test_ray_starts_without_a_limit_on_locked_memory() -> None:
    for start in STARTS:
        (command,) = [c for c in CLUSTER[start] if "ray start" in c]
        assert command.index("ulimit -l unlimited") < command.index("ray start")
    assert any("memlock unlimited" in c for c in CLUSTER["initialization_commands"])


def test_no_node_starts_without_the_token() -> None:
    for start in STARTS:
        (command,) = [c for c in CLUSTER[start] if "ray start" in c]
        assert "RAY_AUTH_MODE=token ray start" in command
    assert "~/.ray/auth_token" in CLUSTER["file_mounts"]
    assert KUBERAY["spec"]["authOptions"] == {"mode": "token"}


def test_every_command_is_valid_shell() -> None:
    lists = [*STARTS, "initialization_commands", "setup_commands"]
    for command in (c for name in lists for c in CLUSTER[name]):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)


def test_ray_and_tiered_kv_are_installed_in_versions_that_exist_here() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    installs = " ".join(CLUSTER["setup_commands"])
    assert f"tiered-kv=={version}" in installs
    assert f"ray[default]=={ray.__version__}" in installs
    assert KUBERAY["spec"]["rayVersion"] == ray.__version__


# KubeRay


def groups() -> list[dict[str, Any]]:
    spec = KUBERAY["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def gib(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)Gi", quantity)
    assert match, quantity
    return int(match[1])


def test_every_pod_offers_the_resource_and_keeps_the_object_store_small() -> None:
    for group in groups():
        params = group["rayStartParams"]
        assert all(type(value) is str for value in params.values())  # KubeRay's type
        # KubeRay writes `--resources=VALUE` into a shell command: VALUE is quoted for the shell.
        (words,) = shlex.split(params["resources"])
        assert json.loads(words) == {"tiered_kv": 1}
        assert int(params["object-store-memory"]) <= 2 * GIB


def test_shared_memory_is_a_memory_volume_within_the_limit_of_its_container() -> None:
    for group in groups():
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"]: v for v in pod["volumes"]}
        shm = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shm["medium"] == "Memory"
        memory = container["resources"]["limits"]["memory"]
        assert gib(shm["sizeLimit"]) + 8 <= gib(memory)
        assert mounts["/mnt/tiered_kv"] in volumes


def test_gpu_pods_may_lock_memory() -> None:
    (worker,) = KUBERAY["spec"]["workerGroupSpecs"]
    (container,) = worker["template"]["spec"]["containers"]
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) > 0


def test_worker_groups_are_complete() -> None:
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayCluster")
    for group in KUBERAY["spec"]["workerGroupSpecs"]:
        assert group["groupName"]
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
