"""Chunks between a primary memory and a real node: right bytes, or a miss."""

from types import SimpleNamespace

import pytest
import torch
from cluster_kit import SECRET
from service_kit import LONG_S, at_rest, service

from tiered_kv import keys
from tiered_kv.attachment import Attachment
from tiered_kv.errors import Unreachable
from tiered_kv.integrations.vllm import secondary_shelf
from tiered_kv.integrations.vllm.secondary_layout import Placed, in_prefix_order
from tiered_kv.integrations.vllm.secondary_shelf import Shelf
from tiered_kv.layout import KVLayout
from tiered_kv.types import Absent, Held

ROW = 64 << 10
ROWS = 16
LAYOUT = KVLayout(
    "kit", "uint8", layers=1, kv_heads=1, head_dim=ROW // 32, block_tokens=32, planes=1, engine="x"
)


class Way:
    """`link.NodeLink` without Ray: an attachment to a node of this process."""

    def __init__(self, link):
        self.node = Attachment(link, LONG_S)
        self.call, self.introduce = self.node.call, self.node.introduce
        self.forget_pool, self.settle = self.node.lost, self.node.settle

    def wait(self, seconds):
        return True

    def give_back(self, reservation):
        self.node.give_back(reservation, now=True)


def chunk(i, group=0):
    return bytes([i]) * 32 + group.to_bytes(4, "big")


def placed(*numbers):
    return [Placed(chunk(i), i % ROWS * ROW) for i in numbers]


def named(*numbers):
    return keys.from_engine(LAYOUT, SECRET, [chunk(i) for i in numbers])


@pytest.fixture
def one():
    with service(gpu=False) as made:
        way = Way(made.to_host)
        memory = torch.zeros(ROWS * ROW, dtype=torch.uint8)
        for i in range(ROWS):
            memory[i * ROW : (i + 1) * ROW] = torch.arange(ROW) % 251 + i
        shelf = Shelf(way, LAYOUT, made.config.service, memory, wait_s=LONG_S)
        yield SimpleNamespace(
            shelf=shelf, memory=memory, before=memory.clone(), way=way, made=made,
            pool=lambda: way.introduce(LAYOUT).tensor,
        )  # fmt: skip
        if made.host.runner is not None:
            at_rest(made.host)
        shelf.close()
        way.node.close()


def store(one, *numbers, parents=None):
    return one.shelf.store(placed(*numbers), parents or [None] * len(numbers))


def load(one, promise, *numbers):
    try:
        return one.shelf.load(promise.lease, placed(*numbers))
    finally:
        one.shelf.release(promise.lease)


def test_what_was_stored_is_found_leased_and_loaded_byte_for_byte(one):
    assert store(one, 0, 1, 2) == 3
    one.memory.zero_()
    promise = one.shelf.find([chunk(i) for i in range(4)], holes=False)
    assert promise.keys == [chunk(0), chunk(1), chunk(2)]
    assert load(one, promise, 2, 0) == {chunk(0), chunk(2)}
    assert torch.equal(one.memory[:ROW], one.before[:ROW])
    assert torch.equal(one.memory[2 * ROW : 3 * ROW], one.before[2 * ROW : 3 * ROW])
    assert not one.memory[ROW : 2 * ROW].any()


def test_nothing_is_promised_where_nothing_is_held(one):
    assert one.shelf.find([chunk(5)], holes=False) is None
    assert one.shelf.find([chunk(5)], holes=True) is None


def test_only_leading_chunks_are_found_unless_holes_are_allowed(one):
    store(one, 0, 2)
    asked = [chunk(i) for i in range(3)]
    leading, all_of_them = one.shelf.find(asked, holes=False), one.shelf.find(asked, holes=True)
    assert (leading.keys, all_of_them.keys) == ([chunk(0)], [chunk(0), chunk(2)])
    one.shelf.release(leading.lease)
    assert load(one, all_of_them, 0, 2) == {chunk(0), chunk(2)}


def test_what_the_node_holds_is_not_copied_again(one):
    store(one, 0, 1)
    one.memory.zero_()
    assert store(one, 0, 1, 2) == 3
    one.memory.fill_(7)
    promise = one.shelf.find([chunk(0)], holes=False)
    load(one, promise, 0)
    assert torch.equal(one.memory[:ROW], one.before[:ROW])


def test_long_stores_are_made_in_parts(one, monkeypatch):
    monkeypatch.setattr(secondary_shelf, "STORE_BYTES", 2 * ROW)
    one.made.to_host.verbs.clear()
    assert store(one, 0, 1, 2, 3, 4) == 5
    assert one.made.to_host.verbs.count("reserve") == 3
    one.shelf.release(one.shelf.find([chunk(i) for i in range(5)], holes=False).lease)


def test_a_wrong_byte_is_a_miss_and_its_copy_is_not_handed_out_again(one):
    store(one, 0, 1)
    promise = one.shelf.find([chunk(0), chunk(1)], holes=False)
    one.pool()[promise.lease.lease.slots[1] + 5] += 1
    assert load(one, promise, 0, 1) == {chunk(0)}
    again = one.shelf.find([chunk(0), chunk(1)], holes=False)
    assert again.keys == [chunk(0)]
    one.shelf.release(again.lease)


def test_a_slot_that_was_given_away_during_the_copy_is_a_miss(one):
    store(one, 0, 1)
    promise = one.shelf.find([chunk(0), chunk(1)], holes=False)
    lease = promise.lease.lease
    stale = promise.lease._replace(
        lease=type(lease)(
            lease.id, lease.keys, lease.slots, lease.nbytes, lease.expires_s,
            (lease.generations[0] - 2, lease.generations[1]),
        )
    )  # fmt: skip
    assert one.shelf.load(stale, placed(0, 1)) == {chunk(1)}
    one.shelf.release(promise.lease)
    status = one.way.call("status")
    assert status["misses"]["lapsed"] == 1


def test_a_child_of_a_held_chunk_keeps_it_from_leaving_alone(one):
    store(one, 0)
    store(one, 1, parents=[chunk(0)])
    assert one.way.call("forget", named(0)) == 0  # others descend from it
    assert [type(a) for a in one.way.call("lookup", named(0, 1))] == [Held, Held]
    assert one.way.call("forget", named(0, 1)) == 2


def test_a_parent_that_the_node_never_had_is_not_named_to_it(one):
    assert store(one, 1, parents=[chunk(0)]) == 1


def test_a_parent_that_left_costs_one_store_and_is_then_not_named_any_more(one):
    store(one, 0)
    one.way.call("forget", named(0))
    assert store(one, 1, parents=[chunk(0)]) == 0
    assert store(one, 2, parents=[chunk(0)]) == 1


def test_a_node_that_restarts_is_asked_again_in_its_new_life(one):
    store(one, 0)
    one.made.host.stop()
    one.made.host.start()
    assert store(one, 1) == 1
    promise = one.shelf.find([chunk(1)], holes=False)
    assert load(one, promise, 1) == {chunk(1)}


def test_a_promise_of_a_life_that_has_ended_still_gives_right_bytes_and_ends_quietly(one):
    store(one, 0)
    promise = one.shelf.find([chunk(0)], holes=False)
    one.made.host.stop()
    one.made.host.start()
    one.memory.zero_()
    if load(one, promise, 0):
        assert torch.equal(one.memory[:ROW], one.before[:ROW])


def test_without_a_node_everything_is_a_miss_and_nothing_raises(one):
    store(one, 0)
    promise = one.shelf.find([chunk(0)], holes=False)
    one.made.host.stop(flush=False)
    assert one.shelf.find([chunk(0)], holes=False) is None
    assert one.shelf.find([chunk(0)], holes=True) is None
    assert store(one, 1) == 0
    one.shelf.release(promise.lease)


def test_a_commit_that_does_not_arrive_leaves_nothing_reserved(one):
    def lose(args):
        raise Unreachable("lost")

    one.made.to_host.before["commit"] = lose
    assert store(one, 0) == 0
    del one.made.to_host.before["commit"]
    assert [type(a) for a in one.way.call("lookup", named(0))] == [Absent]
    assert store(one, 1) == 1


def test_a_copy_that_fails_gives_its_reservation_back(one, monkeypatch):
    def fail(self, pieces):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(secondary_shelf.HostCopier, "copy_hashed", fail)
        with pytest.raises(ZeroDivisionError):
            store(one, 0)
    assert [type(a) for a in one.way.call("lookup", named(0))] == [Absent]
    assert store(one, 0) == 1


def test_chunks_are_ordered_heads_first_group_by_group_and_know_what_precedes_them():
    positions = {chunk(i, g): 32 * (i + 1) for g in (0, 1) for i in range(4)}
    mixed = [Placed(chunk(i, g), 0) for i, g in ((3, 1), (2, 0), (1, 0), (0, 0), (9, 0))]
    ordered, parents = in_prefix_order(mixed, positions)
    assert [c.key for c in ordered] == [
        chunk(9), chunk(0), chunk(1), chunk(2), chunk(3, 1),
    ]  # fmt: skip
    assert parents == [None, None, chunk(0), chunk(1), chunk(2, 1)]
