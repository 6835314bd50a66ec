"""A node whose event loop stands still: it says so, and nothing else waits for it."""

import os
import signal

import pytest
import ray
from cluster_kit import CALL_S, Engine, host_whose_loop_hangs, in_namespace, only_member, until

from tiered_kv.actors.launch import down, ensure
from tiered_kv.connecting import Cluster
from tiered_kv.errors import Unreachable

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def hanging(cluster, service_folders):
    """A second service beside the module's, and the file that stops its loop."""
    root, _ = service_folders
    config = in_namespace(cluster.config, "kv-hang", root / "hang-test" / "nvme")
    ensure(config, build=host_whose_loop_hangs)
    hang = root / "hang-test" / "hang"
    yield Cluster(config, owned=False), hang
    hang.unlink(missing_ok=True)
    down(config)


def test_a_loop_that_hangs_is_found_by_ping_named_in_status_and_placed_around(hanging):
    cluster, hang = hanging
    member = only_member(cluster)
    link = cluster.link(member)
    engine = Engine(link)
    engine.save("before", 3)
    pid = link.call("about", timeout_s=CALL_S)["pid"]
    hang.touch()

    def problem():
        try:
            link.call("ping", timeout_s=CALL_S)
        except Unreachable as error:
            return str(error)
        return ""

    assert "the node's loop has not answered for 5" in until(problem, "ping finds it")
    assert link.call("about", timeout_s=CALL_S)["pid"] == pid  # the actor itself does answer
    assert "did not answer status" in cluster.status()["nodes"][member.actor]["problem"]
    with pytest.raises(Unreachable):
        link.call("lookup", [], timeout_s=1.0)
    until(lambda: cluster.members() == [], "the directory gives the silent node up")
    with pytest.raises(Unreachable, match="no node has announced itself"):
        cluster._link("coordinator").call("place", "new", timeout_s=CALL_S)
    hang.unlink()
    assert until(lambda: cluster.members(), "it is back")[0].incarnation == member.incarnation
    until(lambda: cluster.place("before").kept, "with its sessions")
    assert engine.wake("before").blocks == 3
    assert link.call("about", timeout_s=CALL_S)["pid"] == pid
    engine.close()


def test_an_actor_that_is_stopped_is_unreachable_and_goes_on_when_continued(hanging):
    cluster, _ = hanging
    member = only_member(cluster)
    link = cluster.link(member)
    pid = link.call("about", timeout_s=CALL_S)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unreachable, match="did not answer ping in 1 s"):
            link.call("ping", timeout_s=1.0)
        assert ray.is_initialized()
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: link.call("ping", timeout_s=CALL_S) == member.node_id, "it answers again")
