"""Loads from a real node: right bytes or pages that are reported, whatever the node does."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from connector_kit import GROUP, N_PAGES, PAGE, Rig, hashes_of, rig
from service_kit import LAYOUT, LONG_S, Service, inside, service, until

from tiered_kv.errors import BadInput, Unreachable
from tiered_kv.integrations.vllm import loading
from tiered_kv.integrations.vllm.plans import Load, Store
from tiered_kv.integrations.vllm.requests import cut, spans
from tiered_kv.types import Lease
from tiered_kv.wire import Found

SOURCE = [3, 4, 5, 6, 20, 21, 22, 23, 40, 41]
TARGET = [50, 8, 9, 10, 30, 31, 12, 13, 1, 0]
HASHES = hashes_of("a", len(SOURCE))


@pytest.fixture
def node() -> Iterator[Service]:
    with service(gpu=False) as one:
        yield one


class Filled:
    """What an engine has saved: two blocks and a tail of two pages."""

    def __init__(self, node: Service) -> None:
        with rig(node, seed="one") as one:
            self.bytes = one.bytes_of(SOURCE)
            self.store = one.save("a", HASHES, SOURCE)


@pytest.fixture
def filled(node: Service) -> Filled:
    return Filled(node)


def found(one: Rig, skip: int = 0) -> Found:
    """What the node says to the scheduler, with its leases."""
    one.link.introduce(LAYOUT)
    answer: Found = one.link.call("find", one.names.asks(HASHES), skip, 1, None, None, LONG_S)
    return answer


def leased(one: Rig, store: Store, skip: int = 0, **more: Any) -> Load:
    """A load whose blocks are leased, as the scheduler makes it."""
    answer = found(one, skip)
    parts = spans(TARGET, 0, GROUP)[skip:]
    keys = (store.keys[0][skip:],)
    return Load("a", parts, keys, answer.leases, answer.checksums, **more)


def pages_of(load: Load) -> set[int]:
    return {page for span in load.spans for page in span.pages}


def untouched(one: Rig, pages: list[int], value: int = 0) -> bool:
    return all(set(data) == {value} for data in one.bytes_of(pages))


# -- right bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("piece_blocks", [1, 2, 64])
def test_fetched_blocks_are_what_was_saved(
    node: Service, filled: Filled, piece_blocks: int
) -> None:
    with rig(node, piece_blocks=piece_blocks) as one:
        assert one.loaded(one.load("a", filled.store, TARGET)) == set()
        assert one.bytes_of(TARGET) == filled.bytes
        assert untouched(one, [page for page in range(N_PAGES) if page not in TARGET])


def test_leased_blocks_are_copied_without_asking_for_them_again(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        load = leased(one, filled.store)
        node.to_host.verbs.clear()
        assert one.loaded(load) == set()
        assert one.bytes_of(TARGET) == filled.bytes
        until(lambda: node.to_host.verbs == ["release"], "the lease ended")
        one.told()
        assert one.counts["load.blocks"] == 3


def test_what_the_lease_does_not_cover_is_fetched(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        load = leased(one, filled.store)
        part = replace(
            load, leases=(cut(load.leases[0], 0, 1),), checksums=(load.checksums[0][:1],)
        )
        assert one.loaded(part) == set()
        assert one.bytes_of(TARGET) == filled.bytes
        assert "fetch" in node.to_host.verbs


def test_part_of_a_first_block_is_loaded_into_its_own_pages(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        answer = found(one, 0)
        parts = spans(TARGET[2:], 2, GROUP)
        load = Load("a", parts, filled.store.keys, answer.leases, answer.checksums)
        assert one.loaded(load) == set()
        assert one.bytes_of(TARGET[2:]) == filled.bytes[2:]
        assert untouched(one, TARGET[:2])


def test_blocks_come_from_below_after_a_restart(node: Service, filled: Filled) -> None:
    node.host.stop(flush=True)
    node.host.start()
    with rig(node) as one:
        load = leased(one, filled.store)
        assert load.leases[0].keys == ()  # all of it on NVMe
        assert one.loaded(load) == set()
        assert one.bytes_of(TARGET) == filled.bytes


def test_loads_of_several_requests_go_on_side_by_side(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        loads = [
            one.load(f"r{i}", filled.store, list(range(10 * i, 10 * i + 10))) for i in range(6)
        ]
        for load in loads:
            one.loader.submit(load)
        ended: set[str] = set()

        def all_ended() -> bool:
            ended.update(one.loader.arrived())
            return len(ended) == len(loads)

        until(all_ended, "the end of all loads")
        assert one.loader.failed() == set()
        for i in range(6):
            assert one.bytes_of(range(10 * i, 10 * i + 10)) == filled.bytes


# -- what is not there ----------------------------------------------------------------------


def test_a_missing_block_fails_its_pages_and_those_behind_it(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        keys = filled.store.keys[0]
        other = (keys[0], keys[1][::-1], keys[2])
        load = replace(one.load("a", filled.store, TARGET), keys=(other,))
        assert one.loaded(load) == set(TARGET[GROUP:])
        assert one.bytes_of(TARGET[:GROUP]) == filled.bytes[:GROUP]
        one.told()
        assert one.counts["load.miss.absent"] == 2
        assert one.counts["load.failed"] == 2


@pytest.mark.parametrize("verb", ["hello", "fetch"])
@pytest.mark.parametrize("error", [Unreachable, BadInput, RuntimeError])
def test_whatever_a_call_raises_the_pages_are_reported(
    node: Service, filled: Filled, verb: str, error: type[Exception]
) -> None:
    def fail(args: object) -> None:
        raise error("for a test")

    with rig(node) as one:
        node.to_host.before[verb] = fail
        assert one.loaded(one.load("a", filled.store, TARGET)) == set(TARGET)
        del node.to_host.before[verb]
        assert one.loaded(one.load("b", filled.store, TARGET)) == set()
        assert one.bytes_of(TARGET) == filled.bytes


def test_without_a_node_a_load_fails_at_once(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        one.link.up = False
        assert one.loaded(one.load("a", filled.store, TARGET)) == set(TARGET)


def test_a_release_that_fails_or_hangs_holds_nothing_up(node: Service, filled: Filled) -> None:
    gate = threading.Event()
    node.to_host.before["release"] = lambda args: gate.wait(LONG_S)
    with rig(node) as one:
        load = leased(one, filled.store)
        assert one.loaded(load) == set()  # although the call still hangs
        assert one.bytes_of(TARGET) == filled.bytes
        gate.set()


def test_pages_of_a_node_that_hangs_come_back_and_are_never_written_later(
    node: Service, filled: Filled
) -> None:
    gate, came = threading.Event(), threading.Event()
    node.to_host.before["fetch"] = lambda args: (came.set(), gate.wait(LONG_S))
    with rig(node, deadline_s=0.02) as one:
        load = one.load("a", filled.store, TARGET)
        one.loader.submit(load)
        assert came.wait(LONG_S)
        until(lambda: one.loader.arrived() == {"a"}, "the load given up")
        assert one.loader.failed() == set(TARGET)
        one.wipe(TARGET, 9)  # computed by now
        gate.set()
        until(lambda: one.told() is not None and "load.failed" in one.counts, "the thread's end")
        assert untouched(one, TARGET, 9)
        assert one.counts["load.late"] == 1


def test_a_copy_that_runs_is_not_given_up(node: Service, filled: Filled) -> None:
    with rig(node, deadline_s=0.02) as one:
        load = leased(one, filled.store)
        one.copying.gate.clear()
        one.loader.submit(load)
        if not one.copying.came.wait(1.0):  # it came too late to begin
            pytest.skip("the machine was too busy for a deadline this short")
        for _ in range(3):
            assert one.loader.arrived() == set()
        one.copying.gate.set()
        until(lambda: one.loader.arrived() == {"a"}, "the end of the load")
        assert one.loader.failed() == set()
        assert one.bytes_of(TARGET) == filled.bytes


def test_closing_waits_for_copies_and_leaves_calls_to_themselves(
    node: Service, filled: Filled
) -> None:
    gate, came = threading.Event(), threading.Event()
    node.to_host.before["fetch"] = lambda args: (came.set(), gate.wait(LONG_S))
    with rig(node) as one:
        one.loader.submit(one.load("a", filled.store, TARGET))
        assert came.wait(LONG_S)
        one.loader.close()
        one.wipe(TARGET, 9)
        gate.set()
        until(lambda: one.told() is not None and "load.failed" in one.counts, "the thread's end")
        assert untouched(one, TARGET, 9)


# -- wrong bytes ----------------------------------------------------------------------------


def move_on(node: Service, lease: Lease) -> None:
    """The slots of a lease were given to another block: their generations have moved on."""

    def move(one: Any) -> None:
        one.parts.pool.generations.open(lease.slots)
        one.parts.pool.generations.publish(lease.slots)

    inside(node.host.runner, move)


def test_blocks_whose_lease_ended_during_the_copy_are_reported(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        load = leased(one, filled.store)
        one.copying.copied = lambda: move_on(node, load.leases[0])
        assert one.loaded(load) == set(TARGET)
        one.told()
        assert one.counts["load.lapsed"] == 3
        assert "load.blocks" not in one.counts


def corrupt(one: Rig, lease: Lease, index: int) -> None:
    mapped = one.link.introduce(LAYOUT)
    mapped.tensor[lease.slots[index] + 5000] ^= 0xFF


def told_of_distrust(node: Service) -> threading.Event:
    told = threading.Event()
    node.to_host.after["distrust"] = lambda answer: told.set()
    return told


def test_a_corrupt_block_of_a_lease_is_reported_and_never_given_out_again(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        distrusted = told_of_distrust(node)
        load = leased(one, filled.store)
        corrupt(one, load.leases[0], 1)
        assert one.loaded(load) >= set(TARGET[GROUP : 2 * GROUP])
        assert distrusted.wait(LONG_S)
        one.told()
        assert one.counts["load.corrupt"] == 1
        answer = found(one)
        assert answer.blocks == 1
        one.link.call("release", answer.leases[0].id)
        again = one.load("b", filled.store, TARGET)
        assert one.loaded(again) == set(TARGET[GROUP:])


def test_a_corrupt_block_that_was_fetched_is_reported(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        lease = found(one).leases[0]
        corrupt(one, lease, 0)
        assert one.loaded(one.load("a", filled.store, TARGET)) == set(TARGET)
        one.link.call("release", lease.id)


def test_a_corrupt_block_comes_from_below_where_it_is_intact(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        assert one.link.call("persist", list(filled.store.keys[0])) == 3
        distrusted = told_of_distrust(node)
        load = leased(one, filled.store)
        corrupt(one, load.leases[0], 0)
        assert one.loaded(load) == set(TARGET)
        assert distrusted.wait(LONG_S)
        assert one.loaded(one.load("b", filled.store, TARGET)) == set()
        assert one.bytes_of(TARGET) == filled.bytes


def test_a_slot_that_another_block_got_is_no_fault_of_the_first(
    node: Service, filled: Filled
) -> None:
    """Its bytes do not match either, but what is held elsewhere of it is good."""
    with rig(node) as one:
        load = leased(one, filled.store)

        def given_away() -> None:
            move_on(node, load.leases[0])
            corrupt(one, load.leases[0], 0)

        one.copying.copied = given_away
        assert one.loaded(load) == set(TARGET)
        one.told()
        assert "load.corrupt" not in one.counts
        assert "distrust" not in node.to_host.verbs


def test_nothing_is_compared_where_nothing_shall_be(node: Service, filled: Filled) -> None:
    with rig(node, verify=0.0) as one:
        load = leased(one, filled.store)
        corrupt(one, load.leases[0], 0)
        assert one.loaded(load) == set()
        assert one.bytes_of(TARGET) != filled.bytes


# -- restarts -------------------------------------------------------------------------------


def test_a_lease_of_an_earlier_life_gives_right_bytes_or_none(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        load = leased(one, filled.store)
        node.host.stop(flush=True)
        node.host.start()
        failed = one.loaded(load)
        for page, wanted in zip(TARGET, filled.bytes, strict=True):
            assert page in failed or one.bytes_of([page]) == [wanted]
        for attempt in range(3):  # the first call after a restart tells that it was one
            failed = one.loaded(one.load(f"b{attempt}", filled.store, TARGET))
        assert failed == set()
        assert one.bytes_of(TARGET) == filled.bytes


def test_a_lease_of_a_new_life_is_read_from_the_new_pool(node: Service, filled: Filled) -> None:
    """The scheduler, another process, has found out about the restart before the worker."""
    with rig(node) as worker, rig(node, seed="other") as scheduler:
        assert worker.loaded(leased(worker, filled.store)) == set()
        node.host.stop(flush=True)
        node.host.start()
        assert scheduler.loaded(scheduler.load("x", filled.store, SOURCE)) == set()
        answer = found(scheduler)
        assert len(answer.leases[0].keys) == 3
        worker.wipe(TARGET)
        load = Load(
            "b", spans(TARGET, 0, GROUP), filled.store.keys, answer.leases, answer.checksums
        )
        assert worker.loaded(load) == set()
        assert worker.bytes_of(TARGET) == filled.bytes
        assert worker.link.forgotten == 1


# -- by layers ------------------------------------------------------------------------------


def test_layers_are_there_when_the_engine_has_waited_for_them(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        load = leased(one, filled.store, by_layer=True)
        one.loader.submit(load)
        width = LAYOUT.payload_bytes // GROUP // LAYOUT.layers
        for i, layer in enumerate(one.caches):
            one.loader.wait_layer(layer)
            found_now = [bytes(one.caches[layer][page].numpy().data) for page in TARGET]
            assert found_now == [data[i * width : (i + 1) * width] for data in filled.bytes]
        one.loader.wait_layer("a layer without a cache")
        assert one.loader.arrived() == set()  # the engine was not told of a load
        assert one.loader.failed() == set()
        one.loader.wait_layer("layers.0.attn")  # a step later there is nothing to wait for


def test_a_load_by_layers_that_fails_reports_its_pages_in_the_same_step(
    node: Service, filled: Filled
) -> None:
    with rig(node) as one:
        load = leased(one, filled.store, by_layer=True)
        corrupt(one, load.leases[0], 0)
        one.loader.submit(load)
        for layer in one.caches:
            one.loader.wait_layer(layer)
        assert one.loader.failed() == set(TARGET)
        assert one.loader.failed() == set()


def test_a_load_by_layers_that_cannot_begin_does_not_hold_the_engine_up(
    node: Service, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LAYERS_WAIT_S", 0.01)
    gate = threading.Event()
    with rig(node) as scheduler, rig(node) as one:
        load = leased(scheduler, filled.store, by_layer=True)
        node.to_host.before["hello"] = lambda args: gate.wait(LONG_S)
        one.loader.submit(load)
        for layer in one.caches:
            one.loader.wait_layer(layer)
        assert one.loader.failed() == set(TARGET)
        one.wipe(TARGET, 9)
        gate.set()
        until(lambda: one.told() is not None and "load.failed" in one.counts, "the thread's end")
        assert untouched(one, TARGET, 9)


# -- what is measured -----------------------------------------------------------------------


def test_copied_bytes_and_seconds_are_told_once(node: Service, filled: Filled) -> None:
    with rig(node) as one:
        assert one.loaded(leased(one, filled.store)) == set()
        told = one.tally.take()
        assert told is not None
        assert told.loaded_bytes == len(TARGET) * PAGE * LAYOUT.token_bytes
        assert told.load_s > 0
        until(lambda: node.to_host.verbs[-1] == "release", "the lease ended")
        both = told.aggregate(told)
        assert both.loaded_bytes == 2 * told.loaded_bytes
        assert both.counts == {name: 2 * n for name, n in told.counts.items()}
