"""kill -9 of every process of a service: misses and clear errors, never a wrong byte."""

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from cluster_kit import (
    CALL_S,
    Engine,
    gpu_status,
    node_status,
    only_member,
    until,
)

from tiered_kv.actors.shell import COORDINATOR
from tiered_kv.connecting import Cluster
from tiered_kv.errors import StaleHandle, UnknownSession, Unreachable
from tiered_kv.types import Medium, Refused

pytestmark = pytest.mark.timeout(400)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def settled(of, former):
    """The status of an actor once a process other than `former` answers."""

    def answer():
        status = of()
        return status if status.get("process", {}).get("pid", former) != former else None

    return until(answer, "Ray restarts the actor")


@dataclass
class Load:
    """An engine that saves and wakes until it is stopped, and counts what happened to it."""

    engine: Engine
    prefix: str
    blocks: int = 8
    happened: Counter = field(default_factory=Counter)
    saved: dict = field(default_factory=dict)
    wrong: list = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        turn = 0
        while not self._end.is_set():
            session = f"{self.prefix}-{turn % 6}"
            try:
                answer = self.engine.save(session, self.blocks, durable=turn % 3 == 0)
                self.happened["refused" if isinstance(answer, Refused) else "saved"] += 1
                if not isinstance(answer, Refused) and answer.durable == self.blocks:
                    self.saved[session] = self.blocks
                got = self.engine.wake(session)
                self.happened["blocks"] += got.blocks
                self.happened["missed"] += got.missed
            except (Unreachable, StaleHandle, UnknownSession) as error:
                self.happened[type(error).__name__] += 1
                time.sleep(0.05)
            except AssertionError as error:
                self.wrong.append(str(error))
            turn += 1

    def more(self, what, n):
        """Wait until `n` more of these have happened."""
        goal = self.happened[what] + n
        until(lambda: self.happened[what] >= goal, f"{n} more {what}")

    def stop(self):
        self._end.set()
        self._thread.join()
        assert self.wrong == []


def test_a_killed_node_actor_comes_back_warm_and_its_gpu_joins_it_again(
    cluster, engine, gpu_engine
):
    engine.save("warm", 20, durable=True)
    gpu_engine.save("above", 10, durable=True)
    before = node_status(cluster)
    kill(before["process"]["pid"])
    after = settled(lambda: node_status(cluster), before["process"]["pid"])
    assert after["node_id"] == before["node_id"]
    assert after["incarnation"] > before["incarnation"]
    with pytest.raises((Unreachable, StaleHandle)):
        engine.call("abort", before["incarnation"] << 40 | 1)  # a handle of the former life
    engine.detach()
    got = engine.wake("warm")
    assert (got.blocks, got.missed) == (20, 0)
    assert set(got.found) == {Medium.NVME}
    assert gpu_engine.wake("above").blocks == 10  # what was in HBM still is
    until(lambda: gpu_engine.save("joined-again", 5, durable=True).durable == 5, "the GPU rejoins")
    assert engine.wake("joined-again").blocks == 5


def test_killing_the_node_actor_under_load_never_gives_a_wrong_byte(cluster):
    member = only_member(cluster)
    below = Load(Engine(cluster.link(member)), "below")
    above = Load(Engine(cluster.link(member, Medium.HBM)), "above")
    try:
        for _ in range(2):
            below.more("blocks", 40)
            above.more("blocks", 40)
            pid = node_status(cluster)["process"]["pid"]
            kill(pid)
            settled(lambda: node_status(cluster), pid)
        below.more("blocks", 40)
        above.more("blocks", 40)
    finally:
        below.stop()
        above.stop()
    assert below.happened["Unreachable"] + below.happened["StaleHandle"] >= 1
    for load in (below, above):
        for session, blocks in load.saved.items():
            assert load.engine.wake(session).blocks == blocks
        load.engine.close()


def test_slots_that_an_engine_reserved_in_a_former_life_hurt_nobody(cluster, engine):
    welcome = engine.attach()
    pid = node_status(cluster)["process"]["pid"]
    kill(pid)
    settled(lambda: node_status(cluster), pid)
    with pytest.raises((StaleHandle, Unreachable)):
        engine.call("commit", welcome.incarnation << 40 | 1, [], 0)
    engine.detach()
    assert engine.attach().incarnation > welcome.incarnation
    assert engine.save("after", 3).blocks == 3
    assert engine.wake("after").blocks == 3


def test_a_killed_gpu_actor_comes_back_empty_and_fills_from_its_host(cluster, gpu_engine):
    gpu_engine.save("beneath", 12, durable=True)
    former = gpu_status(cluster)
    kill(former["process"]["pid"])
    after = settled(lambda: gpu_status(cluster), former["process"]["pid"])
    assert after["tiers"][0]["blocks"] == 0
    with pytest.raises((Unreachable, StaleHandle)):
        gpu_engine.call("abort", former["incarnation"] << 40 | 1)
    gpu_engine.detach()
    got = gpu_engine.wake("beneath")
    assert (got.blocks, got.missed) == (12, 0)
    assert Medium.HBM not in got.found
    until(
        lambda: (
            list(cluster.config.shm_folder.glob("gpu*.arena"))
            == [cluster.config.shm_folder / f"{after['node_id']}-{after['incarnation']}.arena"]
        ),
        "the dead actor's memory is given back",
    )


def test_killing_the_gpu_actor_under_load_never_gives_a_wrong_byte(cluster):
    member = only_member(cluster)
    load = Load(Engine(cluster.link(member, Medium.HBM)), "gpu-load")
    try:
        for _ in range(2):
            load.more("blocks", 40)
            pid = gpu_status(cluster)["process"]["pid"]
            kill(pid)
            settled(lambda: gpu_status(cluster), pid)
        load.more("blocks", 40)
    finally:
        load.stop()
    assert load.happened["Unreachable"] + load.happened["StaleHandle"] >= 1
    load.engine.close()


def test_without_the_coordinator_known_sessions_go_on_and_it_is_rebuilt(cluster, engine):
    engine.save("known", 4)
    cluster.place("known")
    coordinator = cluster.status()["coordinator"]
    os.kill(coordinator["pid"], signal.SIGSTOP)  # away, but not yet replaced
    try:
        began = time.monotonic()
        placed = cluster.place("known")
        assert (placed.kept, time.monotonic() - began < CALL_S) == (True, True)
        assert cluster.place("never-seen").member == placed.member
        one = Engine(cluster.link(placed))
        assert one.wake("known").blocks == 4
        assert one.save("meanwhile", 4).blocks == 4
        assert [m.node_id for m in cluster.members()] == [placed.member.node_id]
        one.close()
    finally:
        kill(coordinator["pid"])
    until(
        lambda: (
            cluster.status()["coordinator"].get("pid", coordinator["pid"]) != coordinator["pid"]
        ),
        "the coordinator is restarted",
    )
    stranger = Cluster(cluster.config, owned=False)

    def rebuilt():
        link = stranger._link(COORDINATOR)
        try:
            return all(
                link.call("where", session, timeout_s=CALL_S) for session in ("known", "meanwhile")
            )
        except Unreachable:
            return False

    until(rebuilt, "nodes have announced themselves and their sessions")
    until(lambda: stranger.members()[0].gpus, "and so have GPU actors")
