"""Engines and nodes that are killed or stopped at the worst moment, as real processes."""

import contextlib
import itertools
import threading
import time
from collections import Counter

import engine_process
import node_process
import pytest
from cluster_kit import Engine
from other_process import Child
from service_kit import (
    LAYOUT,
    LONG_S,
    SECRET,
    Revived,
    at_rest,
    folders,
    inside,
    pending,
    small,
    until,
)
from socket_link import SocketLink, serving

from tiered_kv import assemble, keys
from tiered_kv.errors import BadLayout, StaleHandle, UnknownSession, Unreachable
from tiered_kv.types import Absent, Medium, Refused

pytestmark = pytest.mark.timeout(240)


class Stage:
    """A host's node in this process, reached over a socket, and an engine here beside it."""

    def __init__(self, config, path):
        self.node = Revived(lambda: assemble.host(config))
        self.path = path
        self.engine = Engine(self.node)
        self.engine.attach()
        self.count = itertools.count()

    def child(self):
        child = Child(engine_process.SCRIPT, self.path)
        word, self.owner = child.word().split()
        assert word == "attached"
        return child

    def press(self, blocks=48):
        """Save new sessions until every slot that may be reused has been."""
        for _ in range(blocks // 8):
            assert not isinstance(self.engine.save(f"press-{next(self.count)}", 8), Refused)

    def lookup(self, name, n):
        from cluster_kit import tokens_of

        run = keys.chain(LAYOUT, SECRET, tokens_of(name, n)).keys
        return self.node.call("lookup", run, timeout_s=LONG_S)

    def status(self):
        return self.node.call("status", timeout_s=LONG_S)


@pytest.fixture
def stage():
    with folders() as (root, shm):
        config = small(root, shm, service={"lease_ttl_s": 0.5, "store_deadline_s": 2.0})
        one = Stage(config, root / "s")
        with serving(one.path, one.node):
            yield one
        at_rest(one.node)
        one.engine.close()
        one.node.stop()
        assert list(shm.glob("*.arena")) == []


def test_a_killed_engines_reservations_end_with_it_and_nothing_was_visible(stage):
    with stage.child() as child:
        child.say("reserve doomed 10")
        assert len(child.word().split()) == 10
        child.say("save kept 3")
        assert child.word() == "3"
        assert stage.status()["pending"]["reservations"] == 1
        child.kill()
        until(lambda: pending(stage.node)["reservations"] == 0, "the owner is proven dead")
    assert stage.lookup("doomed", 10) == [Absent()] * 10
    assert stage.status()["counts"]["reservations.owner_died"] == 1
    assert stage.engine.wake("kept").blocks == 3
    at_rest(stage.node)
    assert stage.engine.save("doomed", 10).blocks == 10  # its slots are anybody's again


def test_a_killed_engines_leases_lapse_and_its_slots_come_back(stage):
    stage.engine.save("read", 6, durable=True)
    with stage.child() as child:
        child.say("slow-wake read 1")
        assert child.word().startswith("half")
        child.kill()
        until(lambda: stage.status()["counts"].get("leases.expired") == 1, "the lease lapses")
    assert pending(stage.node)["leases"] == 0
    stage.press()
    at_rest(stage.node)
    assert stage.engine.wake("read").missed == 0


def test_a_reader_that_was_stopped_past_its_lease_discards_its_copy(stage):
    stage.engine.save("read", 6, durable=True)
    with stage.child() as child:
        child.say("slow-wake read 0.5")
        word, *slots = child.word().split()
        assert (word, len(slots)) == ("half", 6)
        child.stop()
        before = generations(stage, slots)
        until(lambda: pending(stage.node)["leases"] == 0, "the lease lapses")
        until(lambda: not press_until_reused(stage, slots, before), "all its slots are reused")
        child.resume()
        child.say("go")
        verdict, right = child.word().split()
        assert (verdict, right) == ("lapsed", "False")  # and it would have been garbage
        child.say("wake read")
        assert child.word() == "6 0"
    assert stage.status()["misses"]["lapsed"] == 6


def press_until_reused(stage, slots, before):
    """Slots that still carry what they did."""
    stage.press(16)
    return [s for s, g in zip(slots, before, strict=True) if generations(stage, [s])[0] == g]


def generations(stage, slots):
    return stage.node.node.parts.pool.generations.read([int(s) for s in slots])


def test_a_reader_that_was_stopped_within_its_lease_has_the_right_bytes(stage):
    stage.engine.save("read", 6)
    with stage.child() as child:
        child.say("slow-wake read 60")
        assert child.word().startswith("half")
        child.stop()
        stage.press()
        child.resume()
        child.say("go")
        assert child.word() == "intact True"
    inside(stage.node, lambda node: node.hierarchy.due(node._now() + 1e6))


def test_a_stopped_writers_slots_are_given_to_nobody_and_its_commit_works_afterwards(stage):
    with stage.child() as child:
        child.say("slow-save written 6")
        slots = [int(s) for s in child.word().split()]
        assert child.word() == "half"
        child.stop()
        began, odd = time.monotonic(), generations(stage, slots)
        while time.monotonic() - began < 2.0:  # many times the lease, and the owner's check
            stage.press()
            assert generations(stage, slots) == odd
            assert owned(stage) & set(slots) == set()
        assert pending(stage.node)["reservations"] == 1
        child.resume()
        child.say("go")
        assert child.word() == "6"
        child.say("wake written")
        assert child.word() == "6 0"
    assert stage.engine.wake("written").blocks == 6


def owned(stage):
    """Slots of the pool that committed blocks have."""
    return inside(
        stage.node, lambda node: {b.slots[0] for b in node.hierarchy.book.blocks.values()}
    )


def test_a_writer_that_is_killed_while_it_is_stopped_gives_its_slots_back(stage):
    with stage.child() as child:
        child.say("slow-save written 6")
        slots = [int(s) for s in child.word().split()]
        assert child.word() == "half"
        child.stop()
        stage.press(16)
        assert pending(stage.node)["reservations"] == 1
        child.kill()
        until(lambda: pending(stage.node)["reservations"] == 0, "the owner is proven dead")
    assert stage.lookup("written", 6) == [Absent()] * 6
    until(lambda: (stage.press(16), owned(stage) & set(slots))[1], "its slots are used again")


class Load:
    """An engine that saves and wakes until it is told to end, and counts what it saw."""

    def __init__(self, link, prefix):
        self.engine = Engine(link)
        self.prefix = prefix
        self.saw = Counter()
        self.durable = set()
        self.wrong = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        for turn in itertools.count():
            if self._end.is_set():
                return
            name = f"{self.prefix}-{turn % 5}"
            try:
                answer = self.engine.save(name, 4, durable=turn % 2 == 0)
                if not isinstance(answer, Refused) and answer.durable == 4:
                    self.durable.add(name)
                got = self.engine.wake(name)
                self.saw["blocks"] += got.blocks
                self.saw["missed"] += got.missed
            except (Unreachable, StaleHandle, UnknownSession, BadLayout) as error:
                self.saw[type(error).__name__] += 1
                time.sleep(0.02)
            except BaseException as error:
                self.wrong.append(repr(error))
                raise

    def more(self, n):
        goal = self.saw["blocks"] + n
        until(lambda: self.wrong or self.saw["blocks"] >= goal, f"{n} more blocks")

    def end(self):
        self._end.set()
        self._thread.join()
        assert self.wrong == []


def start(root, shm):
    for socket in (root / "n.host", root / "n.gpu"):
        socket.unlink(missing_ok=True)
    child = Child(node_process.SCRIPT, root, shm, root / "n")
    word, incarnation = child.word().split()
    assert word == "up"
    return child, int(incarnation)


def test_a_node_process_that_is_killed_under_load_never_gives_a_wrong_byte():
    with folders() as (root, shm), contextlib.ExitStack() as cleanup:
        child, first = start(root, shm)
        cleanup.enter_context(child)
        loads = [Load(SocketLink(root / f"n.{w}"), w) for w in ("host", "gpu")]
        try:
            for life in range(1, 4):
                for load in loads:
                    load.more(60)
                child.kill()
                child, incarnation = start(root, shm)
                cleanup.enter_context(child)
                assert incarnation == first + life
            for load in loads:
                load.more(60)
        finally:
            for load in loads:
                load.end()
        for load in loads:
            assert load.saw["Unreachable"] + load.saw["StaleHandle"] + load.saw["BadLayout"] >= 1
            assert load.durable
            load.engine.detach()
        child.kill()
        child, _ = start(root, shm)
        cleanup.enter_context(child)
        for load in loads:
            for name in load.durable:
                got = load.engine.wake(name)
                assert (got.blocks, got.missed) == (4, 0), name
                assert Medium.DRAM in got.found or Medium.NVME in got.found
            load.engine.close()
        assert len(list(shm.glob("*.arena"))) == 2  # of the life that runs: DRAM and the stand-in


def test_an_engine_outlives_its_node_and_meets_the_next_one():
    with folders() as (root, shm):
        child, _ = start(root, shm)
        with child:
            engine = Engine(SocketLink(root / "n.host"))
            assert engine.save("before", 4, durable=True).durable == 4
            child.kill()
            with pytest.raises(Unreachable):
                engine.wake("before")
            with pytest.raises(Unreachable):
                engine.save("between", 4)
        child, _ = start(root, shm)
        with child:
            got = engine.wake("before")
            assert (got.blocks, set(got.found)) == (4, {Medium.NVME})
            assert engine.save("after", 4).blocks == 4
            engine.close()
