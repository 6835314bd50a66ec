"""What is saved of a request, when its pages may go, and what is said of its session."""

from dataclasses import replace

import pytest
from connector_kit import (
    BLOCK,
    GROUP,
    PAGE,
    Engine,
    Scripted,
    engine,
    hashes_of,
    request,
)
from service_kit import LAYOUT, LONG_S, until

from tiered_kv.integrations.vllm.keeping import session_of
from tiered_kv.integrations.vllm.plans import Said, Store, Told
from tiered_kv.sessions import SessionId, check_session, session_id


class Beside:
    """A worker in the scheduler's own process."""

    def __init__(self) -> None:
        self.stores: list[Store] = []

    def store(self, store: Store) -> None:
        self.stores.append(store)


def pages_of(store: Store) -> list[int]:
    return [page for span in store.spans for page in span.pages]


def ended(one: Engine, *stores: Store) -> None:
    """The workers have ended these saves on all ranks."""
    ranks = len(one.names.layouts)
    for store in stores:
        one.s.heard(Told(stored={store.request: ranks}), [], [])


# -- while it runs --------------------------------------------------------------------------


def test_complete_blocks_are_saved_in_the_step_after_they_were_computed() -> None:
    with engine() as one:
        asked = request("a", 3 * GROUP, rest=1)
        one.admit(asked)
        assert one.step(asked, n=BLOCK + PAGE).stores == ()  # computed in this very step
        (first,) = one.step(asked, n=2 * PAGE).stores
        ids = one.pages["a"]
        assert pages_of(first) == ids[:GROUP]
        assert first.parents == (None,)
        assert not first.last
        assert one.step(asked, n=PAGE).stores == ()  # 7 pages by then
        (second,) = one.step(asked, n=1).stores
        assert pages_of(second) == ids[GROUP : 2 * GROUP]
        assert second.parents == first.keys[0][-1:]


def test_what_is_in_flight_is_not_saved() -> None:
    with engine() as one:
        asked = request("a", 2 * GROUP)
        one.admit(asked)
        one.step(asked, n=BLOCK)
        asked.num_in_flight_tokens = PAGE
        assert one.step(asked, n=1).stores == ()
        asked.num_in_flight_tokens = 0
        assert len(one.step(asked, n=1).stores) == 1


def test_blocks_that_the_node_holds_are_not_saved_again() -> None:
    with engine(Scripted(blocks=2)) as one:
        asked = request("a", 3 * GROUP, rest=1)
        loaded = one.admit(asked)
        assert loaded == 2 * BLOCK
        one.step()
        one.s.heard(None, ["a"], [])
        one.step(asked)
        (store,) = one.step(asked, n=1).stores
        assert pages_of(store) == one.pages["a"][2 * GROUP : 3 * GROUP]
        assert store.parents[0] == one.names.block(asked.block_hashes, 1)[0]


def test_nothing_is_saved_while_it_is_loaded_or_not_known_to_be_held() -> None:
    link = Scripted(blocks=1)
    with engine(link) as one:
        asked = request("a", 2 * GROUP)
        one.admit(asked)
        asked.num_computed_tokens = asked.num_tokens  # as vLLM says of what is still on its way
        assert one.step(asked).stores == ()


def test_a_request_may_ask_not_to_be_stored() -> None:
    with engine() as one:
        asked = request("a", 2 * GROUP, store=False, session="chat")
        assert one.run(asked).stores == ()
        assert one.finish(asked) is False


def test_only_prompts_are_kept_where_the_options_say_so() -> None:
    for generated, blocks in ((True, 2), (False, 1)):
        with engine(save_generated=generated) as one:
            asked = request("a", GROUP, rest=1)
            one.admit(asked)
            one.step(asked)
            asked.block_hashes = hashes_of(0, 2 * GROUP)
            asked.num_tokens = 2 * BLOCK + 2
            one.pages["a"] += list(range(GROUP))
            asked.num_computed_tokens = 2 * BLOCK + 1
            (store,) = one.step(asked, n=1).stores
            assert len(store.spans) == blocks


def test_every_rank_saves_the_same_pages_under_names_of_its_own() -> None:
    with engine(ranks=2) as one:
        (store,) = one.run(request("a", 2 * GROUP)).stores
        assert len(store.keys) == len(store.parents) == 2
        assert set(store.keys[0]).isdisjoint(store.keys[1])


def test_nothing_is_saved_while_there_is_no_node_and_all_of_it_afterwards() -> None:
    link = Scripted()
    link.up = False
    with engine(link) as one:
        asked = request("a", 2 * GROUP)
        assert one.run(asked).stores == ()
        link.up = True
        (store,) = one.step(asked, n=1).stores
        assert len(store.spans) == 2


# -- preemption -----------------------------------------------------------------------------


def test_saves_that_were_not_sent_are_dropped_when_the_pages_go() -> None:
    with engine() as one:
        asked = request("a", 2 * GROUP)
        one.admit(asked)
        one.step(asked)
        one.s._keeping.computed(one.s._tracked["a"], one.pages.get)
        assert one.s._keeping.is_saving()
        step = one.step(preempted=["a"])
        assert step.stores == ()
        assert step.preempted == {"a"}
        assert not one.s._keeping.is_saving()
        asked.num_computed_tokens = 0
        assert one.finish(asked) is False  # nobody reads its pages


def test_a_resumed_request_is_saved_from_its_first_block_on() -> None:
    with engine() as one:
        asked = request("a", 2 * GROUP)
        assert len(one.run(asked).stores) == 1
        one.step(preempted=["a"])
        asked.num_computed_tokens = 0
        (store,) = one.run(asked).stores
        assert len(store.spans) == 2


def test_a_save_of_before_a_preemption_still_counts_as_under_way() -> None:
    with engine() as one:
        asked = request("a", 2 * GROUP, rest=0)
        (first,) = one.run(asked).stores
        one.step(preempted=["a"])
        asked.num_computed_tokens = 0
        (second,) = one.run(asked).stores
        ended(one, first)
        assert one.s._keeping.is_saving(second.keys[0][0])
        assert one.finish(asked) is True  # the second one still reads the pages
        ended(one, second, *one.step().stores)
        assert not one.s._keeping.is_saving()


# -- at its end -----------------------------------------------------------------------------


def test_the_incomplete_last_block_is_saved_at_the_end_and_the_pages_are_held() -> None:
    with engine() as one:
        asked = request("a", GROUP + 2, rest=3)
        (first,) = one.run(asked).stores
        assert one.finish(asked) is True
        (last,) = one.step().stores
        assert last.last
        assert [(s.first, len(s.pages)) for s in last.spans] == [(0, 2)]
        assert last.keys[0] == (one.names.block(asked.block_hashes, 1, 2)[0],)
        assert last.parents[0] == first.keys[0][-1]


def test_pages_are_held_until_earlier_saves_have_ended_too() -> None:
    """Its last block is complete and on its way already, so there is nothing left to save."""
    with engine() as one:
        asked = request("a", GROUP, rest=0)
        (store,) = one.run(asked).stores
        assert pages_of(store) == one.pages["a"]
        assert one.finish(asked) is True
        (last,) = one.step().stores
        assert last == Store("a", (), ((),), (None,), last=True)


def test_pages_are_held_for_earlier_saves_whatever_the_request_says() -> None:
    for hints in ({"session": "chat", "ended": True}, {}):
        link = Scripted()
        with engine(link, ranks=2) as one:
            asked = request("a", GROUP, rest=3, **hints)
            assert len(one.run(asked).stores) == 1
            link.up = bool(hints)  # the node goes away while it copies
            assert one.finish(asked) is True
            (last,) = one.step().stores
            assert (last.last, last.spans, last.sessions) == (True, (), ())
            assert len(last.keys) == len(last.parents) == 2


def test_pages_go_at_once_when_all_is_saved() -> None:
    with engine(ranks=2) as one:
        asked = request("a", GROUP, rest=0)
        (store,) = one.run(asked).stores
        one.s.heard(Told(stored={"a": 1}), [], [])
        assert one.s._keeping.is_saving()
        one.s.heard(Told(stored={"a": 1}), [], [])
        assert one.finish(asked) is False
        assert one.step().stores == ()
        assert not one.s._keeping.is_saving(store.keys[0][0])
        assert dict(one.s._keeping._open) == {}
        assert one.s._keeping._keys == {}


def test_a_worker_in_the_same_process_gets_the_last_save_at_once() -> None:
    beside = Beside()
    with engine(beside=beside) as one:
        asked = request("a", GROUP, rest=3)
        one.admit(asked)
        one.step(asked)
        assert one.finish(asked) is True
        assert [pages_of(store) for store in beside.stores] == [[100, 101, 102, 103]]
        assert one.step().stores == ()


def test_a_request_that_computed_nothing_needs_no_pages() -> None:
    with engine() as one:
        asked = request("a", 9, session="chat")
        one.admit(asked)
        assert one.finish(asked) is False


def test_many_requests_leave_nothing_behind() -> None:
    with engine() as one:
        for i in range(50):
            asked = request(f"r{i}", GROUP + 1, seed=i)
            stores = list(one.run(asked).stores)
            assert one.finish(asked) is True
            ended(one, *stores, *one.step().stores)
        assert dict(one.s._keeping._open) == {}
        assert one.s._keeping._keys == {}
        assert not one.s._keeping.is_saving()


# -- sessions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("pages", "rest"), [(GROUP, 0), (GROUP, 3), (2 * GROUP + 1, 0), (2, 5)])
def test_the_session_covers_what_was_saved_on_every_rank(pages: int, rest: int) -> None:
    with engine(ranks=2) as one:
        asked = request("a", pages, rest=rest, session="chat", pause_s=60, priority=2)
        one.run(asked)
        assert one.finish(asked) is True
        (last,) = one.step().stores
        whole, tail = divmod(pages, GROUP)
        for rank, session in enumerate(last.sessions):
            assert check_session(session) == session
            assert session.id == ("chat" if rank == 0 else "chat@tp1")
            assert session.layout == one.names.layouts[rank].fingerprint
            assert session.n_tokens == pages * PAGE
            assert session.tail is bool(tail)
            run = [one.names.block(asked.block_hashes, i)[rank] for i in range(whole)]
            if tail:
                run.append(one.names.block(asked.block_hashes, whole, tail)[rank])
            assert list(session.run) == run
            assert len(run) == -(-session.n_tokens // LAYOUT.block_tokens)
        assert last.said == Said(False, "stop", 60.0, 2)


def test_a_session_is_put_also_where_all_blocks_are_held() -> None:
    with engine() as one:
        asked = request("a", GROUP, rest=0, session="chat")
        ended(one, *one.run(asked).stores)
        assert one.finish(asked) is True
        (last,) = one.step().stores
        assert last.spans == ()
        assert len(last.sessions) == 1


def test_an_ended_session_is_told_and_nothing_more_is_saved() -> None:
    link = Scripted()
    with engine(link, ranks=2) as one:
        asked = request("a", GROUP, rest=3, session="chat", ended=True)
        one.admit(asked)
        one.step(asked)
        assert one.finish(asked) is False
        until(lambda: len(link.verbs("hint")) == 2, "both ranks told", LONG_S)
        told = [(args, kwargs) for verb, args, kwargs in link.called if verb == "hint"]
        said = {"ended": True, "stopped": None, "pause_s": None, "priority": None}
        assert sorted(told, key=str) == [(("chat",), said), (("chat@tp1",), said)]


def test_why_a_request_stopped_is_told_by_vllms_own_names() -> None:
    from vllm.v1.engine import FinishReason

    for reason, told in (
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (None, "other"),
    ):
        with engine() as one:
            asked = replace(request("a", GROUP, session="chat"), reason=reason)
            one.run(asked)
            one.finish(asked)
            (last,) = one.step().stores
            assert last.said is not None
            assert last.said.stopped == told


def test_sessions_of_ranks_have_names_of_their_own_whatever_their_length() -> None:
    long = [SessionId("x" * 127 + c) for c in "ab"]
    given = [SessionId("chat"), SessionId("x" * 120), *long]
    names = [session_of(one, rank) for one in given for rank in (0, 1, 7, 1023)]
    assert len(set(names)) == len(names)
    assert [session_id(name) for name in names] == names
