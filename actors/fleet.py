"""Which actors a service has, under which names and options, and how each is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tiered_kv.actors.coordinator import Coordinator
from tiered_kv.actors.gpu import GpuActor
from tiered_kv.actors.node import NodeActor
from tiered_kv.actors.shell import COORDINATOR, Build
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.joining import RESOURCE
from tiered_kv.raylink import RayLink

LITTLE = 0.001
ABOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """An alive node of the Ray cluster."""

    id: str
    hostname: str
    resources: Mapping[str, float]

    @property
    def actor(self) -> str:
        """Ray name of its node actor."""
        return f"node-{self.id}"

    @property
    def usable(self) -> bool:
        """Whether it can take an actor that costs a little: a head without CPUs cannot."""
        return self.resources.get(RESOURCE, 0) > 0 or self.resources.get("CPU", 0) > 0

    @property
    def gpus(self) -> list[str]:
        """Ray names of its GPU actors: one a GPU, or one CPU stand-in."""
        return [f"gpu-{self.id}-{i}" for i in range(max(1, int(self.resources.get("GPU", 0))))]

    def gpus_with(self, config: Config) -> list[str]:
        """`gpus`, or none where engines keep the GPUs' memory to themselves."""
        return self.gpus if config.hbm.bytes else []


def ray_nodes() -> list[RayNode]:
    """All alive nodes in a stable order. One call to the GCS."""
    found = [
        RayNode(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.id)


def named(namespace: str) -> list[str]:
    """Names of all actors of the service that are alive or restarting."""
    return sorted(
        str(actor["name"])
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace
        and (actor["name"] == COORDINATOR or actor["name"].startswith(("node-", "gpu-")))
    )


def start(config: Config, nodes: Sequence[RayNode], build: Build | None = None) -> None:
    """Start what is not there yet: the coordinator, and a node and its GPU actors on each node.

    Returns before they are up. Two callers at once get one set: Ray creates a name once.
    """
    # Actors need no tenant's secret: keys are made where tokens are known.
    bare = replace(config, service=replace(config.service, tenant_secret="-"))
    common: dict[str, Any] = {
        "namespace": config.service.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        # Said, because whoever starts the service may run in a placement group that captures its
        # children, as Serve's replicas do: the service would end with it.
        "scheduling_strategy": "DEFAULT",
    }
    Coordinator.options(name=COORDINATOR, **common).remote(bare)
    shares = _shares(nodes, config.service.namespace)
    for node in nodes:
        here = common | {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}
        NodeActor.options(name=node.actor, **here | _little(node)).remote(
            bare, node.actor, shares[node.id], build
        )
        for index, name in enumerate(node.gpus_with(config)):
            options, own = _gpu(bare, node, index)
            GpuActor.options(name=name, **here | options).remote(own, name, node.actor, index)


def _little(node: RayNode) -> dict[str, Any]:
    if node.resources.get(RESOURCE, 0) > 0:
        return {"resources": {RESOURCE: LITTLE}}
    return {"num_cpus": LITTLE}


def _gpu(config: Config, node: RayNode, index: int) -> tuple[dict[str, Any], Config]:
    """Ray options and configuration of GPU actor `index`.

    Ray packs fractions: the second actor that asks for a twentieth of a GPU would get the same
    GPU as the first. So each sees all GPUs of its node and takes the one of its index; what Ray
    accounts for is the sum.
    """
    if not node.resources.get("GPU", 0):
        hbm = replace(config.hbm, device="cpu")
        return {"num_gpus": 0}, replace(config, hbm=hbm)
    see_all = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    options = {"num_gpus": config.service.gpu_fraction, "runtime_env": {"env_vars": see_all}}
    if config.hbm.device in ("auto", "cuda"):
        config = replace(config, hbm=replace(config.hbm, device=f"cuda:{index}"))
    return options, config


def _shares(nodes: Sequence[RayNode], namespace: str) -> dict[str, int]:
    """A number a Ray node, unique on its host; who runs already keeps its own (`node.with_share`).

    Two `up` at once agree, since both go by the same order.
    """
    running = set(named(namespace))
    shares: dict[str, int] = {}
    for node in nodes:
        if node.actor in running:
            try:
                about = RayLink(node.actor, namespace).call("about", timeout_s=ABOUT_S)
            except TieredKVError:
                continue  # restarting: get_if_exists keeps what it was started with
            shares[node.id] = about["share"]
    for node in nodes:
        if node.id not in shares:
            taken = {shares.get(n.id) for n in nodes if n.hostname == node.hostname}
            shares[node.id] = next(i for i in range(len(nodes) + 1) if i not in taken)
    return shares
