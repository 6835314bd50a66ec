"""The secondary tier in a real engine above a real service: what one stored, others load."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path

import pytest
import ray
from cluster_kit import LAYOUT, SECRET, config_in, embedded, folders, until
from engine_kit import PAGE, engine, generate, prompt

from tiered_kv.attachment import Attachment
from tiered_kv.connecting import Cluster
from tiered_kv.errors import Unreachable
from tiered_kv.integrations.vllm.secondary_shelf import Shelf

NAMESPACE = "kv-secondary"
CHUNKS = 8
PROMPT = prompt(7, CHUNKS * PAGE + 5)
LONG_S = 30.0
JOINED_S = 20.0  # a lookup on busy cores; none waits that long where the service answers


def tiering(namespace: str = NAMESPACE, **tier):
    """vLLM's own tiering with our tier below it; copies between engine and CPU tier by the CPU."""
    ours = {
        "type": "TieredKVTier",
        "module_path": "tiered_kv.integrations.vllm.secondary",
        "service": {"namespace": namespace, "tenant_secret": SECRET.decode()},
        "lookup_wait_s": JOINED_S,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tiered_kv.bench.peers.vllm_tiers",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [ours | tier],
        },
    }


@dataclass
class Service:
    cluster: Cluster

    def link(self):
        return self.cluster.link(until(self.cluster.members, "a node is there")[0])

    def status(self):
        return self.link().call("status", timeout_s=LONG_S)

    @property
    def hits(self) -> int:
        return self.status()["hits"]

    @property
    def stores(self) -> int:
        return self.status()["counts"].get("stores", 0)

    def at_rest(self) -> bool:
        return not any(self.status()["pending"].values())

    def kill(self) -> None:
        """kill -9 the node's actor, and wait until another life of it answers."""
        link = self.link()
        pid = link.call("about", timeout_s=LONG_S)["pid"]
        os.kill(pid, signal.SIGKILL)

        def reborn() -> bool:
            try:
                link.call("ping", timeout_s=LONG_S)
                return link.call("about", timeout_s=LONG_S)["pid"] != pid
            except Unreachable:
                return False

        until(reborn, "the node is restarted")

    def zero(self) -> None:
        """Overwrite every block in the node's pool, behind its back."""
        until(self.at_rest, "nothing moves")
        node = Attachment(self.link(), LONG_S)
        node.introduce(LAYOUT).tensor.zero_()
        node.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    ensure_running()  # it stays as long as this process does, and is none of the cluster's
    with folders() as (root, shm):
        config = config_in(root, shm, namespace=NAMESPACE)
        with embedded(config, root) as cluster:
            yield Service(cluster)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    """The tokens of an engine that keeps nothing."""
    with engine(tiny_model) as llm:
        [tokens] = generate(llm, [PROMPT])
    return tokens


def forget(llm) -> None:
    """The engine's own caches, on the device and in CPU memory, lose everything."""
    assert llm.reset_prefix_cache(reset_connector=True)


@pytest.fixture
def stored(service, tiny_model, expected):
    """An engine, whose prompt the node holds and itself no longer."""
    with engine(tiny_model, tiering()) as llm:
        assert generate(llm, [PROMPT]) == [expected]
        until(lambda: service.stores >= CHUNKS, "the prompt is stored")
        forget(llm)
        yield llm
    until(service.at_rest, "nothing is leased when the engine has gone")


def test_another_engine_process_hits_what_the_first_one_stored(
    service, stored, tiny_model, expected, monkeypatch
):
    hits, stores = service.hits, service.stores
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    where = ray.get_runtime_context().gcs_address
    with engine(tiny_model, tiering(address=where)) as second:
        assert generate(second, [PROMPT]) == [expected]
        assert service.hits == hits + CHUNKS
        assert service.stores == stores


def test_a_longer_prompt_hits_its_beginning_and_stores_the_rest(service, stored, expected):
    hits, stores = service.hits, service.stores
    longer = PROMPT + prompt(8, 2 * PAGE)
    [first] = generate(stored, [longer])
    assert service.hits == hits + CHUNKS
    until(lambda: service.stores >= stores + 2, "the rest is stored")
    forget(stored)
    assert generate(stored, [longer, PROMPT]) == [first, expected]
    assert service.hits >= hits + 2 * CHUNKS + 2


def test_the_bytes_that_are_loaded_are_the_bytes_that_are_used(
    service, stored, expected, monkeypatch
):
    """The control of the next test: zeroed blocks that nobody checks change the answer."""
    load = Shelf.load

    def unchecked(self, loan, chunks):
        return load(self, loan._replace(checksums=(None,) * len(loan.checksums)), chunks)

    monkeypatch.setattr(Shelf, "load", unchecked)
    service.zero()
    assert generate(stored, [PROMPT]) != [expected]


def test_corrupted_blocks_are_computed_again_and_not_handed_out_twice(service, stored, expected):
    service.zero()
    hits = service.hits
    assert generate(stored, [PROMPT]) == [expected]
    assert service.hits == hits + CHUNKS  # they were promised, and failed
    forget(stored)
    assert generate(stored, [PROMPT]) == [expected]


def test_a_node_that_is_killed_during_a_load_changes_no_token_and_is_joined_again(
    service, stored, expected, monkeypatch
):
    loads = []
    load = Shelf.load

    def killed(self, loan, chunks):
        loads.append(len(chunks))
        if len(loads) == 1:
            service.kill()
        return load(self, loan, chunks)

    monkeypatch.setattr(Shelf, "load", killed)
    assert generate(stored, [PROMPT]) == [expected]
    assert loads[0] == CHUNKS
    forget(stored)
    assert generate(stored, [PROMPT]) == [expected]  # whatever the new life still holds
    hits = service.hits

    def hit_again() -> bool:
        forget(stored)
        assert generate(stored, [PROMPT]) == [expected]
        return service.hits >= hits + CHUNKS

    until(hit_again, "the engine has joined the new life, and hits what it stored there")


def test_without_a_service_the_engine_computes_as_if_there_were_no_tier(
    service, tiny_model, expected
):
    with engine(tiny_model, tiering("nobody", lookup_wait_s=0.1)) as llm:
        assert generate(llm, [PROMPT]) == [expected]
        forget(llm)
        assert generate(llm, [PROMPT]) == [expected]


def test_other_weights_never_share_blocks(service, stored, tiny_model):
    hits = service.hits
    with engine(tiny_model, tiering(revision="another")) as llm:
        generate(llm, [PROMPT])
    assert service.hits == hits
