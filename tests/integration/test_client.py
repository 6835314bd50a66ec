"""What users call: whatever happens below, they see their bytes, a miss, or their own errors."""

import threading
import time

import pytest
from service_kit import (
    LAYOUT,
    SECRET,
    Slow,
    Speaker,
    at_rest,
    content,
    folders,
    pending,
    service,
    small,
    tokens,
    until,
)

from tiered_kv import keys
from tiered_kv.client import Client, Saved
from tiered_kv.errors import (
    BadInput,
    BadLayout,
    BadSession,
    StaleHandle,
    UnknownSession,
    Unreachable,
)
from tiered_kv.layout import KVLayout
from tiered_kv.local import Local, local
from tiered_kv.types import Medium, Why

STEP = LAYOUT.block_tokens
WORDS = tokens("a", 3 * STEP + 7)


@pytest.fixture(params=[True, False], ids=["gpu", "host"])
def one(request):
    with service(gpu=request.param) as service_:
        service_.client = Client(service_)
        service_.speaker = Speaker(service_.client)
        service_.node = service_.gpu or service_.host
        service_.link = service_.to_gpu or service_.to_host
        yield service_
        for revived in (service_.gpu, service_.host):
            if revived is not None and revived.runner is not None:
                at_rest(revived)
        service_.client.close()


def nothing(*_):
    raise AssertionError("must not be called")


def fail_with(error):
    def fail(_):
        raise error

    return fail


def test_a_session_is_saved_and_woken_in_two_calls_each(one):
    assert one.speaker.save("a", WORDS) == Saved(4, 0, 0, None)
    one.link.verbs.clear()
    more = tokens("a", 5 * STEP)
    assert one.speaker.save("a", more) == Saved(2, 3, 0, None)
    assert one.link.verbs == ["reserve", "commit"]
    one.link.verbs.clear()
    woken = one.speaker.wake("a", more)
    assert one.link.verbs == ["wake", "release"]
    assert (woken.n_tokens, woken.missed, woken.why) == (5 * STEP, 0, None)
    assert len(woken.found) == 5


def test_only_blocks_that_nobody_holds_are_filled(one):
    one.speaker.save("a", tokens("a", 3 * STEP))
    one.speaker.filled.clear()
    assert one.speaker.save("b", tokens("a", 4 * STEP)).held == 3
    assert one.speaker.filled == [3]


def test_fill_hears_how_many_tokens_a_block_has(one):
    heard = []
    one.client.save("a", LAYOUT, WORDS, lambda i, n, slot: heard.append((i, n, slot.numel())))
    size = LAYOUT.block_bytes
    assert heard == [(0, STEP, size), (1, STEP, size), (2, STEP, size), (3, 7, size)]


def test_copy_hears_how_many_tokens_there_are(one):
    one.speaker.save("a", WORDS)
    heard = []
    one.client.wake("a", LAYOUT, lambda blocks, n: heard.append((len(blocks), n)))
    assert heard == [(4, len(WORDS))]


def test_an_empty_session_has_nothing_to_copy(one):
    assert one.client.save("empty", LAYOUT, [], nothing) == Saved(0, 0, 0, None)
    woken = one.client.wake("empty", LAYOUT, nothing)
    assert (woken.n_tokens, woken.value, woken.missed, woken.why) == (0, None, 0, None)


def test_a_fill_that_raises_leaves_nothing_visible_and_nothing_reserved(one):
    def fill(index, n, slot):
        if index == 2:
            raise ZeroDivisionError("in fill")

    with pytest.raises(ZeroDivisionError, match="in fill"):
        one.client.save("a", LAYOUT, WORDS, fill)
    assert pending(one.node)["reservations"] == 0
    with pytest.raises(UnknownSession):
        one.client.wake("a", LAYOUT, nothing)
    assert one.speaker.save("b", WORDS).blocks == 4


@pytest.mark.parametrize("error", [Unreachable("mine"), StaleHandle("mine")], ids=repr)
def test_errors_of_fill_and_copy_are_the_callers_own_whatever_they_are(one, error):
    def fill(index, n, slot):
        raise error

    def copy(blocks, n):
        raise error

    with pytest.raises(type(error), match="mine"):
        one.client.save("a", LAYOUT, WORDS, fill)
    one.speaker.save("a", WORDS)
    with pytest.raises(type(error), match="mine"):
        one.client.wake("a", LAYOUT, copy)
    assert pending(one.node) == {"reservations": 0, "leases": 0, "moves": 0, "buried": 0, "q": 0}


def test_a_fill_that_raises_while_the_node_is_gone_is_still_the_callers_error(one):
    def fill(index, n, slot):
        one.node.stop(flush=False)
        raise ZeroDivisionError("in fill")

    with pytest.raises(ZeroDivisionError):
        one.client.save("a", LAYOUT, WORDS, fill)
    one.node.start()
    until(lambda: one.speaker.save("a", WORDS).why is None, "it works again")


def test_a_commit_that_is_refused_leaves_nothing_reserved(one):
    one.link.before["commit"] = fail_with(BadInput("refused"))
    with pytest.raises(BadInput, match="refused"):
        one.speaker.save("a", WORDS)
    assert pending(one.node)["reservations"] == 0


def test_a_commit_that_is_not_answered_is_a_miss_and_its_slots_come_back(one):
    one.link.before["commit"] = fail_with(Unreachable("lost"))
    assert one.speaker.save("a", WORDS).why is Why.UNREACHABLE
    assert pending(one.node)["reservations"] == 1
    del one.link.before["commit"]
    assert one.speaker.save("b", WORDS).why is None
    assert pending(one.node)["reservations"] == 0


def test_forks_prefetch_and_forget(one):
    one.speaker.save("a", WORDS)
    one.client.fork("a", "b")
    assert one.speaker.wake("b", WORDS).missed == 0
    assert one.client.prefetch("a") == 0  # it is up
    assert one.client.forget("a") == 0
    assert one.client.forget("b") == 4
    for verb in (one.client.prefetch, one.client.forget):
        with pytest.raises(UnknownSession):
            verb("a")
    with pytest.raises(UnknownSession):
        one.client.fork("a", "c")


def test_statuses_of_all_nodes(one):
    assert [n["tiers"][0]["medium"] for n in one.client.nodes()][-1] == (
        "hbm" if one.gpu else "dram"
    )


def test_a_save_without_room_says_why(one):
    saved = one.speaker.save("long", tokens("long", 40 * STEP))
    assert (saved.blocks, saved.why) == (0, Why.TOO_LARGE)


def test_a_durable_save_says_what_outlives_the_processes(one):
    assert one.speaker.save("a", WORDS, durable=True) == Saved(4, 0, 4, None)


# -- a node that is gone or restarts -------------------------------------------------------------


def test_while_the_node_is_gone_all_is_a_miss_and_afterwards_it_works_again(one):
    one.speaker.save("a", WORDS, durable=True)
    one.node.stop()
    saved = one.speaker.save("b", WORDS)
    assert (saved.blocks, saved.why) == (0, Why.UNREACHABLE)
    woken = one.speaker.wake("a", WORDS)
    assert (woken.n_tokens, woken.value, woken.why) == (0, None, Why.UNREACHABLE)
    for verb in (one.client.prefetch, one.client.forget):
        with pytest.raises(Unreachable):
            verb("a")
    one.node.start()
    assert one.speaker.wake("a", WORDS).missed == 0
    assert one.speaker.save("b", tokens("b", STEP)).why is None


def test_a_directory_that_knows_nobody_is_a_miss_too(one):
    link_for = one.link_for
    one.link_for = fail_with(Unreachable("no member"))
    assert one.speaker.save("a", WORDS).why is Why.UNREACHABLE
    assert one.speaker.wake("a", WORDS).why is Why.UNREACHABLE
    one.link_for = link_for
    assert one.speaker.save("a", WORDS).why is None


@pytest.mark.parametrize("known", [True, False], ids=["layout known", "layout unknown"])
def test_a_restart_between_two_calls_costs_the_caller_nothing(one, known):
    """The pool of the former life is mapped, and the next life answers."""
    one.speaker.save("a", WORDS, durable=True)
    one.node.stop()
    one.node.start()
    if known:
        one.node.call("hello", LAYOUT, timeout_s=20.0)
    woken = one.speaker.wake("a", WORDS)
    assert (woken.missed, woken.why) == (0, None)
    one.node.stop()
    one.node.start()
    if known:
        one.node.call("hello", LAYOUT, timeout_s=20.0)
    assert one.speaker.save("b", tokens("b", 2 * STEP)) == Saved(2, 0, 0, None)
    assert one.speaker.wake("b", tokens("b", 2 * STEP)).missed == 0


def test_a_restart_during_a_save_is_a_miss_and_leaves_nothing(one):
    def restart(index, n, slot):
        if index == 1:
            one.node.stop(flush=False)
            one.node.start()

    assert one.client.save("a", LAYOUT, WORDS, restart).why is Why.UNREACHABLE
    assert pending(one.node)["reservations"] == 0
    assert one.speaker.save("a", WORDS).why is None


def test_a_restart_during_a_copy_gives_the_bytes_that_were_there(one):
    """The memory of the former life stays mapped as long as somebody copies from it."""
    one.speaker.save("a", WORDS, durable=True)
    chain = keys.chain(LAYOUT, SECRET, WORDS).keys

    def copy(blocks, n):
        one.node.stop(flush=False)
        one.node.start()
        return [bytes(b.numpy().data) for b in blocks]

    woken = one.client.wake("a", LAYOUT, copy)
    assert woken.value == [content(key) for key in chain]


def test_a_node_that_restarts_at_every_call_is_a_miss(one):
    one.speaker.save("a", WORDS, durable=True)

    def restart(_):
        one.node.stop()
        one.node.start()
        one.node.call("hello", LAYOUT, timeout_s=20.0)

    one.link.before["wake"] = one.link.before["reserve"] = restart
    assert one.speaker.wake("a", WORDS).why is Why.UNREACHABLE
    assert one.speaker.save("b", WORDS).why is Why.UNREACHABLE
    one.link.before.clear()
    assert pending(one.node) == {"reservations": 0, "leases": 0, "moves": 0, "buried": 0, "q": 0}
    assert one.speaker.wake("a", WORDS).missed == 0


def test_bytes_whose_lease_lapsed_during_the_copy_are_thrown_away(one):
    one.speaker.save("a", WORDS)
    table = one.node.node.parts.pool.generations
    slots = []

    def copy(blocks, n):
        slots.append(blocks[1].data_ptr() - base)
        table.open(slots)
        return "half of another block"

    base = one.client._attached[one.link]._mapped.tensor.data_ptr()
    woken = one.client.wake("a", LAYOUT, copy)
    assert (woken.n_tokens, woken.value, woken.why) == (0, None, Why.LAPSED)
    assert woken.missed == 4
    status = one.link.call("status", timeout_s=20.0)
    assert status["misses"]["lapsed"] == 4
    table.publish(slots)


def test_a_release_that_is_not_answered_does_not_spoil_the_copy(one):
    one.speaker.save("a", WORDS)
    one.link.after["release"] = fail_with(Unreachable("the answer was lost"))
    assert one.speaker.wake("a", WORDS).missed == 0


def test_a_slow_disk_is_a_miss_in_time(one):
    one.speaker.save("a", WORDS, durable=True)
    if one.gpu:
        one.gpu.stop(flush=False)
    one.host.stop()
    one.host.start()
    if one.gpu:
        one.gpu.start()
    disk = Slow(one.host.node.parts.nvme)
    disk.gate.clear()
    began = time.monotonic()
    woken = one.speaker.wake("a", WORDS, deadline_s=0.2)
    assert (woken.n_tokens, woken.missed, woken.why) == (0, 4, Why.DEADLINE)
    assert time.monotonic() - began < 10
    disk.gate.set()
    until(lambda: one.speaker.wake("a", WORDS).missed == 0, "it comes later")


def test_a_wake_may_wait_longer_than_a_call_may_take():
    limits = {"call_timeout_s": 1.0, "wake_deadline_s": 0.5, "store_deadline_s": 0.5}
    with service(gpu=False, service=limits) as one:
        client = Client(one)
        speaker = Speaker(client)
        speaker.save("a", WORDS, durable=True)
        one.host.stop()
        one.host.start()
        disk = Slow(one.host.node.parts.nvme)
        disk.gate.clear()
        threading.Timer(1.5, disk.gate.set).start()
        woken = speaker.wake("a", WORDS, deadline_s=25.0)
        assert (woken.missed, woken.why) == (0, None)
        client.close()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", "a.b", "a\0b", "\N{GRINNING FACE}" * 2560, None, 7], ids=ascii
)
def test_a_bad_session_id_is_refused_before_any_call(one, name):
    calls = [
        lambda: one.client.save(name, LAYOUT, WORDS, nothing),
        lambda: one.client.wake(name, LAYOUT, nothing),
        lambda: one.client.prefetch(name),
        lambda: one.client.forget(name),
        lambda: one.client.fork(name, "b"),
        lambda: one.client.fork("a", name),
    ]
    for call in calls:
        with pytest.raises(BadSession, match="session id"):
            call()
    assert one.link.verbs == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([1, -2], "token -2"), ([1 << 40], "token 1099511627776"), ([0.5], "float64"),
        (["a"], "<U1"), ([[1, 2]], r"\[1, 2\]"), (None, "dimensional"),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_that_are_none_are_refused_before_any_call(one, words, says):
    with pytest.raises(BadInput, match=says):
        one.client.save("a", LAYOUT, words, nothing)
    assert one.link.verbs == []


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), float("inf"), 1e9, "1"], ids=str)
def test_a_deadline_that_is_none_is_refused_before_any_call(one, deadline_s):
    with pytest.raises(BadInput, match=f"deadline_s .* not '?{deadline_s}"):
        one.client.wake("a", LAYOUT, nothing, deadline_s=deadline_s)
    assert one.link.verbs == []


def test_a_session_of_another_layout_is_refused_with_both_fingerprints(one):
    one.speaker.save("a", WORDS)
    other = KVLayout("kit", "bfloat16", layers=4, kv_heads=2, head_dim=64, block_tokens=32)
    with pytest.raises(BadLayout, match=LAYOUT.fingerprint.hex()) as caught:
        one.client.wake("a", other, nothing)
    assert other.fingerprint.hex() in str(caught.value)
    assert one.speaker.wake("a", WORDS).missed == 0


def test_a_block_larger_than_a_slab_is_refused_with_its_size(one):
    wide = KVLayout("kit", "float16", layers=64, kv_heads=8, head_dim=128, block_tokens=256)
    with pytest.raises(BadLayout, match=f"a block of {wide.block_bytes} bytes"):
        one.client.save("a", wide, WORDS, nothing)
    assert pending(one.node)["reservations"] == 0


def test_an_unknown_session_raises(one):
    with pytest.raises(UnknownSession, match="'nobody'"):
        one.client.wake("nobody", LAYOUT, nothing)


# -- concurrency, closing -----------------------------------------------------------------------


def test_one_client_serves_many_threads_through_restarts(one):
    """Misses there are, wrong bytes and errors there are none."""
    failures, done = [], []
    end = threading.Event()

    def chat(n):
        speaker = Speaker(one.client)
        turn = 0
        try:
            while not end.is_set():
                turn += 1
                words = tokens(f"t{n}", (1 + turn % 3) * STEP + n)
                saved = speaker.save(f"t{n}", words)
                try:
                    woken = speaker.wake(f"t{n}", words)
                except UnknownSession:
                    assert saved.why is not None  # it was not saved, or not written
                    continue
                done.append(woken.n_tokens)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=chat, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        goal = len(done) + 30
        until(lambda goal=goal: failures or len(done) > goal, "sessions are served")
        one.node.stop()
        one.node.start()
    end.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(done) > 0


def test_closing_is_idempotent_and_ends_the_proof_of_life(one):
    one.speaker.save("a", WORDS)
    folder = one.config.shm_folder
    assert len([f for f in folder.iterdir() if f.name.startswith("client-")]) == 1
    one.client.close()
    one.client.close()
    assert [f for f in folder.iterdir() if f.name.startswith("client-")] == []


def test_local_is_a_whole_service_that_ends_with_its_client():
    with folders() as (root, shm):
        config = small(root, shm)
        with local(config) as client:
            speaker = Speaker(client)
            assert speaker.save("a", WORDS).blocks == 4
            assert speaker.wake("a", WORDS).found == (Medium.HBM,) * 4
            assert [n["tiers"][0]["medium"] for n in client.nodes()] == ["dram", "hbm"]
        assert list(shm.iterdir()) == []
        with local(config, gpu=False) as client:
            woken = Speaker(client).wake("a", WORDS)
            assert (woken.missed, set(woken.found)) == (0, {Medium.NVME})
            assert [n["tiers"][0]["medium"] for n in client.nodes()] == ["dram"]


def test_a_local_host_is_stopped_even_when_its_gpu_cannot_be(monkeypatch):
    with folders() as (root, shm):
        one = Local(small(root, shm))
        monkeypatch.setattr(one.gpu, "stop", lambda: fail_with(ZeroDivisionError("x"))(0))
        with pytest.raises(ZeroDivisionError):
            one.close()
        monkeypatch.undo()
        with pytest.raises(Unreachable):
            one.host.call("status", timeout_s=1.0)
        one.close()
        assert list(shm.iterdir()) == []


def test_a_local_gpu_that_cannot_start_leaves_no_host(monkeypatch):
    from tiered_kv import assemble

    with folders() as (root, shm):
        monkeypatch.setattr(assemble, "gpu_parts", lambda *_: fail_with(MemoryError("no"))(0))
        with pytest.raises(MemoryError):
            Local(small(root, shm))
        assert list(shm.iterdir()) == []
