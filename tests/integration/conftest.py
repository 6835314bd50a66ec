"""One embedded Ray cluster a module: starting it takes longer than most tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import Engine, config_in, embedded, folders, only_member

from tiered_kv.connecting import Cluster
from tiered_kv.types import Medium


@pytest.fixture(scope="module")
def service_folders() -> Iterator[tuple[Path, Path]]:
    """Disk and shared memory of the module's service."""
    with folders() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(service_folders: tuple[Path, Path]) -> Iterator[Cluster]:
    """A service of one node and one GPU stand-in; nothing of it may be left afterwards."""
    root, shm = service_folders
    with embedded(config_in(root, shm), root) as joined:
        yield joined


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Engine]:
    """An engine on the node's DRAM pool."""
    member = only_member(cluster)
    one = Engine(cluster.link(member))
    yield one
    one.close()


@pytest.fixture
def gpu_engine(cluster: Cluster) -> Iterator[Engine]:
    """An engine on the GPU stand-in's pool."""
    member = only_member(cluster)
    one = Engine(cluster.link(member, Medium.HBM))
    yield one
    one.close()
