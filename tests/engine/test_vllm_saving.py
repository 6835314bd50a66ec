"""Saves into a real node: whose bytes they are, when pages are free, what a node may do wrong."""

import threading
from collections.abc import Iterator

import pytest
from connector_kit import GROUP, PAGE, Rig, hashes_of, rig
from service_kit import LAYOUT, LONG_S, Service, service, until

from tiered_kv.errors import BadInput, Unreachable
from tiered_kv.integrations.vllm.plans import Said, Store
from tiered_kv.sessions import Session, SessionId

PAGES = [3, 4, 5, 6, 20, 21, 22, 23, 40, 41]
"""Two blocks and a tail of two pages."""
HASHES = hashes_of("a", len(PAGES))


@pytest.fixture
def node() -> Iterator[Service]:
    with service(gpu=False) as one:
        yield one


def check(node: Service, store: Store, wanted: list[bytes]) -> None:
    """Another engine loads what was saved, byte by byte."""
    pages = [page for span in store.spans for page in span.pages]
    with rig(node) as other:
        assert other.loaded(other.load("again", store, pages)) == set()
        assert other.bytes_of(pages) == wanted


def test_what_was_saved_is_what_the_pages_held(node: Service) -> None:
    with rig(node, seed="one") as one:
        wanted = one.bytes_of(PAGES)
        store = one.save("a", HASHES, PAGES)
        assert one.held(store.keys[0]) == ["Held"] * 3
        assert one.counts["save.blocks"] == 3
        one.wipe(PAGES)
        check(node, store, wanted)


def test_blocks_that_are_held_are_not_copied_again(node: Service) -> None:
    with rig(node, seed="one") as one:
        wanted = one.bytes_of(PAGES)
        store = one.save("a", HASHES, PAGES)
        one.wipe(range(64), 7)
        one.save("a", HASHES, PAGES)
        assert one.counts["save.blocks"] == 3
        assert one.counts["save.held"] == 3
        check(node, store, wanted)


def test_the_pages_of_the_last_save_are_held_until_it_was_copied(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.copying.gate.clear()
        one.saver.submit(one.store("a", HASHES, PAGES, last=True))
        assert one.copying.came.wait(LONG_S)
        assert one.saver.released() == set()
        one.copying.gate.set()
        until(lambda: one.saver.released() == {"a"}, "the pages released")
        assert one.saver.released() == set()


def test_pages_are_held_for_earlier_saves_of_their_request(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.copying.gate.clear()
        wanted = one.bytes_of(PAGES)
        store = one.store("a", HASHES, PAGES)
        one.saver.submit(store)
        one.saver.submit(Store("a", (), ((),), (None,), last=True))
        assert one.copying.came.wait(LONG_S)
        assert one.saver.released() == set()
        one.copying.gate.set()
        until(lambda: one.saver.released() == {"a"}, "the pages released")
        one.wipe(PAGES, 9)  # another request's by now
        until(lambda: one.told().get("a") == 2, "both saves ended")
        check(node, store, wanted)


def test_a_node_that_hangs_gets_no_pages_and_never_the_bytes_of_others(node: Service) -> None:
    gate = threading.Event()
    node.to_host.before["reserve"] = lambda args: gate.wait(LONG_S)
    with rig(node, seed="one", patience_s=0.01) as one:
        store = one.store("a", HASHES, PAGES, last=True)
        one.saver.submit(store)
        until(lambda: one.saver.released() == {"a"}, "the pages released though the node hangs")
        one.wipe(PAGES, 9)
        gate.set()
        until(lambda: one.told().get("a"), "the end of the save")
        assert one.held(store.keys[0]) == ["Absent"] * 3
        assert one.counts["save.late"] == 1
        assert "save.blocks" not in one.counts


def test_a_preempted_request_is_not_saved_from_pages_that_were_given_away(node: Service) -> None:
    gate, came = threading.Event(), threading.Event()
    node.to_host.before["reserve"] = lambda args: (came.set(), gate.wait(LONG_S))
    with rig(node, seed="one") as one:
        store = one.store("a", HASHES, PAGES)
        one.saver.submit(store)
        assert came.wait(LONG_S)
        one.saver.drain(("other", "a"))  # does not wait for the node
        one.wipe(PAGES, 9)
        gate.set()
        until(lambda: one.told().get("a"), "the end of the save")
        assert one.held(store.keys[0]) == ["Absent"] * 3
        assert one.counts["save.preempted"] == 1


def test_preemption_waits_for_a_copy_that_runs(node: Service) -> None:
    with rig(node, seed="one") as one:
        wanted = one.bytes_of(PAGES)
        one.copying.gate.clear()
        store = one.store("a", HASHES, PAGES)
        one.saver.submit(store)
        assert one.copying.came.wait(LONG_S)
        order: list[str] = []

        def preempt() -> None:
            one.saver.drain(("a",))
            order.append("drained")
            one.wipe(PAGES, 9)

        thread = threading.Thread(target=preempt)
        thread.start()
        thread.join(0.05)
        assert order == []
        one.copying.gate.set()
        thread.join(LONG_S)
        assert order == ["drained"]
        until(lambda: one.told().get("a"), "the end of the save")
        check(node, store, wanted)


def test_preemption_ends_the_saves_of_its_request_only(node: Service) -> None:
    gate, came = threading.Event(), threading.Event()
    node.to_host.before["reserve"] = lambda args: (came.set(), gate.wait(LONG_S))
    with rig(node, seed="one") as one:
        first = one.store("a", HASHES, PAGES)
        second = one.store("b", hashes_of("b", GROUP), [50, 51, 52, 53])
        one.saver.submit(first)
        one.saver.submit(second)
        assert came.wait(LONG_S)
        one.saver.drain(("a",))
        gate.set()
        until(lambda: len(one.told()) == 2, "both ended")
        assert one.held(first.keys[0] + second.keys[0]) == ["Absent"] * 3 + ["Held"]


def test_without_a_node_pages_are_released_at_once_and_nothing_is_called(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.link.up = False
        one.saver.submit(one.store("a", HASHES, PAGES, last=True))
        assert one.saver.released() == {"a"}
        until(lambda: one.told().get("a"), "the end of the save")
        assert node.to_host.verbs == []


@pytest.mark.parametrize("verb", ["reserve", "commit", "hello"])
@pytest.mark.parametrize("error", [Unreachable("away"), BadInput("no"), RuntimeError("a bug")])
def test_whatever_a_call_raises_the_pages_come_back(
    node: Service, verb: str, error: Exception
) -> None:
    def fail(args: object) -> None:
        raise error

    node.to_host.before[verb] = fail
    with rig(node, seed="one") as one:
        store = one.store("a", HASHES, PAGES, last=True)
        one.saver.submit(store)
        until(lambda: one.saver.released() == {"a"}, "the pages released")
        until(lambda: one.told().get("a"), "the end of the save")
        del node.to_host.before[verb]
        assert one.held(store.keys[0]) == ["Absent"] * 3
        one.wipe(range(64), 9)
        wanted = one.bytes_of(PAGES)
        again = one.save("a", HASHES, PAGES)  # and the saver goes on
        check(node, again, wanted)


def test_a_commit_that_was_lost_leaves_no_reservation(node: Service) -> None:
    def lose(answer: object) -> None:
        raise Unreachable("the answer was lost")

    with rig(node, seed="one") as one:
        node.to_host.before["commit"] = lambda args: lose(args)
        one.save("a", HASHES, PAGES)
        del node.to_host.before["commit"]
        one.save("b", hashes_of("b", GROUP), [50, 51, 52, 53])  # settles what is owed


def test_a_refused_save_is_counted_and_keeps_the_pool(node: Service) -> None:
    pages = list(range(64))
    with rig(node, seed="one") as one:
        for i in range(4):  # 64 blocks for a pool of 32: room is made, or some are refused
            one.save(f"r{i}", hashes_of(i, 64), pages, sessions=(), last=False)
        assert one.link.forgotten == 0
        assert one.counts["save.blocks"] >= 32


def test_an_unknown_session_does_not_cost_the_pool(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.save("first", hashes_of("b", GROUP), [50, 51, 52, 53])
        session = session_of_rig(one)
        store = one.store("a", HASHES, PAGES, sessions=(session,), said=SAID)
        one.saver.submit(store)
        one.saver.drain(("a",))
        until(lambda: one.told().get("a"), "the end of the save")
        assert one.link.forgotten == 0
        assert not [name for name in one.counts if "Unknown" in name]


# -- sessions -------------------------------------------------------------------------------

SAID = Said(ended=False, stopped="stop", pause_s=60.0, priority=1)


def session_of_rig(one: Rig) -> Session:
    run = one.store("a", HASHES, PAGES).keys[0]
    return Session(SessionId("chat"), LAYOUT.fingerprint, run, len(PAGES) * PAGE, True, used_s=0.0)


def test_the_session_is_put_with_its_blocks_and_hinted_afterwards(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.save("a", HASHES, PAGES, sessions=(session_of_rig(one),), said=SAID, last=True)
        verbs = [v for v in node.to_host.verbs if v in ("reserve", "commit", "put_session", "hint")]
        assert verbs == ["reserve", "commit", "hint"]
        (row,) = one.link.call("list_sessions")
        assert (row["id"], row["tokens"]) == ("chat", len(PAGES) * PAGE)


def test_a_session_whose_blocks_are_all_held_is_put_without_a_copy(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.save("a", HASHES, PAGES)
        store = Store("a", (), ((),), (None,), (session_of_rig(one),), True, SAID)
        one.saver.submit(store)
        assert one.saver.released() == {"a"}  # at once: nothing is read
        until(lambda: one.told().get("a") == 2, "the end of the save")
        assert [row["id"] for row in one.link.call("list_sessions")] == ["chat"]


def test_an_ended_hint_after_a_session_makes_it_leave(node: Service) -> None:
    with rig(node, seed="one") as one:
        said = Said(ended=True, stopped="stop", pause_s=None, priority=None)
        one.save("a", HASHES, PAGES, sessions=(session_of_rig(one),), said=said, last=True)
        assert one.link.call("list_sessions") == []


# -- restarts -------------------------------------------------------------------------------


def test_after_a_restart_of_the_node_saves_go_on(node: Service) -> None:
    with rig(node, seed="one") as one:
        one.save("a", HASHES, PAGES)
        node.host.stop(flush=False)
        node.host.start()
        other = hashes_of("b", GROUP)
        wanted = one.bytes_of([50, 51, 52, 53])
        stores = [one.save(f"r{i}", other, [50, 51, 52, 53]) for i in range(3)]
        assert one.held(stores[-1].keys[0]) == ["Held"]
        check(node, stores[-1], wanted)


def test_a_node_that_restarts_between_reserve_and_commit_holds_nothing(node: Service) -> None:
    def restart(args: object) -> None:
        node.to_host.before.clear()
        node.host.stop(flush=False)
        node.host.start()

    with rig(node, seed="one") as one:
        node.to_host.before["commit"] = restart
        store = one.save("a", HASHES, PAGES)
        assert one.held(store.keys[0]) == ["Absent"] * 3
        assert one.counts["save.StaleHandle"] == 1


def test_slots_of_another_life_are_never_written(node: Service) -> None:
    """The layout is known to the new life by another engine, and the old pool is still mapped."""
    with rig(node, seed="one") as one, rig(node, seed="two") as other:
        one.save("a", HASHES, PAGES)
        node.host.stop(flush=False)
        node.host.start()
        kept = other.save("b", hashes_of("b", GROUP), [50, 51, 52, 53])
        wanted = other.bytes_of([50, 51, 52, 53])
        store = one.save("c", hashes_of("c", GROUP), [50, 51, 52, 53])
        assert one.held(store.keys[0]) == ["Absent"]
        assert one.link.forgotten > 0
        check(node, kept, wanted)
        again = one.save("c", hashes_of("c", GROUP), [50, 51, 52, 53])
        check(node, again, one.bytes_of([50, 51, 52, 53]))


# -- the end --------------------------------------------------------------------------------


def alive(node: Service) -> list[str]:
    return [file.name for file in node.config.shm_folder.glob("client-*")]


def test_closing_ends_the_thread_and_the_proof_of_life(node: Service) -> None:
    one = rig(node, seed="one")
    one.save("a", HASHES, PAGES)
    assert len(alive(node)) == 1
    one.__exit__()
    until(lambda: not one.saver._thread.is_alive(), "the end of the thread")
    assert alive(node) == []


def test_closing_does_not_wait_for_a_node_that_hangs(node: Service) -> None:
    gate, came = threading.Event(), threading.Event()
    with rig(node, seed="one") as first:
        first.save("x", hashes_of("x", GROUP), [50, 51, 52, 53])
    node.to_host.before["reserve"] = lambda args: (came.set(), gate.wait(LONG_S))
    one = rig(node, seed="one", patience_s=0.01)
    store = one.store("a", HASHES, PAGES)
    one.saver.submit(store)
    assert came.wait(LONG_S)
    one.saver.close()
    one.wipe(PAGES, 9)
    gate.set()
    until(lambda: not one.saver._thread.is_alive(), "the end of the thread")
    assert one.held(store.keys[0]) == ["Absent"] * 3
    assert alive(node) == []
    one.__exit__()
