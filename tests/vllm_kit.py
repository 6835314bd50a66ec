"""An engine with our connector beside a service, in the test's own process, seen from inside."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from cluster_kit import SECRET, embedded, folders, node_status, only_member, until
from engine_kit import connector, engine

from tiered_kv.config import Config
from tiered_kv.connecting import Cluster
from tiered_kv.integrations.vllm import connector as connector_module
from tiered_kv.settings import load

NAMESPACE = "kv-test"
JOIN_S = 60.0
LONG_S = 60.0


@dataclass
class Service:
    """A service in an embedded Ray cluster of this process."""

    config: Config
    cluster: Cluster

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        link = self.cluster.link(only_member(self.cluster))
        return link.call(verb, *args, timeout_s=LONG_S, **kwargs)

    def counts(self) -> Counter[str]:
        return Counter(self.call("status")["counts"])

    def pid(self) -> int:
        return int(node_status(self.cluster)["actor"]["pid"])

    def options(self, **extra: Any) -> dict[str, Any]:
        """`kv_transfer_config` of an engine that joins it, in this process or another."""
        extra.setdefault("address", ray.get_runtime_context().gcs_address)
        extra = {"lookup_wait_s": 30.0, "save_wait_s": 30.0} | extra  # a busy machine is no miss
        service = {"namespace": NAMESPACE, "tenant_secret": SECRET.decode()}
        return connector(service=service | extra.pop("service", {}), **extra)


def config_for_engines(root: Path, shm: Path, **sections: Any) -> Config:
    """DRAM 64 MiB, NVMe 256 MiB: blocks of the tiny model have 192 KiB (256 tokens)."""
    base: dict[str, dict[str, Any]] = {
        "hbm": {"bytes": "4MiB", "device": "cpu"},
        "dram": {"bytes": "64MiB", "folder": str(shm)},
        "nvme": {
            "bytes": "256MiB", "folder": str(root / "nvme"), "free_floor_bytes": "1MiB",
            "engine": "threads",
        },
        "service": {"namespace": NAMESPACE, "tenant_secret": SECRET.decode()},
    }  # fmt: skip
    for name, section in sections.items():
        base[name] |= section
    return load(overrides=base, environ={})


@contextmanager
def running(**sections: Any) -> Iterator[Service]:
    """A service, started and stopped."""
    with folders() as (root, shm):
        config = config_for_engines(root, shm, **sections)
        with embedded(config, root) as cluster:
            yield Service(config, cluster)


class Inside:
    """What a test asks of an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.scheduling = self.connector._scheduling
        [self.worker] = connector_module._WORKERS.values()

    @property
    def loader(self) -> Any:
        return self.worker._loader

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.scheduling.counts)

    def joined(self) -> "Inside":
        until(lambda: self.connector._link.up, "the engine joins the node", JOIN_S)
        return self

    def settle(self) -> None:
        """Step until nothing is saved any longer: nobody steps an engine in process otherwise."""
        end = time.monotonic() + LONG_S
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
            assert time.monotonic() < end, "the engine still holds pages"
        until(lambda: not self.worker._saver._open or self._step(), "saves end")

    def forget(self) -> None:
        """Drop the engine's own prefix cache."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def _step(self) -> bool:
        self.worker.finished()
        return not self.worker._saver._open


@contextmanager
def connected(model: Path, service: Service, **more: Any) -> Iterator[tuple[Any, Inside]]:
    """An engine that has joined the service. `extra` are options of the connector."""
    extra = more.pop("extra", {})
    with engine(model, service.options(**extra), **more) as llm:
        yield llm, Inside(llm).joined()
