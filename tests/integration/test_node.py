"""Nodes of a host and of a GPU in one process: real bytes over all tiers, and every way to fail."""

import asyncio
import contextlib
import json
import threading
import time
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
    folders,
    inside,
    pending,
    reservation,
    service,
    small,
    tokens,
    until,
)

from tiered_kv import assemble, keys, liveness
from tiered_kv.breaker import THRESHOLD
from tiered_kv.client import Client
from tiered_kv.errors import (
    BadInput,
    BadLayout,
    BadSession,
    DoesNotFit,
    FolderInUse,
    StaleHandle,
    TierBroken,
    UnknownSession,
    Unreachable,
)
from tiered_kv.layout import KVLayout
from tiered_kv.runner import Runner
from tiered_kv.sessions import Session, SessionId
from tiered_kv.types import Absent, BlockKey, Held, Medium, Refused, Why

STEP = LAYOUT.block_tokens
FP = LAYOUT.fingerprint


def call(link, verb, *args, **kwargs):
    return link.call(verb, *args, timeout_s=LONG_S, **kwargs)


def status(link):
    return call(link, "status")


def chain(name, n):
    return keys.chain(LAYOUT, SECRET, tokens(name, n * STEP)).keys


def key(n):
    return BlockKey(n.to_bytes(16, "big"))


@pytest.fixture
def host():
    """A host's node alone, with an engine on it."""
    with service(gpu=False) as one:
        one.engine = Engine(one.to_host)
        one.engine.attach()
        yield one
        one.engine.close()


@pytest.fixture
def both():
    """A GPU's node above a host's, and a client on the GPU."""
    with service() as one:
        one.client = Client(one)
        one.speaker = Speaker(one.client)
        yield one
        at_rest(one.gpu)
        one.client.close()


def tier(link, medium):
    return next(t for t in status(link)["tiers"] if t["medium"] == medium)


# -- saving and waking over all tiers ----------------------------------------------------


def test_a_session_comes_back_from_the_pool_with_its_bytes(both):
    words = tokens("a", 5 * STEP)
    saved = both.speaker.save("a", words)
    assert (saved.blocks, saved.held, saved.why) == (5, 0, None)
    woken = both.speaker.wake("a", words)
    assert (woken.n_tokens, woken.missed, woken.why) == (len(words), 0, None)
    assert woken.found == (Medium.HBM,) * 5


def test_sessions_that_were_pushed_out_of_hbm_and_dram_come_back_with_their_bytes(both):
    names = [f"s{i}" for i in range(9)]  # 72 blocks; HBM has 16, DRAM 32, NVMe 128
    for name in names:
        assert both.speaker.save(name, tokens(name, 8 * STEP)).why is None
    found = set()
    for name in reversed(names):
        woken = both.speaker.wake(name, tokens(name, 8 * STEP))
        assert (woken.missed, woken.why) == (0, None)
        found.update(woken.found)
    assert Medium.NVME in found
    assert len(found) >= 2
    at_rest(both.gpu)
    at_rest(both.host)


def test_a_run_longer_than_hbm_brings_what_hbm_can_hold_and_says_why_no_more(both):
    words = tokens("long", 24 * STEP)
    engine = Engine(both.to_host)
    assert engine.save("long", 24).blocks == 24
    woken = both.speaker.wake("long", cluster_tokens("long", 24))
    assert (woken.n_tokens, woken.missed, woken.why) == (16 * STEP, 8, Why.TOO_LARGE)
    assert words
    engine.close()


def cluster_tokens(name, blocks):
    from cluster_kit import tokens_of

    return tokens_of(name, blocks)


def test_a_run_as_long_as_the_pool_is_not_pushed_out_as_fast_as_it_comes(host):
    """Its last blocks would leave above the high mark, again and again, until the deadline."""
    disk = Slow(host.host.node.parts.nvme)
    engine = host.engine
    assert engine.save("all", 30, durable=True).durable == 30
    engine.save("other", 20, durable=True)
    read = disk.blocks["read"]
    got = engine.wake("all")
    assert (got.blocks, got.missed) == (30, 0)
    assert disk.blocks["read"] - read <= 30


def test_a_run_longer_than_dram_brings_its_beginning_in_time(host):
    engine = host.engine
    for i in (10, 20, 30, 40):  # turns: no turn is longer than DRAM, the session is
        assert not isinstance(engine.save("turns", i), Refused), i
        at_rest(host.host)
        if i < 40:
            continue
    got = engine.wake("turns")
    assert (got.blocks, got.missed) == (32, 8)
    assert call(host.to_host, "wake", "turns", FP).why is Why.TOO_LARGE
    inside(host.host, lambda node: node.hierarchy.due(node._now() + 1e6))


def test_what_does_not_fit_beside_a_lease_comes_as_far_as_there_is_room(host):
    engine = host.engine
    engine.save("sleeper", 24, durable=True)
    engine.save("held", 20, durable=True)
    lease = call(host.to_host, "wake", "held", FP).lease
    assert len(lease.keys) == 20
    got = engine.wake("sleeper", deadline_s=0.5)
    assert 6 <= got.blocks <= 12
    call(host.to_host, "release", lease.id)
    assert engine.wake("sleeper").blocks == 24


def test_an_incomplete_last_block_is_saved_and_superseded_by_the_next_turn(both):
    first = tokens("chat", 2 * STEP + 5)
    assert both.speaker.save("chat", first).blocks == 3
    assert both.speaker.wake("chat", first).n_tokens == len(first)
    tail = keys.chain(LAYOUT, SECRET, first).keys[-1]
    assert both.speaker.save("fork-of-nothing", tokens("x", STEP)).blocks == 1
    longer = tokens("chat", 3 * STEP + 9)
    saved = both.speaker.save("chat", longer)
    assert (saved.blocks, saved.held) == (2, 2)
    assert both.speaker.wake("chat", longer).n_tokens == len(longer)
    assert call(both.to_gpu, "lookup", [tail]) == [Absent()]
    assert call(both.to_host, "lookup", [tail]) == [Absent()]


def test_a_superseded_block_is_not_found_by_the_next_life_either(both):
    both.speaker.save("chat", tokens("chat", STEP + 5), durable=True)
    tail = keys.chain(LAYOUT, SECRET, tokens("chat", STEP + 5)).keys[-1]
    assert isinstance(call(both.to_host, "lookup", [tail])[0], Held)
    both.speaker.save("chat", tokens("chat", 2 * STEP))
    both.host.stop(flush=False)  # nothing is written over it
    both.host.start()
    head = keys.chain(LAYOUT, SECRET, tokens("chat", STEP)).keys
    assert call(both.to_host, "lookup", [*head, tail]) == [Held((Medium.NVME,)), Absent()]


def test_layouts_of_two_models_live_beside_each_other(both):
    wide = KVLayout("other", "float16", layers=3, kv_heads=2, head_dim=64, block_tokens=32)
    assert wide.block_bytes != LAYOUT.block_bytes

    def fill(index, n, slot):
        slot.fill_(index + 1)

    for i in range(6):
        words = tokens(f"w{i}", 7 * STEP)
        assert both.speaker.save(f"s{i}", words).why is None
        assert both.client.save(f"w{i}", wide, words, fill).why is None
    for i in range(6):
        words = tokens(f"w{i}", 7 * STEP)
        assert both.speaker.wake(f"s{i}", words).missed == 0
        woken = both.client.wake(
            f"w{i}", wide, lambda blocks, n: [b.unique().tolist() for b in blocks]
        )
        assert woken.value == [[j + 1] for j in range(7)]
    at_rest(both.gpu)
    at_rest(both.host)


# -- forks, closing, forgetting ----------------------------------------------------------


@pytest.mark.parametrize("where", ["to_host", "to_gpu"])
def test_a_fork_keeps_its_blocks_when_the_other_session_is_closed(both, where):
    words = tokens("a", 4 * STEP)
    both.speaker.save("a", words)
    both.client.fork("a", "b")
    assert call(getattr(both, where), "close_session", "a") == 0
    assert both.speaker.wake("b", words).found == (Medium.HBM,) * 4
    with pytest.raises(UnknownSession, match="no session 'a'"):
        both.speaker.wake("a", words)
    assert both.client.forget("b") == 4
    assert call(both.to_gpu, "lookup", chain("a", 4)) == [Absent()] * 4


def test_a_closed_session_gives_up_only_what_was_its_own(both):
    both.speaker.save("short", tokens("a", 2 * STEP), durable=True)
    both.speaker.save("long", tokens("a", 5 * STEP), durable=True)
    assert both.client.forget("long") == 3
    assert both.speaker.wake("short", tokens("a", 2 * STEP)).missed == 0
    answers = call(both.to_host, "lookup", chain("a", 5))
    assert [isinstance(a, Held) for a in answers] == [True, True, False, False, False]


def test_a_fork_goes_its_own_way_and_shares_the_beginning(both):
    both.speaker.save("a", tokens("a", 3 * STEP))
    both.client.fork("a", "b")
    mine, theirs = (
        tokens("a", 3 * STEP) + tokens("x", STEP),
        tokens("a", 3 * STEP) + tokens("y", STEP),
    )
    assert both.speaker.save("a", mine).held == 3
    assert both.speaker.save("b", theirs).held == 3
    assert both.speaker.wake("a", mine).missed == both.speaker.wake("b", theirs).missed == 0


def test_what_was_closed_or_forgotten_is_not_found_by_the_next_life(host):
    engine = host.engine
    engine.save("kept", 3, durable=True)
    engine.save("closed", 3, durable=True)
    engine.save("forgotten", 3, durable=True)
    of = {n: keys.chain(LAYOUT, SECRET, cluster_tokens(n, 3)).keys for n in ("closed", "forgotten")}
    assert call(host.to_host, "close_session", "closed") == 3
    assert call(host.to_host, "forget", of["forgotten"]) == 3
    host.host.stop(flush=False)
    host.host.start()
    assert call(host.to_host, "lookup", of["closed"] + of["forgotten"]) == [Absent()] * 6
    engine.detach()
    assert engine.wake("kept").blocks == 3
    with pytest.raises(UnknownSession):
        engine.wake("closed")


def test_a_gpus_node_forgets_below_too(both):
    both.speaker.save("a", tokens("a", 3 * STEP), durable=True)
    assert call(both.to_gpu, "forget", chain("a", 3)) == 3
    assert call(both.to_host, "lookup", chain("a", 3)) == [Absent()] * 3


def test_a_block_that_is_forgotten_while_it_is_written_leaves_no_row(host):
    disk = Slow(host.host.node.parts.nvme)
    disk.gate.clear()
    host.engine.save("a", 3)
    run = keys.chain(LAYOUT, SECRET, cluster_tokens("a", 3)).keys
    writing = threading.Thread(target=lambda: call(host.to_host, "persist", run))
    writing.start()
    until(lambda: disk.blocks["write"] == 3, "the write has begun")
    assert call(host.to_host, "close_session", "a") == 3
    disk.gate.set()
    writing.join()
    at_rest(host.host)
    host.host.stop()
    host.host.start()
    assert call(host.to_host, "lookup", run) == [Absent()] * 3


def test_a_block_that_is_saved_anew_while_it_is_erased_keeps_its_row(host):
    """The erasing thread is held; a durable save of the same blocks has to wait for it."""
    engine, parts = host.engine, host.host.node.parts
    engine.save("a", 3, durable=True)
    gate, erase = threading.Event(), parts.forget
    begun = threading.Event()

    def slow(*args):
        begun.set()
        assert gate.wait(LONG_S)
        erase(*args)

    parts.forget = slow
    closing = threading.Thread(target=lambda: call(host.to_host, "close_session", "a"))
    closing.start()
    assert begun.wait(LONG_S)
    saved = []
    saving = threading.Thread(target=lambda: saved.append(engine.save("a", 3, durable=True)))
    saving.start()
    time.sleep(0.05)
    gate.set()
    closing.join()
    saving.join()
    assert saved[0].durable == 3
    host.host.stop(flush=False)
    host.host.start()
    engine.detach()
    assert engine.wake("a").blocks == 3


def test_a_session_row_that_is_being_written_does_not_outlive_a_close(host):
    engine, parts = host.engine, host.host.node.parts
    gate, begun, put = threading.Event(), threading.Event(), parts.put_sessions

    def slow(rows):
        begun.set()
        assert gate.wait(LONG_S)
        put(rows)

    parts.put_sessions = slow
    engine.save("a", 2)
    assert begun.wait(LONG_S)
    closing = threading.Thread(target=lambda: call(host.to_host, "close_session", "a"))
    closing.start()
    time.sleep(0.05)
    gate.set()
    closing.join()
    host.host.stop(flush=False)
    host.host.start()
    assert call(host.to_host, "list_sessions") == []


# -- durable, restart ------------------------------------------------------------


def test_a_warm_restart_finds_all_that_was_durable_and_its_sessions(both):
    words = tokens("a", 6 * STEP + 3)
    assert both.speaker.save("a", words, durable=True).durable == 7
    both.gpu.stop(flush=False)
    both.host.stop(flush=False)
    both.host.start()
    both.gpu.start()
    woken = both.speaker.wake("a", words)
    assert (woken.n_tokens, woken.found) == (len(words), (Medium.NVME,) * 7)
    rows = call(both.to_host, "list_sessions")
    assert [(r["id"], r["tokens"], r["blocks"]) for r in rows] == [("a", len(words), 7)]


def test_stopping_writes_everything_so_that_the_next_life_is_warm(both):
    for i in range(3):
        both.speaker.save(f"s{i}", tokens(f"s{i}", 5 * STEP))
    both.gpu.stop()
    both.host.stop()
    both.host.start()
    both.gpu.start()
    for i in range(3):
        woken = both.speaker.wake(f"s{i}", tokens(f"s{i}", 5 * STEP))
        assert (woken.missed, set(woken.found)) == (0, {Medium.NVME})


def test_a_durable_save_says_in_time_what_was_written_when_the_disk_is_full(host):
    host.host.node.config = replace(
        host.config, service=replace(host.config.service, store_deadline_s=0.3)
    )
    nvme = host.host.node.parts.nvme
    nvme.write = lambda blocks, slots: fail(DoesNotFit("disk full"))
    began = time.monotonic()
    committed = host.engine.save("a", 3, durable=True)
    assert (committed.blocks, committed.durable) == (3, 0)
    assert time.monotonic() - began < LONG_S / 2
    assert host.engine.wake("a").blocks == 3


def fail(error):
    raise error


def test_a_durable_save_says_in_time_what_was_written_when_the_disk_hangs(host):
    host.host.node.config = replace(
        host.config, service=replace(host.config.service, store_deadline_s=0.3)
    )
    disk = Slow(host.host.node.parts.nvme)
    disk.gate.clear()
    began = time.monotonic()
    assert host.engine.save("a", 3, durable=True).durable == 0
    assert time.monotonic() - began < LONG_S / 2
    disk.gate.set()
    until(lambda: call(host.to_host, "persist", chain_of("a", 3)) == 3, "written at last")


def chain_of(name, n):
    return keys.chain(LAYOUT, SECRET, cluster_tokens(name, n)).keys


def test_blocks_whose_session_could_not_be_written_are_not_called_durable(host):
    parts = host.host.node.parts
    put, parts.put_sessions = parts.put_sessions, lambda rows: fail(TierBroken("no index"))
    assert host.engine.save("a", 3, durable=True).durable == 0
    assert any("no index" in e["text"] for e in status(host.to_host)["errors"])
    parts.put_sessions = put
    assert host.engine.save("a", 3, durable=True).durable == 3


def test_a_durable_save_says_in_time_what_was_written_when_the_index_hangs(host):
    parts, gate = host.host.node.parts, threading.Event()
    put = parts.put_sessions

    def hang(rows):
        assert gate.wait(LONG_S)
        put(rows)

    host.host.node.config = replace(
        host.config, service=replace(host.config.service, store_deadline_s=0.3)
    )
    parts.put_sessions = hang
    began = time.monotonic()
    assert host.engine.save("a", 3, durable=True).durable == 0
    assert time.monotonic() - began < LONG_S / 3
    gate.set()


def test_without_nvme_nothing_is_durable_and_everything_else_works():
    with service(gpu=False, nvme={"bytes": 0}) as one:
        engine = Engine(one.to_host)
        assert engine.save("a", 3, durable=True).durable == 0
        assert engine.wake("a").blocks == 3
        assert call(one.to_host, "close_session", "a") == 3
        engine.close()


# -- deadlines, single flight, broken tiers ----------------------------------------------


def cold(one, *names, blocks=6):
    """Sessions that only NVMe holds."""
    for name in names:
        assert one.engine.save(name, blocks, durable=True).durable == blocks
    one.host.stop()
    one.host.start()
    one.engine.detach()
    one.engine.attach()
    return Slow(one.host.node.parts.nvme)


def test_a_wake_answers_in_time_when_the_disk_is_slow_and_has_it_later(host):
    disk = cold(host, "a")
    disk.gate.clear()
    began = time.monotonic()
    got = call(host.to_host, "wake", "a", FP, None, 0.2)
    assert (len(got.lease.keys), got.missed, got.why) == (0, 6, Why.DEADLINE)
    assert 0.2 <= time.monotonic() - began < LONG_S / 2
    call(host.to_host, "release", got.lease.id)
    assert status(host.to_host)["misses"] == {"deadline": 6}
    disk.gate.set()
    assert host.engine.wake("a").blocks == 6


def test_a_deadline_of_zero_takes_what_is_there(host):
    disk = cold(host, "a")
    disk.gate.clear()
    assert host.engine.wake("a", deadline_s=0.0).missed == 6
    disk.gate.set()
    until(lambda: host.engine.wake("a", deadline_s=0.0).blocks == 6, "it came in the background")


def test_two_wakes_of_one_cold_session_read_the_disk_once(host):
    disk = cold(host, "a")
    disk.gate.clear()
    got = []
    other = Engine(host.to_host)
    other.attach()
    threads = [
        threading.Thread(target=lambda e=e: got.append(e.wake("a"))) for e in (host.engine, other)
    ]
    for thread in threads:
        thread.start()
    until(lambda: host.to_host.verbs.count("wake") == 2, "both ask")
    time.sleep(0.05)
    disk.gate.set()
    for thread in threads:
        thread.join()
    assert [g.blocks for g in got] == [6, 6]
    assert disk.blocks["read"] == 6
    other.close()


def test_a_prefetch_brings_a_session_up_before_it_is_wanted(host):
    disk = cold(host, "a")
    assert call(host.to_host, "prefetch", "a") == 1
    run = chain_of("a", 6)
    until(
        lambda: call(host.to_host, "lookup", run)[-1] == Held((Medium.DRAM, Medium.NVME)), "it came"
    )
    assert disk.blocks["read"] == 6
    assert set(host.engine.wake("a").found) == {Medium.DRAM}


def test_a_prefetch_into_a_full_pool_makes_room_and_goes_on(host):
    cold(host, "a", blocks=12)
    for i in range(3):
        host.engine.save(f"dirty{i}", 8)
    call(host.to_host, "prefetch", "a")
    run = chain_of("a", 12)

    def all_up():
        answers = call(host.to_host, "lookup", run)
        return all(isinstance(a, Held) and Medium.DRAM in a.tiers for a in answers)

    until(all_up, "all came")


def test_a_prefetch_of_a_layout_that_nobody_introduced_in_this_life_still_works(host):
    host.engine.save("a", 3, durable=True)
    host.host.stop()
    host.host.start()
    assert call(host.to_host, "prefetch", "a") == 1


def test_a_disk_that_keeps_failing_is_taken_out_and_probed_back_in(host, monkeypatch):
    disk = cold(host, *[f"s{i}" for i in range(THRESHOLD + 2)], blocks=2)
    disk.error = OSError(5, "Input/output error")
    probe = host.host.node.parts.nvme.probe
    monkeypatch.setattr(host.host.node.parts.nvme, "probe", lambda: fail(TierBroken("still bad")))
    for i in range(THRESHOLD):
        assert host.engine.wake(f"s{i}").missed == 2
    until(lambda: "nvme" in status(host.to_host)["offline"], "taken out")
    assert not tier(host.to_host, "nvme")["online"]
    last = f"s{THRESHOLD + 1}"
    began = time.monotonic()
    assert host.engine.wake(last).missed == 2  # at once: nobody asks the disk
    assert time.monotonic() - began < LONG_S / 2
    assert host.engine.save("new", 3, durable=True).durable == 0
    until(lambda: any("still bad" in e["text"] for e in status(host.to_host)["errors"]), "probed")
    disk.error = None
    monkeypatch.setattr(host.host.node.parts.nvme, "probe", probe)
    until(lambda: status(host.to_host)["offline"] == {}, "back in")
    assert host.engine.wake(last).blocks == 2
    assert host.engine.save("new", 3, durable=True).durable == 3
    misses = status(host.to_host)["misses"]
    assert misses["io_error"] == 2 * THRESHOLD
    assert misses["absent"] == 2


def test_a_disk_that_hangs_is_taken_out_and_what_waited_for_it_lets_go(host):
    host.host.node.health._deadline_s = 0.2
    disk = Slow(host.host.node.parts.nvme)
    disk.gate.clear()
    for i in range(5):
        host.engine.save(f"s{i}", 5)
        run = chain_of(f"s{i}", 5)
        inside(host.host, lambda node, run=run: (node.hierarchy.persist(run), node._kick()))
    assert pending(host.host)["q"] >= 5
    until(lambda: "running for more than" in str(status(host.to_host)["offline"]), "taken out")
    until(lambda: pending(host.host)["q"] <= 2, "only what runs is still pinned")
    for i in range(8):
        assert not isinstance(host.engine.save(f"more{i}", 5), Refused)
    disk.gate.set()
    until(lambda: status(host.to_host)["offline"] == {}, "back in")


def test_a_probe_that_hangs_does_not_keep_leases_from_lapsing(host, monkeypatch):
    host.engine.save("a", 3)
    begun, gate = threading.Event(), threading.Event()

    def hang():
        begun.set()
        assert gate.wait(LONG_S)
        raise TierBroken("at last")

    monkeypatch.setattr(host.host.node.parts.nvme, "probe", hang)
    inside(host.host, lambda node: node.health._breakers[Medium.NVME].failed_now("x", 0.0))
    assert begun.wait(LONG_S)
    call(host.to_host, "wake", "a", FP, 0.1)
    until(lambda: pending(host.host)["leases"] == 0, "lapsed")
    gate.set()


def test_a_clock_whose_step_fails_goes_on_and_tells(host, monkeypatch):
    failures = []

    def broken(*_):
        failures.append(1)
        raise ZeroDivisionError("a defect in a health check")

    monkeypatch.setattr(host.host.node.health, "check", broken)
    monkeypatch.setattr(host.host.node.keeper, "flush", broken)
    host.engine.save("a", 3)
    call(host.to_host, "wake", "a", FP, 0.1)
    until(lambda: len(failures) > 3, "it failed again and again")
    until(lambda: pending(host.host)["leases"] == 0, "lapsed all the same")
    assert any("a defect in a health check" in e["text"] for e in status(host.to_host)["errors"])
    monkeypatch.undo()


def test_a_folder_that_was_removed_takes_its_tier_out(host):
    folder = host.config.nvme_folder
    moved = folder.rename(folder.with_name("elsewhere"))
    until(lambda: "removed or replaced" in str(status(host.to_host)["offline"]), "taken out")
    moved.rename(folder)
    until(lambda: status(host.to_host)["offline"] == {}, "back in")


def test_a_flipped_bit_on_disk_is_a_counted_miss_and_never_a_wrong_byte(host):
    cold(host, "a")
    (data,) = [f for f in host.config.nvme_folder.iterdir() if f.stat().st_size == 8 << 20]
    blocks = host.host.node.hierarchy.book.blocks
    bad = blocks[chain_of("a", 6)[3]]
    with data.open("r+b") as file:
        file.seek(bad.slots[1] + 1000)
        byte = file.read(1)
        file.seek(bad.slots[1] + 1000)
        file.write(bytes([byte[0] ^ 4]))
    got = host.engine.wake("a")
    assert (got.blocks, got.missed) == (3, 3)
    assert status(host.to_host)["misses"] == {"corrupt": 3}
    assert host.engine.save("a", 6).blocks == 3
    assert host.engine.wake("a").blocks == 6


# -- leases, reservations, generations ---------------------------------------------------


def words(host, slots):
    return host.host.node.parts.pool.generations.read(slots)


def test_generations_are_odd_while_a_slot_is_filled_and_even_once_it_is_committed(host):
    run = chain("g", 3)
    held = reservation(host.to_host, host.engine.owner, run)
    assert held.generations == words(host, held.slots)
    assert [g % 2 for g in held.generations] == [1, 1, 1]
    assert call(host.to_host, "commit", held.id, [1, 2], 2).blocks == 2
    first, second, third = held.generations
    assert words(host, held.slots) == (first + 1, second + 1, third)
    again = reservation(host.to_host, host.engine.owner, run)
    assert (again.held, len(again.keys)) == (2, 1)
    call(host.to_host, "abort", again.id)
    assert [g % 2 for g in words(host, again.slots)] == [1]
    call(host.to_host, "forget", run)


def test_a_lease_that_lapsed_is_noticed_by_its_reader_once_a_slot_is_reused(host):
    engine = host.engine
    engine.save("a", 4)
    lease = call(host.to_host, "wake", "a", FP, 0.05).lease
    table = host.host.node.parts.pool.generations
    assert table.unchanged(lease.slots, lease.generations)
    until(lambda: pending(host.host)["leases"] == 0, "lapsed")
    assert table.unchanged(lease.slots, lease.generations)  # nobody has the slots yet
    for i in range(12):
        engine.save(f"n{i}", 8)
    assert not table.unchanged(lease.slots, lease.generations)
    call(host.to_host, "lapsed", 4)
    call(host.to_host, "release", lease.id)  # late, and fine
    assert status(host.to_host)["misses"]["lapsed"] == 4
    assert status(host.to_host)["counts"]["leases.late"] == 1


def test_a_leased_block_stays_where_it_is_under_pressure(host):
    engine = host.engine
    engine.save("a", 6)
    lease = call(host.to_host, "wake", "a", FP).lease
    for i in range(12):
        engine.save(f"n{i}", 8)
    table = host.host.node.parts.pool.generations
    assert table.unchanged(lease.slots, lease.generations)
    for k, slot in zip(lease.keys, lease.slots, strict=True):
        assert bytes(host.host.node.parts.pool.view(slot, LAYOUT.block_bytes)) == content(k)
    call(host.to_host, "release", lease.id)


def test_reservations_of_a_dead_owner_end_and_those_of_a_live_one_do_not(host):
    alive = liveness.hold(host.config.shm_folder, "mortal")
    mortal = reservation(host.to_host, "mortal", chain("m", 3))
    mine = reservation(host.to_host, host.engine.owner, chain("o", 2))
    alive.close()
    until(lambda: pending(host.host)["reservations"] == 1, "the dead one's has ended")
    with pytest.raises(StaleHandle):
        call(host.to_host, "commit", mortal.id, [1, 2, 3])
    assert call(host.to_host, "lookup", chain("m", 3)) == [Absent()] * 3
    call(host.to_host, "abort", mine.id)


def test_an_abandoned_reserve_gives_its_slots_back(host):
    """The caller's time runs out while room is made; its owner lives, and would hold the
    reservation for ever."""
    run, gate = chain("r", 2), asyncio.Event()
    erased = host.host.node.keeper.erased

    async def waits(*args):
        await gate.wait()
        return await erased(*args)

    host.host.node.keeper.erased = waits
    with pytest.raises(Unreachable, match=r"reserve was not answered in 0.05 s"):
        host.to_host.call("reserve", FP, run, host.engine.owner, timeout_s=0.05)
    inside(host.host, lambda node: gate.set())
    until(lambda: status(host.to_host)["counts"].get("stores.aborted") == 2, "given back")
    assert pending(host.host)["reservations"] == 0


def test_an_abandoned_wake_gives_its_lease_back(host):
    disk = cold(host, "a")
    disk.gate.clear()
    with pytest.raises(Unreachable, match="wake was not answered"):
        host.to_host.call("wake", "a", FP, LONG_S, LONG_S, timeout_s=0.05)
    disk.gate.set()
    until(lambda: status(host.to_host)["hits"] == 6, "it ended after all")
    until(lambda: pending(host.host)["leases"] == 0, "given back")


def test_an_abandoned_commit_is_carried_out_to_its_end(host):
    parts = host.host.node.parts
    gate, put = threading.Event(), parts.put_sessions

    def slow(rows):
        assert gate.wait(LONG_S)
        put(rows)

    parts.put_sessions = slow
    run = chain("c", 2)
    held = reservation(host.to_host, host.engine.owner, run)
    record = Session(SessionId("c"), FP, tuple(run), 2 * STEP, False, 0.0)
    with pytest.raises(Unreachable):
        host.to_host.call("commit", held.id, [1, 2], session=record, durable=True, timeout_s=0.05)
    gate.set()
    assert call(host.to_host, "session", "c").run == tuple(run)
    call(host.to_host, "close_session", "c")


def test_handles_of_another_life_are_refused(host):
    held = reservation(host.to_host, host.engine.owner, chain("r", 2))
    host.engine.save("a", 2, durable=True)
    host.host.stop()
    host.host.start()
    for verb in ("abort", "commit"):
        with pytest.raises(StaleHandle, match="is not of this life of the node"):
            call(host.to_host, verb, held.id)


# -- bad input ------------------------------------------------------------

TWIN = KVLayout("kit", "bfloat16", layers=4, kv_heads=2, head_dim=64, block_tokens=32)
RUN = tuple(chain("bad", 2))
NAN, INF = float("nan"), float("inf")


def record(**changes):
    good = Session(SessionId("bad"), FP, RUN, 2 * STEP, False, 0.0)
    return replace(good, **changes)


BAD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "../x",
    "a.b",
    "a\0b",
    "a\n",
    "\N{GRINNING FACE}" * 2560,
    7,
    None,
]
BAD_CALLS = {
    # wrong shape, dtype or layout
    "hello: no layout": (BadLayout, "'x'", "hello", ("x",)),
    "hello: a block larger than a slot": (
        BadLayout, "a block of 4194304 bytes does not fit", "hello",
        (replace(LAYOUT, layers=256),),
    ),
    "reserve: unknown layout": (BadLayout, b"x".hex(), "reserve", (b"x" * 16, RUN, "o")),
    "reserve: no layout": (BadLayout, "None", "reserve", (None, RUN, "o")),
    "reserve: a layout in a list": (BadLayout, r"\['x'\]", "reserve", (["x"], RUN, "o")),
    "reserve: another layout's blocks": (BadLayout, FP.hex(), "reserve", ("twin", "held", "o")),
    "fetch: another layout's blocks": (BadLayout, FP.hex(), "fetch", ("twin", "held")),
    "fetch: unknown layout": (BadLayout, "not introduced", "fetch", (b"y" * 16, RUN)),
    "wake: unknown layout": (BadLayout, "not introduced", "wake", ("here", b"y" * 16)),
    "wake: another layout": (BadLayout, FP.hex(), "wake", ("here", "twin")),
    # runs and keys
    "reserve: a run that is no list": (BadInput, "'abc'", "reserve", (FP, "abc", "o")),
    "reserve: a key of another length": (BadInput, "b'short'", "reserve", (FP, [b"short"], "o")),
    "reserve: a key that is text": (BadInput, "'" + "k" * 16, "reserve", (FP, ["k" * 16], "o")),
    "reserve: a key that is unhashable": (BadInput, r"\[\]", "reserve", (FP, [[]], "o")),
    "reserve: a key twice": (BadInput, "named twice", "reserve", (FP, [RUN[0], RUN[0]], "o")),
    "reserve: too few parents": (BadInput, "2 keys came with", "reserve", (FP, RUN, "o", [None])),
    "reserve: a parent that is no key": (
        BadInput, "b'p'", "reserve", (FP, RUN, "o", [None, b"p"]),
    ),
    "reserve: an owner without proof": (BadInput, "'ghost'", "reserve", (FP, RUN, "ghost")),
    "reserve: an owner that is a path": (BadInput, "'../x'", "reserve", (FP, RUN, "../x")),
    "reserve: no owner": (BadInput, "None", "reserve", (FP, RUN, None)),
    "lookup: a key of another length": (BadInput, "b'short'", "lookup", ([b"short"],)),
    "persist: a key of another length": (BadInput, "b'short'", "persist", ([b"short"],)),
    "forget: a key of another length": (BadInput, "b'short'", "forget", ([b"short"],)),
    # sizes and times
    "fetch: ttl 0": (BadInput, "ttl_s .* not 0", "fetch", (FP, RUN, 0)),
    "fetch: ttl negative": (BadInput, "ttl_s .* not -1", "fetch", (FP, RUN, -1)),
    "fetch: ttl NaN": (BadInput, "ttl_s .* not nan", "fetch", (FP, RUN, NAN)),
    "fetch: ttl for ever": (BadInput, "ttl_s .* not inf", "fetch", (FP, RUN, INF)),
    "fetch: ttl of years": (BadInput, "ttl_s .* not 1000000000.0", "fetch", (FP, RUN, 1e9)),
    "fetch: ttl text": (BadInput, "ttl_s .* not '5'", "fetch", (FP, RUN, "5")),
    "fetch: deadline negative": (BadInput, "deadline_s .* not -0.1", "fetch", (FP, RUN, 1, -0.1)),
    "fetch: deadline NaN": (BadInput, "deadline_s .* not nan", "fetch", (FP, RUN, 1, NAN)),
    "fetch: deadline for ever": (BadInput, "deadline_s .* not inf", "fetch", (FP, RUN, 1, INF)),
    "wake: deadline NaN": (BadInput, "deadline_s .* not nan", "wake", ("here", FP, 1, NAN)),
    "lapsed: negative": (BadInput, "blocks .* not -1", "lapsed", (-1,)),
    "lapsed: NaN": (BadInput, "blocks .* not nan", "lapsed", (NAN,)),
    "commit: count negative": (BadInput, "count .* not -1", "commit", ("res", None, -1)),
    "commit: count absurd": (BadInput, "count 99 is not in 0..2", "commit", ("res", None, 99)),
    "commit: count text": (BadInput, "count .* not '1'", "commit", ("res", None, "1")),
    "commit: too few checksums": (BadInput, "2 blocks came with 1", "commit", ("res", [1])),
    "commit: a checksum that is text": (BadInput, "'a' of block 1", "commit", ("res", [1, "a"])),
    "commit: a negative checksum": (BadInput, "-1 of block 0", "commit", ("res", [-1, 1])),
    "commit: an absurd checksum": (BadInput, "block 0", "commit", ("res", [1 << 64, 1])),
    "commit: no handle": (BadInput, "'x' is not a handle", "commit", ("x",)),
    "abort: no handle": (BadInput, "None is not a handle", "abort", (None,)),
    "abort: a negative handle": (StaleHandle, "life", "abort", (-1,)),
    # sessions
    "put_session: no session": (BadInput, "'x'", "put_session", ("x",)),
    "put_session: bad id": (BadSession, "'../x'", "put_session", (record(id="../x"),)),
    "put_session: negative tokens": (BadInput, "-1", "put_session", (record(n_tokens=-1),)),
    "put_session: absurd tokens": (
        BadInput, "1000000 tokens in blocks of 32", "put_session", (record(n_tokens=10**6),),
    ),
    "put_session: a tail that is none": (
        BadInput, "tail True", "put_session", (record(tail=True),),
    ),
    "put_session: torn tokens": (BadInput, "b'abc'", "put_session", (record(tokens=b"abc"),)),
    "put_session: another layout's blocks": (
        BadLayout, FP.hex(), "put_session", ("twin session",),
    ),
    "commit: a session of an unknown layout": (
        BadLayout, "not introduced", "commit", ("res", None, None, record(layout=b"z" * 16)),
    ),
    "commit: a session with a bad id": (
        BadSession, r"'a\\x00b'", "commit", ("res", None, None, record(id="a\0b")),
    ),
    "wake: unknown session": (UnknownSession, "'nobody'", "wake", ("nobody", FP)),
    "prefetch: unknown session": (UnknownSession, "'nobody'", "prefetch", ("nobody",)),
    "session: unknown session": (UnknownSession, "'nobody'", "session", ("nobody",)),
    "close: unknown session": (UnknownSession, "'nobody'", "close_session", ("nobody",)),
    "fork: unknown session": (UnknownSession, "'nobody'", "fork", ("nobody", "new")),
    "fork: a name that is taken": (BadInput, "'here' exists", "fork", ("here", "here")),
    "fork: a bad new name": (BadSession, "'a/b'", "fork", ("here", "a/b")),
    "no verb": (BadInput, "'_done' is not one of", "_done", ()),
    **{
        f"{verb}: session {str(name)[:8]!r}": (BadSession, "session id", verb, (name, *rest))
        for name in BAD_NAMES
        for verb, rest in (("wake", (FP,)), ("prefetch", ()), ("close_session", ()))
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stage():
    """A service with a session `here`, an open reservation and a second layout, for bad calls."""
    with service() as one:
        for link in (one.to_host, one.to_gpu):
            link.engine = Engine(link)
            link.engine.attach()
            call(link, "hello", TWIN)
            link.held = reservation(link, link.engine.owner, RUN)
        one.to_gpu.engine.save("here", 3)
        one.to_host.engine.save("here", 3)
        yield one
        for link in (one.to_host, one.to_gpu):
            call(link, "abort", link.held.id)
            link.engine.close()


VOLATILE = ("up_s", "process", "errors", "misses")


def seen(link):
    """All that a bad call must not change. Stable: nothing else happens."""
    facts = {k: v for k, v in status(link).items() if k not in VOLATILE}
    rows = [{**row, "unused_s": 0} for row in call(link, "list_sessions")]
    return facts, rows


@pytest.mark.parametrize("where", ["to_host", "to_gpu"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_a_typed_error_that_names_the_value_and_changes_nothing(stage, where, name):
    link = getattr(stage, where)
    error, says, verb, args = BAD_CALLS[name]
    known = {
        "o": link.engine.owner,
        "res": link.held.id,
        "twin": TWIN.fingerprint,
        "held": chain_of("here", 3),
        "twin session": Session(
            SessionId("t"), TWIN.fingerprint, tuple(chain_of("here", 3)), 3 * STEP, False, 0.0
        ),
    }
    given = [known.get(a, a) if isinstance(a, str) else a for a in args]
    before = seen(link)
    with pytest.raises(error, match=says) as caught:
        call(link, verb, *given)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 600
    assert seen(link) == before
    assert link.engine.wake("here").blocks == 3


def test_empty_runs_and_sessions_are_fine(host):
    held = reservation(host.to_host, host.engine.owner, [])
    assert (held.keys, held.slots) == ((), ())
    empty = Session(SessionId("empty"), FP, (), 0, False, 0.0)
    assert call(host.to_host, "commit", held.id, session=empty).blocks == 0
    got = call(host.to_host, "wake", "empty", FP)
    assert (got.lease.keys, got.missed, got.why) == ((), 0, None)
    call(host.to_host, "release", got.lease.id)
    assert call(host.to_host, "fetch", FP, []).missed == 0
    assert call(host.to_host, "persist", []) == 0
    assert call(host.to_host, "forget", []) == 0
    inside(host.host, lambda node: node.hierarchy.due(node._now() + 1e6))


def test_a_run_longer_than_the_tier_is_refused_and_nothing_stays_reserved(host):
    answer = call(host.to_host, "reserve", FP, chain("huge", 40), host.engine.owner)
    assert (type(answer), answer.why) == (Refused, Why.TOO_LARGE)
    assert pending(host.host)["reservations"] == 0
    assert status(host.to_host)["misses"] == {"too_large": 1}


def test_a_layout_is_known_only_once_the_host_agreed(both):
    both.speaker.save("a", tokens("a", STEP))
    both.host.stop()
    with pytest.raises(Unreachable):
        call(both.to_gpu, "hello", TWIN)
    with pytest.raises(BadLayout, match="not introduced"):
        call(both.to_gpu, "fetch", TWIN.fingerprint, RUN)
    both.host.start()
    call(both.to_gpu, "hello", TWIN)
    fetched = call(both.to_gpu, "fetch", TWIN.fingerprint, RUN)
    assert fetched.missed == 2
    call(both.to_gpu, "release", fetched.lease.id)


# -- status ------------------------------------------------------------


def test_status_is_json_and_tells_tiers_sessions_moves_hits_and_misses(both):
    both.speaker.save("a", tokens("a", 4 * STEP), durable=True)
    both.speaker.wake("a", tokens("a", 4 * STEP))
    for one in (status(both.to_host), status(both.to_gpu)):
        assert json.loads(json.dumps(one)) == one
        assert all(t["leaked_slots"] == 0 for t in one["tiers"])
    above, below = status(both.to_gpu), status(both.to_host)
    assert (above["hits"], above["misses"]) == (4, {})
    assert below["sessions"] == {"active": 0, "recent": 1, "idle": 0}
    assert [t["medium"] for t in below["tiers"]] == ["dram", "nvme"]
    assert {"from": "dram", "to": "nvme"}.items() <= below["moves"][0].items()
    assert below["moves"][0]["bytes"] == 4 * LAYOUT.block_bytes
    rows = call(both.to_host, "list_sessions")
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0]["tiers"] == {"dram": 4}


def test_misses_are_counted_by_reason(host):
    call(host.to_host, "release", call(host.to_host, "fetch", FP, chain("no", 3)).lease.id)
    assert status(host.to_host)["misses"] == {"absent": 3}


# -- starting and stopping ------------------------------------------------------------


def leftovers(shm):
    return sorted(f.name for f in shm.iterdir())


@pytest.mark.parametrize("step", ["adopt", "probe", "mover"])
def test_a_start_that_fails_leaves_no_lock_no_arena_and_no_proof_of_life(step, monkeypatch):
    from tiered_kv import works
    from tiered_kv.parts import Parts
    from tiered_kv.tiers.nvme import NvmeTier

    with folders() as (root, shm):
        config = small(root, shm)
        with monkeypatch.context() as patch:
            broken = {
                "adopt": (Parts, "leftovers"),
                "probe": (NvmeTier, "probe"),
                "mover": (works, "Mover"),
            }[step]
            patch.setattr(*broken, lambda *_: fail(TierBroken("at start")))
            with pytest.raises(TierBroken, match="at start"):
                Runner(lambda: assemble.host(config))
        assert leftovers(shm) == []
        one = Runner(lambda: assemble.host(config))  # the folder's lock is free
        with pytest.raises(FolderInUse):
            Runner(lambda: assemble.host(config))
        assert len(leftovers(shm)) == 1
        one.stop()
        assert leftovers(shm) == []


def test_a_gpu_that_cannot_start_leaves_nothing_and_its_host_goes_on(monkeypatch):
    from tiered_kv import works

    with service(gpu=False) as one:
        before = leftovers(one.config.shm_folder)
        with monkeypatch.context() as patch:
            patch.setattr(works, "Mover", lambda *_: fail(MemoryError("no")))
            with pytest.raises(MemoryError):
                Runner(lambda: assemble.gpu(one.config, one.to_host))
        assert leftovers(one.config.shm_folder) == before


def test_a_start_that_is_given_up_gives_its_media_back_when_they_are_there(monkeypatch):
    with folders() as (root, shm):
        config = small(root, shm)
        begun, gate, prepare = threading.Event(), threading.Event(), assemble.host_parts

        def slow(*args):
            begun.set()
            assert gate.wait(LONG_S)
            return prepare(*args)

        monkeypatch.setattr(assemble, "host_parts", slow)

        async def give_up():
            starting = asyncio.ensure_future(assemble.host(config))
            await asyncio.to_thread(begun.wait, LONG_S)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting

        asyncio.run(give_up())
        monkeypatch.undo()
        gate.set()
        until(lambda: not leftovers(shm) and can_start(config), "lock and arena are free")


def can_start(config):
    try:
        Runner(lambda: assemble.host(config)).stop()
    except FolderInUse:
        return False
    return True


def test_stopping_is_idempotent_from_any_thread_and_leaves_nothing():
    with folders() as (root, shm):
        one = Runner(lambda: assemble.host(small(root, shm)))
        threads = [threading.Thread(target=one.stop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one.stop()
        assert leftovers(shm) == []
        assert can_start(small(root, shm))
        with pytest.raises(Unreachable, match="has been stopped"):
            call(one, "status")


def test_calls_under_way_end_when_the_node_is_stopped():
    with service(gpu=False) as one:
        one.engine = Engine(one.to_host)
        disk = cold(one, "a")
        disk.gate.clear()
        ended = []

        def wake():
            try:
                ended.append(call(one.to_host, "wake", "a", FP, None, LONG_S).why)
            except (Unreachable, StaleHandle) as error:
                ended.append(type(error))

        threads = [threading.Thread(target=wake) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: one.to_host.verbs.count("wake") == 8 and disk.blocks["read"], "all ask")
        runner = one.host.runner
        stopping = threading.Thread(target=lambda: runner.stop(flush=False))
        stopping.start()
        until(lambda: len(ended) == 8, "every caller has an answer while the disk still hangs")
        assert set(ended) <= {Why.OFFLINE, Why.DEADLINE, Unreachable, StaleHandle}
        disk.gate.set()
        stopping.join()
        for thread in threads:
            thread.join()
        one.engine.close()
        one.host.stop()


def test_a_call_that_would_wait_for_ever_ends_with_the_node():
    with service(gpu=False) as one:
        engine = Engine(one.to_host)
        engine.attach()

        async def for_ever(*_):
            await asyncio.Event().wait()

        one.host.node.keeper.erased = for_ever
        ended = []

        def reserve():
            with pytest.raises(Unreachable, match="has been stopped"):
                call(one.to_host, "reserve", FP, chain("r", 1), engine.owner)
            ended.append(1)

        thread = threading.Thread(target=reserve)
        thread.start()
        until(lambda: "reserve" in one.to_host.verbs, "it waits")
        time.sleep(0.05)
        one.host.stop()
        thread.join(LONG_S)
        assert ended == [1]
        engine.close()


def test_a_node_whose_disk_cannot_be_synced_still_stops_and_gives_everything_back(monkeypatch):
    with folders() as (root, shm):
        one = Runner(lambda: assemble.host(small(root, shm)))
        nvme = one.node.parts.nvme
        monkeypatch.setattr(nvme, "flush", lambda: fail(TierBroken("no sync")))
        with pytest.raises(TierBroken):
            call(one, "flush")
        one.stop()
        assert leftovers(shm) == []
        assert can_start(small(root, shm))


def test_what_cannot_be_closed_does_not_keep_the_rest_open():
    with folders() as (root, shm):
        one = Runner(lambda: assemble.host(small(root, shm)))
        pool = one.node.parts.pool
        close, pool.close = pool.close, lambda: fail(ZeroDivisionError("in close"))
        with pytest.raises(ZeroDivisionError):
            one.stop()
        assert can_start(small(root, shm))  # its lock is free, whatever the arena is
        close()


def test_a_verb_with_wrong_arguments_is_an_error_of_its_caller_alone(host):
    with pytest.raises(TypeError):
        call(host.to_host, "lookup")
    assert call(host.to_host, "lookup", []) == []


# -- concurrency ------------------------------------------------------------


def test_many_sessions_from_many_threads_never_get_a_wrong_byte(both):
    failures = []

    def chat(n):
        speaker = Speaker(both.client)
        try:
            for turn in range(1, 6):
                words = tokens(f"t{n}", turn * STEP + n)
                speaker.save(f"t{n}", words, durable=turn == 3)
                speaker.wake(f"t{n}", words)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=chat, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    at_rest(both.gpu)
    at_rest(both.host)


def test_two_owners_of_one_run_store_it_once(host):
    run = chain("twice", 3)
    other = liveness.hold(host.config.shm_folder, "other")
    first = reservation(host.to_host, host.engine.owner, run)
    second = reservation(host.to_host, "other", run)
    assert set(first.slots).isdisjoint(second.slots)
    assert call(host.to_host, "commit", first.id).blocks == 3
    assert call(host.to_host, "commit", second.id).blocks == 0
    assert tier(host.to_host, "dram")["blocks"] == 3
    other.close()
    call(host.to_host, "forget", run)


def test_hold_keeps_what_has_come_and_ends_by_itself(host):
    host.engine.save("a", 4)
    run = chain_of("a", 4)

    def held(node):
        n = node.hierarchy.hold(run, 1.0, node._now())
        pins = [b.pins for b in node.hierarchy.book.live(run)]
        node.hierarchy.due(node._now() + 2.0)
        return n, pins, [b.pins for b in node.hierarchy.book.live(run)]

    _, during, after = inside(host.host, held)
    assert (during, after) == ([1] * 4, [0] * 4)
