"""`find` on real nodes: hits of all ranks, leases, promotion, load or recompute, torn sets."""

import concurrent.futures
import json
from dataclasses import replace

import pytest
from cluster_kit import Engine
from service_kit import (
    LAYOUT,
    LONG_S,
    SECRET,
    Slow,
    Speaker,
    at_rest,
    content,
    inside,
    pending,
    service,
    tokens,
    until,
)

from tiered_kv import keys, node_weighs, pace
from tiered_kv.checksum import checksum
from tiered_kv.client import Client
from tiered_kv.errors import BadInput, BadLayout, TierBroken
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.types import Absent, Held, Medium, Why
from tiered_kv.wire import NO_LEASE, Ask

STEP, NBYTES = LAYOUT.block_tokens, LAYOUT.block_bytes
RANKS = [replace(LAYOUT, tp_rank=r, tp_size=2) for r in (0, 1)]
DRAM, NVME = Medium.DRAM, Medium.NVME
FAST, SLOW = Prefill(1e-9), Prefill(1.0)
"""Engines that compute at once, and that take a second a token."""


def call(link, verb, *args, **kwargs):
    return link.call(verb, *args, timeout_s=LONG_S, **kwargs)


def chain(name, n, rank=0):
    return tuple(keys.chain(RANKS[rank], SECRET, tokens(name, n * STEP)).keys)


def ask(name, n, rank=0, tails=()):
    return Ask(RANKS[rank].fingerprint, chain(name, n, rank), tails)


def both_ask(name, n):
    return [ask(name, n, 0), ask(name, n, 1)]


class Host:
    """A host's node, and an engine of two ranks that stores blocks whose bytes follow from their
    key."""

    def __init__(self, one):
        self.one, self.link = one, one.to_host
        self.engine = Engine(one.to_host)
        self.engine.attach()
        self.leases = []
        for layout in RANKS:
            call(self.link, "hello", layout)
        self.disk = Slow(one.host.node.parts.nvme)

    def reserve(self, run, rank=0, parents=None):
        return call(self.link, "reserve", RANKS[rank].fingerprint, run, self.engine.owner, parents)

    def commit(self, held):
        sums = []
        for key, slot in zip(held.keys, held.slots, strict=True):
            data = content(key)
            self.bytes(slot)[:] = data
            sums.append(checksum(data))
        call(self.link, "commit", held.id, sums)

    def store(self, run, rank=0, parents=None):
        self.commit(self.reserve(run, rank, parents))

    def sleep(self, run):
        """Only NVMe has these blocks afterwards."""
        assert call(self.link, "persist", run) == len(run)

        def lose(node):
            book = node.hierarchy.book
            for block in reversed(book.live(run)):
                if block.mask & book.top.bit:
                    book.lose(block, book.top)

        inside(self.one.host, lose)

    def bytes(self, slot):
        return memoryview(self.engine.pool.tensor[slot : slot + NBYTES].numpy())

    def find(self, asks, skip=0, new_tokens=STEP, prefill=None, copy=None, **options):
        found = call(self.link, "find", asks, skip, new_tokens, prefill, copy, **options)
        self.leases += [lease.id for lease in found.leases]
        return found

    def read(self, lease):
        """The keys of a lease, each with its own bytes; ends it."""
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            assert bytes(self.bytes(slot)) == content(key)
        assert self.engine.pool.generations.unchanged(lease.slots, lease.generations)
        call(self.link, "release", lease.id)
        return lease.keys

    def fetch(self, run, rank=0, **options):
        return call(self.link, "fetch", RANKS[rank].fingerprint, run, again=True, **options)

    def status(self):
        return call(self.link, "status")

    def answers(self, run):
        return [isinstance(a, Held) for a in call(self.link, "lookup", run)]


@pytest.fixture
def host():
    with service(gpu=False) as one:
        made = Host(one)
        yield made
        made.disk.gate.set()
        for lease in made.leases:
            call(made.link, "release", lease)
        at_rest(one.host)
        made.engine.close()


# -- hits, leases and promotion -------------------------------------------------------------


def test_what_is_in_the_pool_is_leased_with_its_bytes(host):
    host.store(chain("a", 5))
    found = host.find([ask("a", 8)])
    assert (found.blocks, found.tail, found.load) == (5, 0, 5)
    assert found.found == (DRAM,) * 5
    assert host.read(found.leases[0]) == chain("a", 5)
    status = host.status()
    assert (status["hits"], status["misses"]) == (5, {"absent": 3})


def test_nothing_is_found_of_what_nobody_stored(host):
    found = host.find([ask("a", 3)], prefill=SLOW)
    assert (found.blocks, found.tail, found.load, found.found) == (0, 0, 0, ())
    assert found.decision is None
    assert [lease.id for lease in found.leases] == [NO_LEASE]
    call(host.link, "release", NO_LEASE)
    assert pending(host.one.host)["leases"] == 0
    assert host.find([Ask(RANKS[0].fingerprint, ())]).blocks == 0


def test_what_lies_below_is_promoted_without_waiting_and_fetched_in_pieces(host):
    run = chain("a", 12)
    host.store(run)
    host.sleep(run[4:])
    host.disk.gate.clear()
    found = host.find([ask("a", 12)])  # answers although the disk does not
    assert found.found == (DRAM,) * 4 + (NVME,) * 8
    assert found.leases[0].keys == run[:4]
    assert pending(host.one.host)["q"]
    again = host.find([ask("a", 12)])  # it is coming already, from the disk
    assert again.found == found.found
    host.disk.gate.set()
    host.read(found.leases[0])
    host.read(again.leases[0])
    for a, b in ((4, 9), (9, 12)):
        piece = host.fetch(run[a:b])
        assert (piece.missed, piece.why) == (0, None)
        assert host.read(piece.lease) == run[a:b]
    assert host.disk.blocks["read"] == 8


def test_blocks_that_the_engine_has_are_neither_leased_nor_brought(host):
    run = chain("a", 8)
    host.store(run)
    host.sleep(run[2:])
    found = host.find([ask("a", 8)], skip=4)
    assert (found.blocks, found.load, found.found) == (8, 4, (NVME,) * 4)
    piece = host.fetch(run[4:])
    assert host.read(piece.lease) == run[4:]
    assert host.answers(run) == [True] * 8
    assert host.disk.blocks["read"] == 4


def test_what_the_engine_has_counts_as_used(host):
    old, other = chain("old", 8), chain("other", 8)
    host.store(old)
    host.store(other)
    host.read(host.find([ask("old", 8)], skip=8).leases[0])
    first = inside(host.one.host, lambda n: n.hierarchy.book.top.policy.victims(
        8, lambda key: True))  # fmt: skip
    assert set(first) == set(other)


def test_an_engine_that_is_further_than_we_are_gets_nothing(host):
    host.store(chain("a", 3))
    found = host.find([ask("a", 8)], skip=5, prefill=SLOW)
    assert (found.blocks, found.tail, found.load, found.decision) == (3, 0, 0, None)


def test_a_tail_is_found_behind_the_blocks_and_leased_with_them(host):
    run = chain("a", 2)
    names = [tuple(chain(f"t{i}", 3)) for i in range(3)]
    host.store(run)
    host.store(names[2][1:2], parents=[run[1]])
    found = host.find([ask("a", 2, tails=tuple(names))])
    assert (found.blocks, found.tail, found.load) == (2, 2, 3)
    assert host.read(found.leases[0]) == (*run, names[2][1])
    assert host.find([ask("a", 2, tails=tuple(names))], skip=2).load == 1


def test_a_lease_of_a_find_lapses_by_itself(host):
    host.store(chain("a", 2))
    lease = host.find([ask("a", 2)], ttl_s=0.01).leases[0]
    until(lambda: pending(host.one.host)["leases"] == 0, "the lease lapses")
    call(host.link, "release", lease.id)
    assert host.status()["counts"]["leases.late"] == 1


def test_a_find_that_nobody_waits_for_any_more_gives_its_leases_back(host):
    host.store(chain("a", 2))
    runner = host.one.host.runner
    answer = concurrent.futures.Future()
    assert answer.cancel()
    inside(runner, lambda node: runner._begin(answer, "find", ([ask("a", 2)], 0, 0), {}))
    until(lambda: host.status()["hits"] == 2, "it was carried out")
    until(lambda: pending(runner)["leases"] == 0, "they are given back")


def test_a_run_longer_than_the_pool_is_found_and_begins_to_come(host):
    for part in (24, 40):
        host.store(chain("long", part))
        host.sleep(chain("long", part))
    found = host.find([ask("long", 40)])
    assert (found.blocks, found.load, found.found) == (40, 40, (NVME,) * 40)
    piece = host.fetch(chain("long", 40)[:20])
    assert host.read(piece.lease) == chain("long", 40)[:20]


def test_a_disk_that_fails_under_a_find_is_a_miss_of_its_fetch(host):
    run = chain("a", 6)
    host.store(run)
    host.sleep(run[2:])
    host.disk.error = TierBroken("unplugged")
    found = host.find([ask("a", 6)])
    assert found.load == 6
    piece = host.fetch(run[2:], deadline_s=5.0)
    assert (piece.lease.keys, piece.missed, piece.why) == ((), 4, Why.OFFLINE)
    host.read(found.leases[0])
    call(host.link, "release", piece.lease.id)
    inside(host.one.host, lambda node: node.hierarchy.set_online(NVME, False))
    assert host.find([ask("a", 6)]).blocks == 2
    inside(host.one.host, lambda node: node.hierarchy.due(node._now() + 1e6))


def test_a_piece_that_does_not_come_in_time_is_a_miss(host):
    run = chain("a", 4)
    host.store(run)
    host.sleep(run)
    host.disk.gate.clear()
    host.find([ask("a", 4)])
    piece = host.fetch(run[1:3], deadline_s=0.05)
    assert (piece.lease.keys, piece.why) == ((), Why.DEADLINE)
    call(host.link, "release", piece.lease.id)
    host.disk.gate.set()
    assert host.read(host.fetch(run[1:3]).lease) == run[1:3]


# -- ranks ----------------------------------------------------------------------------------


def test_a_hit_is_what_all_ranks_hold_and_the_slowest_tier_of_any(host):
    host.store(chain("a", 4), 0)
    host.store(chain("a", 4, 1), 1)
    host.sleep(chain("a", 4, 1)[2:])
    found = host.find(both_ask("a", 6))
    assert (found.blocks, found.load, found.found) == (4, 4, (DRAM, DRAM, NVME, NVME))
    assert host.read(found.leases[0]) == chain("a", 4)
    assert host.read(found.leases[1]) == chain("a", 4, 1)[:2]


def test_what_only_one_rank_holds_is_dropped_and_counted(host):
    host.store(chain("a", 6), 0)
    host.store(chain("a", 4, 1), 1)
    found = host.find(both_ask("a", 6))
    assert found.blocks == 4
    for lease in found.leases:
        host.read(lease)
    assert host.answers(chain("a", 6)) == [True] * 4 + [False] * 2
    assert host.status()["counts"]["torn"] == 2
    host.store(chain("a", 6), 0)  # both store anew
    host.store(chain("a", 6, 1), 1)
    assert host.find(both_ask("a", 6)).blocks == 6


def test_a_set_that_is_being_stored_is_not_torn(host):
    held = host.reserve(chain("a", 6, 1), 1)
    host.store(chain("a", 6), 0)
    assert host.find(both_ask("a", 6)).blocks == 0
    assert host.answers(chain("a", 6)) == [True] * 6
    host.commit(held)
    found = host.find(both_ask("a", 6))
    assert found.blocks == 6
    for lease in found.leases:
        host.read(lease)
    assert "torn" not in host.status()["counts"]


def test_what_an_offline_tier_hides_tears_no_set(host):
    host.store(chain("a", 4), 0)
    host.store(chain("a", 4, 1), 1)
    host.sleep(chain("a", 4, 1))
    inside(host.one.host, lambda node: node.hierarchy.set_online(NVME, False))
    assert host.find(both_ask("a", 4)).blocks == 0
    assert host.answers(chain("a", 4)) == [True] * 4
    inside(host.one.host, lambda node: node.hierarchy.set_online(NVME, True))
    assert host.find(both_ask("a", 4)).blocks == 4


def test_torn_blocks_from_which_others_descend_stay(host):
    host.store(chain("a", 3), 0)
    host.store([chain("fork", 1)[0]], 0, parents=[chain("a", 2)[1]])
    host.find(both_ask("a", 3))
    assert host.answers(chain("a", 3)) == [True, True, False]
    assert host.status()["counts"]["torn"] == 1


# -- load or recompute ----------------------------------------------------------------------


def test_what_computes_faster_than_it_loads_is_left_below_and_counted(host):
    run = chain("a", 8)
    host.store(run)
    host.sleep(run[3:])
    inside(host.one.host, lambda node: node.mover.paces[NVME].began(node._now()))  # no sample
    found = host.find([ask("a", 8)], prefill=Prefill(1e-7))
    assert (found.blocks, found.load, found.found) == (8, 3, (DRAM,) * 3)
    assert (found.decision.load, found.decision.recompute) == (3, 5)
    assert found.decision.seconds <= found.decision.load_all_s
    host.read(found.leases[0])
    status = host.status()
    assert host.disk.blocks["read"] == 0
    assert status["misses"]["slower"] == 5
    made = status["decisions"]
    assert (made["made"], made["loaded"], made["recomputed"]) == (1, 3, 5)
    assert 0 < made["modelled_s"] <= made["recompute_all_s"]
    assert json.loads(json.dumps(status)) == status


def test_what_loads_faster_than_it_computes_is_loaded(host):
    run = chain("a", 8)
    host.store(run)
    host.sleep(run)
    found = host.find([ask("a", 8)], prefill=SLOW, copy=Link(1e9))
    assert (found.load, found.decision.recompute) == (8, 0)
    host.read(host.fetch(run).lease)
    made = host.status()["decisions"]
    assert made["reads"] == 1
    assert made["read_modelled_s"] > 0
    assert made["read_s"] > 0


def test_a_last_leg_that_is_slow_makes_recomputing_cheaper(host):
    host.store(chain("a", 8))
    assert host.find([ask("a", 8)], prefill=Prefill(1e-4)).load == 8
    assert host.find([ask("a", 8)], prefill=Prefill(1e-4), copy=Link(1e3)).load == 0


def test_a_leg_that_decisions_avoid_is_still_measured(host, monkeypatch):
    run = chain("a", 8)
    host.store(run)
    host.sleep(run)
    inside(host.one.host, lambda node: node.mover.paces[NVME]._meter.note(1 << 30, 1e6))
    assert host.status()["rates"]["nvme"] < 10_000
    monkeypatch.setattr(pace, "STALE_S", 0.0)
    monkeypatch.setattr(node_weighs, "SAMPLE_BYTES", 2 * NBYTES)
    found = host.find([ask("a", 8)], prefill=Prefill(1e-3))
    assert found.load == 0
    until(lambda: host.disk.blocks["read"] == 2, "a sample was read")
    at_rest(host.one.host)
    assert host.status()["rates"]["nvme"] > 10_000
    assert host.status()["decisions"]["samples"] == 1
    monkeypatch.setattr(pace, "STALE_S", 1e9)
    host.find([ask("a", 8)], prefill=FAST)
    assert host.disk.blocks["read"] == 2


def test_a_wake_with_a_prefill_rate_brings_only_what_is_worth_it():
    with service(gpu=False) as one, Client(one) as client:
        speaker, node = Speaker(client), one.host.node
        words = tokens("s", 6 * STEP)
        speaker.save("s", words, durable=True)
        disk = Slow(node.parts.nvme)

        def sleep(_):
            book = node.hierarchy.book
            for block in reversed(book.live(node.keeper.table.get("s").run)):
                book.lose(block, book.top)
            node.mover.paces[NVME].began(node._now())  # no sample

        inside(one.host, sleep)
        woken = speaker.wake("s", words, prefill=FAST)
        assert (woken.n_tokens, woken.value, woken.missed, woken.why) == (0, None, 6, Why.SLOWER)
        assert disk.blocks["read"] == 0
        woken = speaker.wake("s", words, prefill=SLOW)
        assert (woken.n_tokens, woken.missed, woken.why) == (6 * STEP, 0, None)
        assert woken.found == (NVME,) * 6
        assert speaker.wake("s", words, prefill=Prefill(1e-6)).missed == 0  # it is in the pool
        at_rest(one.host)


# -- bad input ------------------------------------------------------------------------------

BAD = {
    "no asks": (BadInput, "one Ask a rank", ([], 0, 0)),
    "no layout": (BadLayout, "not introduced", ([Ask(b"y" * 16, ())], 0, 0)),
    "a key": (BadInput, "b'short'", ([Ask(RANKS[0].fingerprint, (b"short",))], 0, 0)),
    "another rank's blocks": (
        BadLayout, "has layout", ([Ask(RANKS[1].fingerprint, chain("a", 2))], 0, 0),
    ),
    "another rank's tail": (
        BadLayout, "has layout", ([Ask(RANKS[1].fingerprint, (), (chain("a", 1),))], 0, 0),
    ),
    "skip negative": (BadInput, "skip .* not -1", ([ask("a", 2)], -1, 0)),
    "skip beyond": (BadInput, "skip 3 is more than the 2 blocks", ([ask("a", 2)], 3, 0)),
    "new tokens": (BadInput, "new_tokens .* not 1.5", ([ask("a", 2)], 0, 1.5)),
    "prefill": (BadInput, "a Prefill, not 7", ([ask("a", 2)], 0, 0, 7)),
    "copy": (BadInput, "a Link, not 7", ([ask("a", 2)], 0, 0, None, 7)),
    "ttl": (BadInput, "ttl_s .* not -1", ([ask("a", 2)], 0, 0, None, None, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_value_and_changes_nothing(host, name):
    host.store(chain("a", 2))
    error, says, args = BAD[name]
    with pytest.raises(error, match=says) as caught:
        call(host.link, "find", *args)
    assert type(caught.value) is error
    assert pending(host.one.host)["leases"] == 0
    assert host.answers(chain("a", 2)) == [True, True]


def test_blocks_of_two_sizes_of_tokens_are_no_ranks_of_one_engine(host):
    other = replace(RANKS[1], block_tokens=16)
    call(host.link, "hello", other)
    with pytest.raises(BadInput, match=r"\[32, 16\] tokens"):
        host.find([ask("a", 2), Ask(other.fingerprint, chain("b", 2, 1))])


def test_a_wake_with_a_rate_that_is_none_is_refused(host):
    host.engine.save("s", 1)
    with pytest.raises(BadInput, match="a Prefill, not 'x'"):
        call(host.link, "wake", "s", LAYOUT.fingerprint, prefill="x")
    assert host.status()["sessions"]["active"] == 0


def test_a_gpus_node_finds_what_the_gpu_holds():
    with service() as one:
        gpu = Engine(one.to_gpu)
        gpu.save("g", 3)
        run = tuple(inside(one.host, lambda node: node.keeper.table.get("g").run))
        asked = Ask(LAYOUT.fingerprint, run)
        found = call(one.to_gpu, "find", [asked], 0, 0, SLOW)
        assert found.found == (Medium.HBM,) * 3
        call(one.to_gpu, "release", found.leases[0].id)
        assert call(one.to_host, "find", [asked], 0, 0).blocks in (0, 3)
        piece = call(one.to_gpu, "fetch", LAYOUT.fingerprint, run[1:], again=True, parent=run[0])
        assert piece.lease.keys == run[1:]
        call(one.to_gpu, "release", piece.lease.id)
        with pytest.raises(BadInput, match="b'p'"):
            call(one.to_gpu, "fetch", LAYOUT.fingerprint, run[1:], parent=b"p")
        assert call(one.to_gpu, "lookup", [b"n" * 16]) == [Absent()]
        gpu.close()
