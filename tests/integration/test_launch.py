"""Starting, joining and stopping a service: idempotent, one set, verified effects, clear lines."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from cluster_kit import (
    CALL_S,
    Engine,
    config_in,
    gpu_status,
    in_namespace,
    node_status,
    until,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tiered_kv import connecting
from tiered_kv.actors import fleet
from tiered_kv.actors.launch import Down, down, ensure, up
from tiered_kv.connecting import Cluster
from tiered_kv.errors import BadInput, DoesNotFit, FolderInUse, Unreachable
from tiered_kv.raylink import RayLink
from tiered_kv.sizes import Size
from tiered_kv.types import Medium

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def root(service_folders):
    return service_folders[0]


@pytest.fixture
def other(cluster, root):
    """A configuration for a second service beside the module's; its actors end with the test."""
    config = in_namespace(cluster.config, "kv-other", root / "other")
    yield config
    down(config)
    assert fleet.named("kv-other") == []


def pids(cluster):
    return node_status(cluster)["process"]["pid"], gpu_status(cluster)["process"]["pid"]


def test_up_again_changes_nothing(cluster):
    before, said = pids(cluster), []
    again = up(cluster.config, say=said.append)
    assert pids(cluster) == before
    assert [m.node_id for m in again.members] == [node_status(cluster)["node_id"]]
    assert (again.embedded, again.notes, again.skipped) == (False, (), ())
    assert sorted(line.split("-")[0].split(":")[0] for line in said) == [
        "coordinator",
        "gpu",
        "node",
    ]


def test_up_with_another_size_says_what_runs_instead(cluster):
    wanted = replace(cluster.config, dram=replace(cluster.config.dram, bytes=Size(32 << 20)))
    (note,) = up(wanted).notes
    assert note.endswith("runs with dram.bytes = 16MiB, not 32MiB")


def test_two_up_at_once_end_with_one_set(other):
    with ThreadPoolExecutor(4) as pool:
        ups = [future.result() for future in [pool.submit(ensure, other) for _ in range(4)]]
    assert len({one.members[0].incarnation for one in ups}) == 1
    assert [name.split("-")[0] for name in fleet.named("kv-other")] == [
        "coordinator",
        "gpu",
        "node",
    ]


def test_up_says_what_it_waits_for(other):
    said = []
    ensure(other, say=said.append)
    assert any(line.endswith(": up") for line in said)
    assert any("starting" in line for line in said)


def test_a_folder_of_another_service_is_refused_in_one_line_and_nothing_stays(cluster, other):
    mine = replace(other, nvme=cluster.config.nvme)
    with pytest.raises(FolderInUse) as caught:
        ensure(mine)
    pid = node_status(cluster)["process"]["pid"]
    text = str(caught.value)
    assert "\n" not in text
    assert f"folder {cluster.config.nvme_folder} is locked by a live service (pid {pid}," in text
    assert not [name for name in fleet.named("kv-other") if name.startswith("node-")]
    assert ensure(other).members  # with a folder of its own it starts


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(other):
    huge = replace(other, dram=replace(other.dram, bytes=Size(1 << 45)))
    with pytest.raises(DoesNotFit, match=r"needs \d+ bytes, but .* has \d+ free"):
        ensure(huge)
    assert not [name for name in fleet.named("kv-other") if name.startswith("node-")]


def test_a_node_that_cannot_start_shows_in_status_with_its_reason(cluster, other):
    node = fleet.ray_nodes()
    fleet.start(replace(other, nvme=cluster.config.nvme), node)
    one = Cluster(other, owned=False)
    until(
        lambda: "FolderInUse" in one.status()["nodes"][node[0].actor].get("problem", ""),
        "the reason is in the status",
    )
    assert "\n" not in one.status()["nodes"][node[0].actor]["problem"]


def test_down_writes_what_only_memory_holds_and_up_finds_it_again(other):
    ensure(other)
    one = Cluster(other, owned=False)
    engine = Engine(one.link(one.place("kept"), Medium.HBM))
    engine.save("kept", 10)
    engine.close()
    before = node_status(one)["node_id"], node_status(one)["incarnation"]
    done = down(other)
    assert isinstance(done, Down)
    assert [name.split("-")[0] for name in done.stopped] == ["gpu", "node", "coordinator"]
    assert done.killed == ()
    assert done.flushed_blocks >= 1
    assert fleet.named("kv-other") == []
    ensure(other)
    engine = Engine(Cluster(other, owned=False).link_for("kept"))
    assert engine.wake("kept").blocks == 10
    engine.close()
    one = Cluster(other, owned=False)
    assert (node_status(one)["node_id"], node_status(one)["incarnation"]) == (
        before[0],
        before[1] + 1,
    )


def test_a_link_finds_the_new_actor_of_its_name_after_one_unreachable_call(other):
    member = ensure(other).members[0]
    link = Cluster(other, owned=False).link(member)
    assert link.call("ping", timeout_s=CALL_S) == member.node_id
    down(other)
    with pytest.raises(Unreachable) as caught:
        link.call("ping", timeout_s=CALL_S)
    assert "\n" not in str(caught.value)
    assert "ActorDiedError" in str(caught.value)
    with pytest.raises(Unreachable, match="no actor 'node-"):
        link.call("ping", timeout_s=CALL_S)
    ensure(other)
    assert link.call("ping", timeout_s=CALL_S) == member.node_id


def test_down_without_a_service_stops_nothing(cluster):
    nobody = in_namespace(cluster.config, "kv-nobody", cluster.config.nvme_folder)
    assert down(nobody) == Down((), 0, ())


def test_connect_without_a_service_says_so_and_starts_none(cluster):
    nobody = in_namespace(cluster.config, "kv-nobody", cluster.config.nvme_folder)
    with pytest.raises(Unreachable, match="no service runs in Ray namespace 'kv-nobody'"):
        connecting.connect(nobody, embedded=False)
    assert fleet.named("kv-nobody") == []


def test_connect_starts_a_service_where_ray_runs_and_leaves_it_running(other):
    one = connecting.connect(other)
    one.close()
    assert "coordinator" in fleet.named("kv-other")
    assert connecting.connect(other, embedded=False).members() == one.members()


def test_a_service_outlives_the_placement_group_of_who_started_it(other):
    group = ray.util.placement_group([{"CPU": 0.1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    starting = ray.remote(num_cpus=0.1)(ensure).options(scheduling_strategy=inside)
    ray.get(starting.remote(other), timeout=120)
    before = about_all(other)
    ray.util.remove_placement_group(group)
    until(lambda: ray.util.placement_group_table(group)["state"] == "REMOVED", "removed")
    assert about_all(other) == before


def about_all(config):
    """Pids of the coordinator and of all nodes."""
    links = [RayLink(name, config.service.namespace) for name in fleet.named("kv-other")]
    return [link.call("status", timeout_s=CALL_S).get("pid") for link in links]


def test_without_hbm_there_are_no_gpu_actors(other):
    engines_own_it = replace(other, hbm=replace(other.hbm, bytes=Size(0)))
    [member] = up(engines_own_it).members
    assert member.gpus == ()
    assert [name.split("-")[0] for name in fleet.named("kv-other")] == ["coordinator", "node"]
    with connecting.connect(engines_own_it) as joined:
        assert joined.link_for("s").actor == member.actor


def test_embedded_inside_a_joined_cluster_is_a_contradiction(cluster):
    with pytest.raises(BadInput, match="this process has joined a cluster already"):
        connecting.connect(cluster.config, embedded=True)
    with pytest.raises(BadInput, match="not both"):
        connecting.connect(cluster.config, dram={"bytes": "1GiB"})


def test_who_joins_takes_the_services_folders_and_keeps_its_own_secret_and_deadlines(
    cluster, service_folders
):
    root, shm = service_folders
    mine = config_in(root / "elsewhere", shm / "elsewhere", wake_deadline_s=3.0)
    joined = connecting.connect(
        replace(mine, service=replace(mine.service, tenant_secret="mine")), embedded=False
    )
    assert joined.config.nvme_folder == root / "nvme"
    assert joined.config.shm_folder == shm
    assert joined.config.service.tenant_secret == "mine"
    assert joined.config.service.wake_deadline_s == 3.0


def test_no_actor_knows_a_tenants_secret(cluster):
    (member,) = cluster.members()
    link = cluster.link(member)
    assert link.call("about", timeout_s=CALL_S)["config"]["service"]["tenant_secret"] == "***"
    theirs = cluster._link("coordinator").call("config", timeout_s=CALL_S)
    assert theirs.service.tenant_secret == "-"


def test_a_session_is_found_by_every_process_that_asks(cluster, engine):
    engine.save("announced", 2)
    stranger = Cluster(cluster.config, owned=False)
    until(lambda: stranger.place("announced").kept, "the session is announced")
    link = stranger.link_for("announced")
    assert link is stranger.link_for("announced")
    assert link.actor.startswith("gpu-")


def test_status_names_every_actor(cluster):
    status = cluster.status()
    assert status["coordinator"]["members"] == 1
    assert [row["node_id"] for row in status["nodes"].values()] == [cluster.members()[0].node_id]
    assert len(cluster.nodes()) == 2
