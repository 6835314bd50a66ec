"""kill -9 of the node actor in every phase of a store and of a demotion.

Whatever the phase: never a wrong byte, never a hang, and a warm restart that finds what had been
written and indexed, and nothing else.
"""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gates
import pytest
from cluster_kit import (
    LAYOUT,
    NBYTES,
    SECRET,
    Engine,
    config_in,
    content,
    environment,
    folders,
    node_status,
    tokens_of,
    until,
    view_of,
)

from tiered_kv import connecting, keys
from tiered_kv.actors.launch import ensure
from tiered_kv.checksum import checksum
from tiered_kv.connecting import Cluster
from tiered_kv.errors import StaleHandle, UnknownSession, Unreachable
from tiered_kv.joining import join
from tiered_kv.types import Medium, Reservation

pytestmark = pytest.mark.timeout(300)
BLOCKS = 12


@dataclass
class Gated:
    """A service whose node actor passes gates, and an engine on it."""

    cluster: Cluster
    engine: Engine

    def kill(self) -> None:
        """kill -9 the node actor, open the gates, wait for the next life."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        gates.open_all(self.cluster.config)
        until(lambda: self._other_than(pid), "Ray restarts the node actor")
        self.engine.detach()

    def arm(self) -> None:
        """Remember whom to kill: a node that waits at a gate may not answer."""
        self.pid = int(node_status(self.cluster)["process"]["pid"])

    def _other_than(self, pid: int) -> bool:
        return node_status(self.cluster).get("process", {}).get("pid", pid) != pid


@pytest.fixture(scope="module")
def service() -> Iterator[Cluster]:
    with folders() as (root, shm), environment(root):
        config = config_in(root, shm)
        gates.folder_of(config).mkdir()
        join(None, True)
        ensure(config, embedded=True, build=gates.host_with_gates)
        cluster = connecting.Cluster(config, owned=True)
        try:
            yield cluster
        finally:
            gates.open_all(config)
            cluster.close()


@pytest.fixture
def gated(service: Cluster) -> Iterator[Gated]:
    (member,) = until(service.members, "the node has announced itself")
    one = Gated(service, Engine(service.link(member)))
    one.engine.save("kept", BLOCKS, durable=True)
    one.arm()
    yield one
    gates.open_all(service.config)
    got = one.engine.wake("kept")  # what was durable before is there after every kill
    assert (got.blocks, got.missed) == (BLOCKS, 0)
    pending = node_status(service)["pending"]
    assert {k: n for k, n in pending.items() if n} == {}
    one.engine.close()


def reserve(engine: Engine, session: str) -> tuple[Reservation, list[Any]]:
    """The first phase of a store, for real."""
    engine.attach()
    chain = keys.chain(LAYOUT, SECRET, tokens_of(session, BLOCKS))
    reserved = engine.call("reserve", LAYOUT.fingerprint, chain.keys, engine.owner)
    assert isinstance(reserved, Reservation)
    assert len(reserved.keys) == BLOCKS
    return reserved, list(zip(reserved.keys, reserved.slots, strict=True))


def found(engine: Engine, session: str) -> int:
    """Blocks of a session that come back right; a session that nobody knows has none."""
    try:
        return engine.wake(session).blocks
    except UnknownSession:
        return 0


def held(engine: Engine, session: str) -> int:
    """Leading blocks that come back right when they are asked for by their keys alone."""
    engine.attach()
    run = keys.chain(LAYOUT, SECRET, tokens_of(session, BLOCKS)).keys
    lease = engine.call("fetch", LAYOUT.fingerprint, run).lease
    for key, slot in zip(lease.keys, lease.slots, strict=True):
        assert bytes(view_of(engine.pool, slot)) == content(key)
    engine.call("release", lease.id)
    return len(lease.keys)


def test_killed_after_reserve_nothing_was_stored(gated: Gated) -> None:
    reserved, _ = reserve(gated.engine, "reserved")
    gated.kill()
    with pytest.raises((StaleHandle, Unreachable)):
        gated.engine.call("commit", reserved.id)
    assert held(gated.engine, "reserved") == 0


def test_killed_while_an_engine_fills_nothing_was_stored(gated: Gated) -> None:
    reserved, places = reserve(gated.engine, "half")
    for key, slot in places[: BLOCKS // 2]:
        view_of(gated.engine.pool, slot)[:] = content(key)
    key, slot = places[BLOCKS // 2]
    view_of(gated.engine.pool, slot)[: NBYTES // 2] = content(key)[: NBYTES // 2]
    gated.kill()
    with pytest.raises((StaleHandle, Unreachable)):
        gated.engine.call("commit", reserved.id)
    assert held(gated.engine, "half") == 0


def test_killed_between_fill_and_commit_nothing_was_stored(gated: Gated) -> None:
    reserved, places = reserve(gated.engine, "filled")
    for key, slot in places:
        view_of(gated.engine.pool, slot)[:] = content(key)
    gated.kill()
    with pytest.raises((StaleHandle, Unreachable)):
        gated.engine.call("commit", reserved.id, [checksum(content(k)) for k, _ in places])
    assert held(gated.engine, "filled") == 0


@pytest.mark.parametrize("phase", ["commit", "session"])
def test_killed_inside_the_commit_the_caller_is_told_and_nothing_is_found(
    gated: Gated, phase: str
) -> None:
    """In memory alone: the next life cannot know of it, and must not pretend to."""
    gates.shut(gated.cluster.config, phase)
    failed = _in_background(lambda: gated.engine.save(phase, BLOCKS))
    until(lambda: gates.reached(gated.cluster.config, phase), f"the node reaches {phase}")
    gated.kill()
    assert isinstance(failed(), StaleHandle | Unreachable)
    assert found(gated.engine, phase) == 0


def test_killed_after_the_commit_what_was_only_in_memory_is_a_miss(gated: Gated) -> None:
    assert gated.engine.save("memory", BLOCKS).blocks == BLOCKS
    gated.kill()
    assert held(gated.engine, "memory") == 0


@pytest.mark.parametrize(
    ("phase", "survives"),
    [("demote-before-data", 0), ("demote-before-rows", 0), ("demote-after-rows", BLOCKS)],
)
def test_killed_inside_a_demotion_exactly_what_was_indexed_is_found(
    gated: Gated, phase: str, survives: int
) -> None:
    gates.shut(gated.cluster.config, phase)
    failed = _in_background(lambda: gated.engine.save(phase, BLOCKS, durable=True))
    until(lambda: gates.reached(gated.cluster.config, phase), f"the node reaches {phase}")
    gated.kill()
    failed()
    assert held(gated.engine, phase) == survives


@pytest.mark.parametrize(
    ("phase", "some_survive"),
    [("demote-before-data", False), ("demote-before-rows", False), ("demote-after-rows", True)],
)
def test_killed_while_the_watermark_makes_blocks_leave_only_indexed_ones_are_found(
    gated: Gated, phase: str, some_survive: bool
) -> None:
    gates.shut(gated.cluster.config, phase)
    names = [f"full-{phase}-{i}" for i in range(20)]  # 240 blocks; DRAM has 256, leaves at 85 %
    saved = _in_background(lambda: [gated.engine.save(name, BLOCKS) for name in names])
    until(lambda: gates.reached(gated.cluster.config, phase), f"the node reaches {phase}")
    gated.kill()
    saved()
    survivors = sum(held(gated.engine, name) for name in names)
    assert (survivors > 0) == some_survive


def test_killed_after_a_durable_save_was_acknowledged_everything_is_found(gated: Gated) -> None:
    saved = gated.engine.save("durable", BLOCKS, durable=True)
    assert saved.durable == BLOCKS
    gated.kill()
    got = gated.engine.wake("durable")
    assert (got.blocks, got.missed, set(got.found)) == (BLOCKS, 0, {Medium.NVME})


def _in_background(call: Any) -> Any:
    """Start a call that will be cut off; the returned function gives its error, or its answer."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except (StaleHandle, Unreachable) as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def outcome() -> Any:
        thread.join()
        return result[0]

    return outcome
