"""The scheduler's side over a link that answers what the test says: lookups, loads, sharing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from connector_kit import (
    BLOCK,
    GROUP,
    PAGE,
    Engine,
    Request,
    Scripted,
    engine,
    hashes_of,
    released,
    request,
)
from service_kit import LONG_S, until

from tiered_kv.errors import BadInput
from tiered_kv.integrations.vllm import scheduling
from tiered_kv.integrations.vllm.plans import Store, Told


def eventually(check: Callable[[], Any], what: str) -> None:
    until(check, what, LONG_S)


# -- looking up -----------------------------------------------------------------------------


def test_nothing_is_known_while_a_lookup_is_under_way_and_nobody_waits() -> None:
    link = Scripted(blocks=2)
    link.gate.clear()
    with engine(link, lookup_wait_s=LONG_S) as one:
        asked = request("a", 9)
        assert one.s.matched(asked, 0) == (None, False)
        assert one.s.matched(asked, 0) == (None, False)
        link.gate.set()
        assert one.matched(asked) == (2 * BLOCK, True)
        assert len(link.verbs("find")) == 1  # asked once


def test_what_all_of_the_prompt_is_held_leaves_one_token_to_compute() -> None:
    with engine(Scripted(blocks=2)) as one:
        asked = request("a", 2 * GROUP, rest=0)
        assert one.matched(asked) == (2 * BLOCK - 1, True)
        ids = one.allocate(asked, 2 * BLOCK - 1)
        (load,) = one.step().loads
        assert [p for span in load.spans for p in span.pages] == ids[: 2 * GROUP]


def test_a_tail_behind_the_blocks_is_loaded_with_them() -> None:
    with engine(Scripted(blocks=1, tail=2)) as one:
        asked = request("a", 9)
        assert one.matched(asked) == (BLOCK + 2 * PAGE, True)
        ids = one.allocate(asked, BLOCK + 2 * PAGE)
        (load,) = one.step().loads
        assert [len(span.pages) for span in load.spans] == [GROUP, 2]
        assert load.spans[1].pages == tuple(ids[GROUP : GROUP + 2])
        assert load.keys[0] == (
            one.names.block(asked.block_hashes, 0)[0],
            one.names.block(asked.block_hashes, 1, 2)[0],
        )
        assert load.leases[0].keys == load.keys[0]
        assert len(load.checksums[0]) == 2


def test_pages_that_the_engine_has_are_not_loaded_again() -> None:
    with engine(Scripted(blocks=3)) as one:
        asked = request("a", 3 * GROUP, rest=5)
        have = BLOCK + 2 * PAGE
        tokens, _ = one.matched(asked, have)
        assert tokens == 3 * BLOCK - have
        assert one.link.verbs("find")[0][1] == 1  # skips the whole block only
        ids = one.allocate(asked, tokens, have)
        (load,) = one.step().loads
        assert [(s.first, len(s.pages)) for s in load.spans] == [(2, 2), (0, GROUP)]
        assert load.spans[0].pages == tuple(ids[GROUP + 2 : 2 * GROUP])
        assert load.keys[0] == tuple(one.names.block(asked.block_hashes, i)[0] for i in (1, 2))


def test_an_engine_that_has_it_all_asks_nothing() -> None:
    with engine(Scripted(blocks=2)) as one:
        assert one.s.matched(request("a", 8, rest=3), 8 * PAGE) == (0, False)
        assert one.s.matched(request("b", 0, rest=3), 0) == (0, False)
        assert one.link.verbs("find") == []


def test_an_engine_that_found_more_meanwhile_uses_the_rest_of_the_answer() -> None:
    with engine(Scripted(blocks=3)) as one:
        asked = request("a", 3 * GROUP, rest=5)
        assert one.matched(asked, 0)[0] == 3 * BLOCK
        tokens, _ = one.matched(asked, BLOCK)  # another request has computed it
        assert tokens == 2 * BLOCK
        one.allocate(asked, tokens, BLOCK)
        (load,) = one.step().loads
        assert (
            load.leases[0].keys
            == load.keys[0]
            == tuple(one.names.block(asked.block_hashes, i)[0] for i in (1, 2))
        )
        assert load.leases[0].slots == (1, 2)
        assert len(one.link.verbs("find")) == 1


def test_an_engine_that_lost_pages_meanwhile_asks_anew_and_gives_the_lease_back() -> None:
    link = Scripted(blocks=3)
    with engine(link) as one:
        asked = request("a", 3 * GROUP, rest=5)
        assert one.matched(asked, BLOCK)[0] == 2 * BLOCK
        assert one.matched(asked, 0)[0] == 3 * BLOCK
        assert [args[1] for args in link.verbs("find")] == [1, 0]
        eventually(lambda: released(link) == [101], "the first lease given back")


def test_an_engine_that_lost_pages_before_the_answer_came_gives_it_back_unseen() -> None:
    link = Scripted(blocks=3)
    link.gate.clear()
    with engine(link, lookup_wait_s=LONG_S) as one:
        asked = request("a", 3 * GROUP, rest=5)
        assert one.s.matched(asked, BLOCK) == (None, False)
        assert one.s.matched(asked, 0) == (None, False)
        eventually(lambda: len(link.verbs("find")) == 2, "both questions asked")
        link.gate.set()
        assert one.matched(asked, 0)[0] == 3 * BLOCK
        eventually(lambda: len(released(link)) == 1, "the answer to the first given back")


def test_a_lookup_that_takes_too_long_is_a_miss_and_the_node_is_suspected() -> None:
    link = Scripted(blocks=3)
    link.gate.clear()
    with engine(link, lookup_wait_s=0.001) as one:
        asked = request("a", 9)
        assert one.matched(asked) == (0, False)
        assert len(link.suspected) == 1
        assert one.s.counts["lookup.late"] == 1
        link.up = True  # it has answered again meanwhile
        assert one.s.matched(asked, 0) == (0, False)  # this request is computed, once and for all
        link.gate.set()
        eventually(lambda: released(link) == [101], "what was found too late given back")


def test_a_lookup_that_fails_is_a_miss_and_is_not_repeated() -> None:
    link = Scripted()
    for error in (BadInput("no"), RuntimeError("a bug")):
        link.error = error
        with engine(link) as one:
            assert one.matched(request("a", 9)) == (0, False)
            assert one.matched(request("a", 9)) == (0, False)
            assert one.s.counts["lookup.failed"] == 1
            assert one.s._asking.failed == 1


def test_a_lease_that_is_nearly_over_is_asked_for_anew_and_the_old_one_ended() -> None:
    link = Scripted(blocks=2)
    with engine(link, service={"lease_ttl_s": 1e-6}) as one:
        assert one.s.matched(request("a", 9), 0)[0] in (None, 2 * BLOCK)
        asked = request("b", 9)
        first = one.matched(asked)
        assert first[0] == 2 * BLOCK
        before = len(link.verbs("find"))
        assert one.matched(asked)[0] == 2 * BLOCK
        assert len(link.verbs("find")) > before
        eventually(lambda: len(released(link)) >= 1, "an old lease ended")


def test_an_answer_is_kept_until_the_engine_has_pages() -> None:
    link = Scripted(blocks=2)
    with engine(link) as one:
        asked = request("a", 9)
        for _ in range(5):
            assert one.matched(asked)[0] == 2 * BLOCK
        assert len(link.verbs("find")) == 1
        assert released(link) == []


def test_a_miss_is_believed_until_the_engine_has_pages() -> None:
    link = Scripted(blocks=0)
    with engine(link) as one:
        asked = request("a", 9)
        assert one.matched(asked) == (0, False)
        for _ in range(5):
            assert one.s.matched(asked, 0) == (0, False)  # at once: the request is not passed over
        assert len(link.verbs("find")) == 1


def test_what_is_faster_computed_is_not_loaded_and_not_saved_again() -> None:
    link = Scripted(blocks=2, load=0)
    with engine(link) as one:
        asked = request("a", 2 * GROUP)
        assert one.admit(asked) == 0
        one.step(asked)
        assert one.step(asked, n=1).stores == ()


def test_the_engine_may_decide_not_to_load_and_its_leases_end() -> None:
    link = Scripted(blocks=2)
    with engine(link) as one:
        asked = request("a", 9)
        assert one.matched(asked)[0] == 2 * BLOCK
        one.allocate(asked, 0)
        assert one.step(asked).loads == ()
        eventually(lambda: released(link) == [101], "the lease given back")


def test_no_node_is_a_miss_at_once() -> None:
    link = Scripted(blocks=2)
    link.up = False
    with engine(link) as one:
        assert one.s.matched(request("a", 9), 0) == (0, False)
        assert link.called == []


# -- loading --------------------------------------------------------------------------------


def test_a_load_is_sent_once_with_a_key_and_a_lease_for_every_rank() -> None:
    with engine(Scripted(blocks=2, leased=1), ranks=2) as one:
        asked = request("a", 9)
        one.admit(asked)
        (load,) = one.step().loads
        assert one.step().loads == ()
        assert [len(keys) for keys in load.keys] == [2, 2]
        assert set(load.keys[0]).isdisjoint(load.keys[1])
        assert [lease.keys for lease in load.leases] == [load.keys[0][:1], load.keys[1][:1]]
        assert load.leases[0].id != load.leases[1].id


def test_loads_by_layers_need_all_of_it_in_the_pool() -> None:
    for leased, by_layer in ((2, True), (1, False)):
        with engine(Scripted(blocks=2, leased=leased), load="layerwise") as one:
            asked = request("a", 9)
            tokens, later = one.matched(asked)
            assert (tokens, later) == (2 * BLOCK, not by_layer)
            one.allocate(asked, tokens)
            (load,) = one.step().loads
            assert load.by_layer is by_layer


def test_a_load_by_layers_is_not_saved_before_its_step_has_ended_well() -> None:
    with engine(Scripted(blocks=1, tail=2), load="layerwise") as one:
        asked = request("a", 9, session="chat")
        one.admit(asked)
        one.step(asked, n=PAGE)  # asynchronous scheduling: its output is not there yet
        asked.num_in_flight_tokens = PAGE
        assert one.step(asked, n=PAGE).stores == ()
        asked.num_in_flight_tokens = 2 * PAGE
        assert one.finish(asked) is False  # aborted: the tail may be garbage
        assert one.step().stores == ()


def test_a_request_whose_load_failed_is_computed_and_kept_anew() -> None:
    with engine(Scripted(blocks=2)) as one:
        asked = request("a", 2 * GROUP, rest=3)
        one.admit(asked)
        one.step()
        one.s.heard(None, ["a"], [one.pages["a"][5]])
        asked.num_computed_tokens = 5 * PAGE  # as vLLM cuts it
        assert one.s.matched(asked, 5 * PAGE) == (0, False)
        (first,) = one.step(asked).stores
        (second,) = one.step(asked, n=1).stores
        saved = [page for s in (first, second) for span in s.spans for page in span.pages]
        assert saved == one.pages["a"][: 2 * GROUP]
        one.step(preempted=["a"])
        assert one.s.matched(asked, 0) == (0, False)  # never again


def test_a_failure_on_one_rank_is_remembered_until_the_last_rank_has_ended() -> None:
    with engine(Scripted(blocks=2), ranks=2) as one:
        asked, other = request("a", 9), request("b", 9, seed="b")
        one.admit(asked)
        one.admit(other)
        one.step()
        one.s.heard(None, [], [one.pages["a"][0]])
        one.s.heard(None, ["a", "b"], [])
        assert one.s._tracked["a"].never
        assert one.s._tracked["a"].kept == 0
        assert not one.s._tracked["b"].never
        assert one.s._tracked["b"].kept == 2


def test_a_request_that_ends_while_it_is_loaded_keeps_its_pages_by_itself() -> None:
    with engine(Scripted(blocks=2)) as one:
        asked = request("a", 9, session="chat")
        one.admit(asked)
        one.step()
        assert one.finish(asked) is False
        assert one.step().stores == ()
        one.s.heard(None, ["a"], [])  # the load reports all the same
        assert one.s._loading == {}
        assert one.s._tracked == {}


def test_a_preempted_request_is_looked_up_again_and_its_lease_ends() -> None:
    link = Scripted(blocks=2)
    with engine(link) as one:
        asked = request("a", 9)
        assert one.matched(asked)[0] == 2 * BLOCK
        assert one.step(preempted=["a"]).preempted == {"a"}
        eventually(lambda: released(link) == [101], "the lease given back")
        assert one.matched(asked)[0] == 2 * BLOCK
        assert len(link.verbs("find")) == 2


def test_ended_requests_leave_nothing_behind() -> None:
    link = Scripted(blocks=1)
    with engine(link) as one:
        asked = [request(f"r{i}", 9, seed=i) for i in range(20)]
        for request_ in asked:
            one.matched(request_)
        for request_ in asked:
            assert one.finish(request_) is False
        eventually(lambda: len(released(link)) == 20, "all leases given back")
        assert one.s._tracked == {}
        assert one.finish(request("unknown", 3)) is False


# -- sharing --------------------------------------------------------------------------------


def test_a_request_waits_for_anothers_load_of_the_same_blocks_and_then_goes_on() -> None:
    with engine(Scripted(blocks=2)) as one:
        first, second = request("a", 9), request("b", 9)
        assert one.matched(second)[0] == 2 * BLOCK  # both have asked
        one.admit(first)
        one.step()
        assert one.s.matched(second, 0) == (None, False)
        assert one.s.counts["lookup.shared"] == 1
        eventually(lambda: len(released(one.link)) == 1, "the second lease given back")
        one.s.heard(None, ["a"], [])
        tokens, _ = one.matched(second, 2 * BLOCK)  # the engine has the blocks now
        assert tokens == 0


def test_a_request_with_other_blocks_does_not_wait() -> None:
    with engine(Scripted(blocks=2)) as one:
        one.admit(request("a", 9))
        assert one.matched(request("b", 9, seed="other"))[0] == 2 * BLOCK
        assert one.s.counts["lookup.shared"] == 0


def test_nobody_waits_for_ever_for_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(Scripted(blocks=2)) as one:
        one.admit(request("a", 9))
        second = request("b", 9)
        assert one.s.matched(second, 0) == (None, False)
        monkeypatch.setattr(scheduling, "SHARED_WAIT_S", -1.0)
        assert one.matched(second)[0] == 2 * BLOCK


def test_nobody_waits_longer_than_computing_takes() -> None:
    with engine(Scripted(blocks=2)) as one:
        for _ in range(2):
            one.s.prefill.note([(0, 512)], 1e-9)
        one.admit(request("a", 9))
        second = request("b", 9)
        assert one.s.matched(second, 0)[0] is None
        assert one.matched(second)[0] == 2 * BLOCK


def test_a_request_waits_for_anothers_save_until_every_rank_has_ended_it() -> None:
    with engine(Scripted(blocks=0), ranks=2) as one:
        first = request("a", 2 * GROUP)
        assert len(one.run(first).stores) == 1
        second = request("b", 2 * GROUP)
        assert one.s.matched(second, 0) == (None, False)
        one.s.heard(Told(stored={"a": 1}), [], [])
        assert one.s.matched(second, 0) == (None, False)
        one.s.heard(Told(stored={"a": 1}), [], [])
        assert one.matched(second) == (0, False)
        assert not one.s._keeping.is_saving()


# -- an engine's life -----------------------------------------------------------------------


def test_a_session_starts_coming_up_when_its_request_arrives() -> None:
    with engine(ranks=2) as one:
        one.s.arrived(request("a", 9, session="chat", pause_s="soon"))  # type: ignore[arg-type]
        eventually(lambda: len(one.link.verbs("prefetch")) == 2, "both ranks told")
        assert sorted(one.link.verbs("prefetch")) == [("chat",), ("chat@tp1",)]
        assert one.s.counts["hints.bad"] == 1


def test_after_a_reset_nothing_of_before_is_found_or_kept() -> None:
    link = Scripted(blocks=2)
    with engine(link) as one:
        running, waiting = request("a", 2 * GROUP), request("b", 9, seed="b")
        one.admit(running)
        one.s.heard(None, ["a"], [])
        assert one.matched(waiting)[0] == 2 * BLOCK
        asked_before = link.verbs("find")[-1][0]
        one.s.reset()
        eventually(lambda: 102 in released(link), "what waited gave its lease back")
        link.found["blocks"] = 0
        assert one.matched(waiting) == (0, False)
        assert set(link.verbs("find")[-1][0][0].run).isdisjoint(asked_before[0].run)
        one.step(running)
        assert one.step(running, n=1).stores == ()  # computed in part by the weights of before
        later = request("c", 2 * GROUP)
        (store,) = one.run(later).stores
        assert store.keys[0][0] == one.names.block(later.block_hashes, 0)[0]


def test_answers_that_come_after_the_end_raise_nothing() -> None:
    link = Scripted(blocks=2)
    link.gate.clear()
    one = Engine(link, lookup_wait_s=LONG_S)
    assert one.s.matched(request("a", 9), 0) == (None, False)
    eventually(lambda: len(link.verbs("find")) == 1, "the question asked")
    one.s.close()
    link.gate.set()
    one.s._asking.release([])
    one.s._asking.hint("release", 7)
    one.s._asking._threads.shutdown(wait=True)
    assert link.verbs("release") == []


def test_an_idle_engine_waits_a_moment_once_a_step_and_not_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        "tiered_kv.integrations.vllm.asking.Question.wait", lambda self, s: waits.append(s)
    )
    link = Scripted(blocks=2)
    link.gate.clear()
    with engine(link, lookup_wait_s=LONG_S) as one:
        for i in range(10):
            one.s.matched(request(f"r{i}", 9, seed=i), 0)
        assert len(waits) == 1
        one.step()
        one.s.matched(request("r0", 9, seed=0), 0)
        assert len(waits) == 2
        busy = request("busy", 9, seed="busy")
        one.step(busy)
        one.s.matched(request("r1", 9, seed=1), 0)
        assert len(waits) == 2  # an engine that computes does not wait


def test_steps_are_measured_while_the_engine_does_not_idle() -> None:
    with engine() as one:
        asked = request("a", 100)
        one.admit(asked)
        for step in range(6):
            one.s.step({"a": 128}, None, one.pages.get, float(step))
            asked.num_computed_tokens += 128
        found = one.s.prefill.prefill()
        assert found is not None
        assert found.seconds(0, 128) == pytest.approx(1.0, rel=0.3)
        one.s.heard(Told(loaded_bytes=64 << 20, load_s=0.5), [], [])
        link = one.s.copy.link(1)
        assert link is not None
        assert link.bytes_per_s == 128 << 20


def test_a_lookup_tells_the_node_what_the_engine_measured() -> None:
    with engine() as one:
        for _ in range(2):
            one.s.prefill.note([(0, 512)], 1.0)
        asked = request("a", 9, rest=3)
        one.matched(asked)
        asks, skip, new_tokens, prefill, copy, ttl_s = one.link.verbs("find")[0]
        assert len(asks[0].run) == 2
        assert (skip, new_tokens, copy, ttl_s) == (0, PAGE + 3, None, 30.0)
        assert prefill.seconds(0, 512) == pytest.approx(1.0)


def test_a_request_that_was_never_announced_is_served_all_the_same() -> None:
    with engine(Scripted(blocks=1)) as one:
        late = Request("late", hashes_of("late", 6), 6 * PAGE + 1, 6 * PAGE + 1)
        assert one.matched(late) == (BLOCK, True)


def test_requests_come_and_go_while_the_node_hangs_and_no_lease_is_left() -> None:
    link = Scripted(blocks=2)
    link.gate.clear()
    with engine(link, lookup_wait_s=LONG_S) as one:
        for i in range(50):
            asked = request(f"r{i}", 9, seed=i, session=f"s{i}")
            one.s.arrived(asked)  # type: ignore[arg-type]
            assert one.s.matched(asked, 0) == (None, False)
            assert one.finish(asked) is False
        link.gate.set()
        eventually(lambda: len(released(link)) == len(link.verbs("find")), "all leases ended")


def test_a_store_is_a_plain_value() -> None:
    with engine() as one:
        (store,) = one.run(request("a", 2 * GROUP)).stores
        assert isinstance(store, Store)
        assert hash(store) == hash(replace(store))
