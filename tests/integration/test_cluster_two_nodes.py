"""Two Ray nodes on one machine: an actor and a folder each, and a session has one place."""

from collections.abc import Iterator

import pytest
import ray
from cluster_kit import Engine, config_in, environment, folders, node_status, until
from ray.cluster_utils import Cluster as RayCluster

from tiered_kv.actors import fleet
from tiered_kv.actors.launch import down, ensure
from tiered_kv.connecting import Cluster
from tiered_kv.errors import BadInput

pytestmark = pytest.mark.timeout(400)
STORE = 80 << 20


@pytest.fixture
def two() -> Iterator[tuple[RayCluster, object]]:
    with folders() as (root, shm), environment(root):
        made = RayCluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": STORE,
                "include_dashboard": False,
            },
        )
        try:
            ray.init(address=made.address, log_to_driver=False, configure_logging=False)
            yield made, config_in(root, shm)
        finally:
            ray.shutdown()
            made.shutdown()


def test_two_ray_nodes_on_one_host_get_an_actor_and_a_folder_each(two):
    made, config = two
    ensure(config)
    one = Cluster(config, owned=False)
    assert node_status(one)["actor"]["share"] == 0
    second = made.add_node(num_cpus=1, object_store_memory=STORE, resources={"tiered_kv": 1})
    ensure(config)  # a node that joined later gets its actors
    rows = one.status()["nodes"]
    assert sorted(row["actor"]["share"] for row in rows.values()) == [0, 1]
    assert (config.nvme_folder / "LOCK").exists()
    assert (config.nvme_folder / "peer-1" / "LOCK").exists()
    members = {member.actor: member for member in one.members()}
    assert len({m.node_id for m in members.values()}) == 2
    assert {m.host for m in members.values()} == {one.host}  # one kernel, one /dev/shm

    engines = {name: Engine(one.link(member)) for name, member in members.items()}
    for name, engine in engines.items():
        engine.save(f"on-{name}", 6, durable=True)
    for name in engines:
        until(lambda: one.place(f"on-{name}").kept, "the session is announced")  # noqa: B023
        assert one.place(f"on-{name}").member.actor == name
        assert engines[name].wake(f"on-{name}").blocks == 6
    spread = {one.place(f"new-{i}").member.actor for i in range(4)}
    assert spread == set(members)

    gone = f"node-{second.node_id}"
    made.remove_node(second, allow_graceful=False)
    until(lambda: len(one.members()) == 1, "silence is noticed")
    (left,) = one.members()
    assert left.actor != gone
    moved = one.place(f"on-{gone}")
    assert moved.member.actor == left.actor
    assert engines[left.actor].wake(f"on-{left.actor}").blocks == 6
    for engine in engines.values():
        engine.close()
    with pytest.raises(BadInput):
        one.link(left, "hbm", index=7)
    down(config)
    assert not [name for name in fleet.named(config.service.namespace) if name == left.actor]
