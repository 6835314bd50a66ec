"""Node and GPU actors behind `RayLink`: errors, groups, cost, other processes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from cluster_kit import (
    CALL_S,
    LAYOUT,
    SECRET,
    Counting,
    Engine,
    gpu_status,
    host_whose_disk_waits,
    in_namespace,
    node_status,
    only_member,
    tokens_of,
    until,
)
from other_process import Child

from tiered_kv import keys
from tiered_kv.actors import fleet
from tiered_kv.actors.launch import down, ensure
from tiered_kv.actors.shell import GROUPS
from tiered_kv.errors import BadInput, BadLayout, UnknownSession, Unreachable
from tiered_kv.raylink import RayLink, group_of
from tiered_kv.runner import VERBS
from tiered_kv.types import Medium

pytestmark = pytest.mark.timeout(400)
TESTS = Path(__file__).parents[1]


def one_line(error):
    text = str(error)
    return "\n" not in text and 0 < len(text) < 300


def test_what_was_saved_wakes_with_the_same_bytes(engine):
    engine.save("bytes", 9)
    got = engine.wake("bytes")
    assert (got.blocks, got.missed) == (9, 0)


def test_an_error_of_ours_crosses_the_boundary_as_itself_in_one_line(engine):
    with pytest.raises(BadLayout) as caught:
        engine.call("reserve", b"0" * 16, [], engine.owner)
    assert one_line(caught.value)
    assert "30303030303030303030303030303030" in str(caught.value)
    assert isinstance(caught.value, BadInput)
    with pytest.raises(UnknownSession) as unknown:
        engine.call("session", "never-saved")
    assert str(unknown.value) == "no session 'never-saved' is held here"


def test_who_asks_the_actor_without_a_link_catches_our_classes_too(cluster):
    member = only_member(cluster)
    handle = ray.get_actor(member.actor, cluster.config.service.namespace)
    with pytest.raises(UnknownSession):
        ray.get(handle.control.remote("session", ("never-saved",), {}))
    with pytest.raises(BadInput, match="not one of"):
        ray.get(handle.control.remote("sesion", (), {}))


def test_a_verb_that_is_none_is_refused_with_the_known_ones(engine):
    for verb in ("reserv", "_flush_sessions", "__init__"):
        with pytest.raises(BadInput, match=rf"'{verb}' is not one of abort, "):
            engine.call(verb)


def test_a_defect_in_a_call_is_raised_as_what_it_is(engine):
    with pytest.raises(TypeError):
        engine.call("lookup", 1, 2, 3)
    assert engine.call("ping")


def test_an_actor_that_does_not_exist_is_unreachable_in_one_line(cluster):
    with pytest.raises(Unreachable) as caught:
        RayLink("node-nobody", "kv-test").call("ping", timeout_s=CALL_S)
    assert str(caught.value) == "no actor 'node-nobody' runs in Ray namespace 'kv-test'"


def test_ping_comes_from_the_nodes_own_loop(cluster, engine, gpu_engine):
    member = only_member(cluster)
    assert engine.call("ping") == member.node_id
    assert gpu_engine.call("ping") == gpu_engine.attach().node_id


def test_every_verb_of_a_node_has_a_group_that_its_actor_offers():
    assert {group_of(verb) for verb in VERBS} == set(GROUPS)


@pytest.mark.parametrize("pool", ["engine", "gpu_engine"])
def test_a_session_costs_the_same_number_of_calls_whatever_its_length(request, pool):
    one = request.getfixturevalue(pool)
    one.attach()
    counting = Counting(one.link)
    one.link = counting
    costs = []
    for blocks in (2, 60):
        counting.verbs.clear()
        one.save(f"cost-{pool}-{blocks}", blocks)
        assert one.wake(f"cost-{pool}-{blocks}").blocks == blocks
        costs.append(list(counting.verbs))
    assert costs == [["reserve", "commit", "wake", "release"]] * 2


def test_what_a_gpu_holds_reaches_its_host_and_the_hosts_disk(cluster, engine, gpu_engine):
    done = gpu_engine.save("through-all", 20, durable=True)
    assert done.durable == 20
    assert engine.wake("through-all").blocks == 20
    moves = {(m["from"], m["to"]): m["blocks"] for m in gpu_status(cluster)["moves"]}
    assert moves["hbm", "host"] >= 20
    assert node_status(cluster)["sessions"]["recent"] >= 1


def test_a_reservation_whose_caller_did_not_wait_is_given_back(cluster, engine):
    engine.attach()
    run = keys.chain(LAYOUT, SECRET, tokens_of("impatient", 12)).keys
    for _ in range(5):
        with pytest.raises(Unreachable, match="did not answer reserve in 0 s"):
            engine.link.call("reserve", LAYOUT.fingerprint, run, engine.owner, timeout_s=0.0)

    until(
        lambda: node_status(cluster)["pending"]["reservations"] == 0,
        "reservations that nobody waits for are aborted",
    )
    assert engine.save("impatient", 12).blocks == 12


def test_a_link_serves_many_threads(engine):
    engine.attach()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: engine.call("ping"), range(200)))
    assert set(answers) == {engine.welcome.node_id}


def test_an_engine_process_that_joins_by_address_wakes_what_another_saved(cluster, engine):
    engine.save("shared", 5)
    script = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from cluster_kit import Engine
from tiered_kv import connecting
from tiered_kv.settings import load
config = load(overrides={{"service": {{"namespace": "kv-test"}}}}, environ={{}})
cluster = connecting.connect(config, address=sys.argv[1], embedded=False)
engine = Engine(cluster.link(cluster.place("shared")))
print(cluster.place("shared").kept, engine.wake("shared").blocks, flush=True)
engine.close()
cluster.close()
"""
    with Child(script, ray.get_runtime_context().gcs_address) as child:
        assert child.word() == "True 5"
    assert engine.call("ping")  # leaving it did not end the service


def test_an_operator_is_answered_while_more_wakes_wait_than_the_group_takes(
    cluster, service_folders
):
    root, _ = service_folders
    config = in_namespace(cluster.config, "kv-slow", root / "slow" / "nvme")
    pause = root / "slow" / "pause"
    ensure(config, build=host_whose_disk_waits)
    link = RayLink(f"node-{ray.get_runtime_context().get_node_id()}", "kv-slow")
    engine = Engine(link)
    try:
        for i in range(6):  # more than DRAM takes: the first are on disk alone by then
            engine.save(f"cold-{i}", 60, durable=True)
        pause.touch()
        handle = ray.get_actor(link.actor, "kv-slow")
        args = ("cold-0", LAYOUT.fingerprint, None, 60.0)
        wakes = [handle.io.remote("wake", args, {}) for _ in range(GROUPS["io"] + 50)]
        until(lambda: engine.call("status")["sessions"]["active"] == 1, "wakes are waiting")
        rows = engine.call("list_sessions")
        assert {row["id"] for row in rows} == {f"cold-{i}" for i in range(6)}
        assert engine.call("ping")
        assert len(engine.call("lookup", [])) == 0
        assert ray.wait(wakes, timeout=0)[0] == []
        pause.unlink()
        for fetched in ray.get(wakes, timeout=CALL_S * 3):
            assert len(fetched.lease.keys) == 60
            handle.control.remote("release", (fetched.lease.id,), {})
    finally:
        pause.unlink(missing_ok=True)
        engine.close()
        down(config)
    assert fleet.named("kv-slow") == []


def test_a_call_that_was_given_up_leaves_nothing_behind(cluster, engine):
    def leases():
        return node_status(cluster)["pending"]["leases"]

    engine.save("given-up", 3)
    until(lambda: leases() == 0, "no lease is open")
    for _ in range(8):
        with pytest.raises(Unreachable, match="did not answer wake in 0 s"):
            engine.link.call("wake", "given-up", LAYOUT.fingerprint, 0.2, timeout_s=0.0)
    until(lambda: leases() == 0, "leases of calls that nobody waited for lapse")


def test_gpu_status_says_that_no_gpu_is_used(cluster):
    assert "no GPU is used" in gpu_status(cluster)["pool"]
    member = only_member(cluster)
    assert cluster.link(member, Medium.HBM).actor == member.gpus[0]
    with pytest.raises(BadInput, match=r"has no hbm 1; it has dram and hbm 0\.\.0"):
        cluster.link(member, Medium.HBM, index=1)
