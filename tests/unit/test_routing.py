"""Where a request goes: the pure choice, and what a router knows when it makes it."""

import random
from types import SimpleNamespace

import pytest

from tiered_kv.errors import BadInput
from tiered_kv.integrations.ray_serve.prompts import EVEN_MARKS, MARK_TOKENS, Prompt, prompt_of
from tiered_kv.integrations.ray_serve.report import MAX_MARKS, MAX_SESSIONS, Watch
from tiered_kv.integrations.ray_serve.seen import Seen
from tiered_kv.integrations.ray_serve.view import Placed, View
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.policies.routing import Replica, Shelf, expect, rank

MS = Prefill(1e-3)  # a millisecond a token


def words(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(1000)}-{i}" for i in range(n))


def chat(*contents: str, **more: object) -> SimpleNamespace:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[i % 3], "content": text} for i, text in enumerate(contents)]
    return SimpleNamespace(messages=messages, model="m", **more)


# -- the choice -------------------------------------------------------------------------------


def test_the_replica_that_holds_the_prompt_is_first_as_long_as_its_queue_is_short():
    holder = Replica("holder", MS, queue_s=0.5, shelves=(Shelf(900),))
    idle = Replica("idle", MS)
    assert [e.replica.name for e in rank(1000, [idle, holder])] == ["holder", "idle"]
    busy = Replica("holder", MS, queue_s=0.95, shelves=(Shelf(900),))
    assert [e.replica.name for e in rank(1000, [busy, idle])] == ["idle", "holder"]


def test_expected_finish_is_queue_and_load_and_the_prefill_of_what_is_missing():
    found = expect(1000, Replica("r", MS, queue_s=2.0, shelves=(Shelf(200), Shelf(800, 0.1))))
    assert found.cached == 800
    assert found.work_s == pytest.approx(0.1 + 0.2)
    assert found.finish_s == pytest.approx(2.3)


def test_what_is_slower_to_load_than_to_compute_is_not_counted_as_cached():
    found = expect(1000, Replica("r", MS, shelves=(Shelf(200), Shelf(800, 5.0))))
    assert (found.cached, found.work_s) == (200, pytest.approx(0.8))


def test_a_shelf_that_holds_more_than_the_prompt_is_loaded_in_part():
    found = expect(100, Replica("r", MS, shelves=(Shelf(1000, 0.5),)))
    assert found.work_s == pytest.approx(0.05)


def test_equals_are_told_apart_by_running_requests_then_sessions_then_names():
    a, b, c = (Replica(name, MS, sessions=2) for name in "abc")
    few = Replica("z", MS, sessions=1)
    busy = Replica("0", MS, running=1)
    order = [e.replica.name for e in rank(10, [c, busy, b, few, a])]
    assert order == ["z", "a", "b", "c", "0"]


def test_a_shelf_of_negative_tokens_is_refused_by_name():
    with pytest.raises(BadInput, match="tokens=-1"):
        Shelf(-1)


# -- prompts ----------------------------------------------------------------------------------


def test_a_second_turn_shares_the_marks_of_the_first():
    first = prompt_of(chat(words(2000), "why?"))
    second = prompt_of(chat(words(2000), "why?", "because", "and then?"))
    assert len(first.marks) >= 4
    assert second.marks[: len(first.marks)] == first.marks
    assert second.tokens > first.tokens


def test_another_model_salt_or_tool_shares_no_mark():
    text = words(2000)
    plain = {m.name for m in prompt_of(chat(text)).marks}
    for other in (
        chat(text, cache_salt="s"),
        chat(text, tools=[{"type": "function"}]),
        SimpleNamespace(messages=chat(text).messages, model="other"),
    ):
        assert not plain & {m.name for m in prompt_of(other).marks}


def test_text_moved_from_one_message_to_the_next_is_another_prompt():
    text = words(2000)
    moved = prompt_of(chat(text[:100], text[100:]))
    assert not set(moved.marks) & set(prompt_of(chat(text[:101], text[101:])).marks)


def test_token_ids_are_counted_exactly_and_text_by_its_length():
    ids = list(range(3 * MARK_TOKENS + 5))
    prompt = prompt_of(SimpleNamespace(prompt=ids, model="m"))
    assert prompt.tokens == len(ids)
    assert [m.tokens for m in prompt.marks] == [MARK_TOKENS, 2 * MARK_TOKENS, 3 * MARK_TOKENS]
    assert prompt_of(SimpleNamespace(prompt="x" * 400, model="m")).tokens == 100


def test_what_has_no_prompt_or_several_has_no_marks():
    for request in (object(), SimpleNamespace(prompt=None), SimpleNamespace(prompt=["a", "b"])):
        assert prompt_of(request).marks == ()


def test_a_very_long_prompt_has_few_marks():
    prompt = prompt_of(SimpleNamespace(prompt="x" * 4_000_000, model="m"))
    assert prompt.tokens == 1_000_000
    assert len(prompt.marks) <= EVEN_MARKS + 10
    assert prompt.marks[-1].tokens >= prompt.tokens // 2


def test_content_in_parts_has_marks_too():
    parts = [{"type": "text", "text": words(2000)}]
    request = SimpleNamespace(messages=[{"role": "user", "content": parts}], model="m")
    assert prompt_of(request).marks == prompt_of(request).marks != ()


# -- what an engine still holds ---------------------------------------------------------------


def test_an_engine_forgets_what_it_used_longest_ago_and_tails_before_heads():
    seen = Seen(4 * MARK_TOKENS)
    head = words(2000)
    first, second = prompt_of(chat(head)), prompt_of(chat(words(2000, 1)))
    seen.note(first, "a")
    assert seen.holds(first, "a") == first.tokens
    seen.note(second, "b")
    assert seen.holds(second, "b") == second.tokens
    assert seen.holds(first) < first.marks[-1].tokens
    assert seen.holds(first, "a") < first.tokens


def test_a_session_covers_its_answers_and_ends_when_forgotten():
    seen = Seen(1 << 20)
    seen.note(Prompt(100), "a", answered=50)
    assert seen.holds(Prompt(170), "a") == 150
    assert seen.newest_sessions(8) == {"a": 150}
    seen.forget("a")
    assert seen.holds(Prompt(170), "a") == 0


# -- what a router knows ----------------------------------------------------------------------


def two_nodes() -> View:
    view = View()
    view.there({"r1": "n1", "r2": "n1", "r3": "n2"})
    return view


def first_of(view: View, prompt: Prompt, session: str | None, now: float = 0.0, **more) -> str:
    names = more.pop("names", ("r1", "r2", "r3"))
    placed = more.pop("placed", None)
    return view.rank(prompt, session, names, more, placed, now)[0].replica.name


def test_sessions_are_spread_and_then_stay_where_they_are():
    view = two_nodes()
    homes: dict[str, str] = {}
    for i in range(6):
        session = f"s{i}"
        homes[session] = first_of(view, Prompt(1000), session)
        view.routed(session, homes[session], Prompt(1000), session, 0.0, 0.0)
        view.completed(session, homes[session], 0.0)
    assert sorted(homes.values()) == ["r1", "r1", "r2", "r2", "r3", "r3"]
    for session, home in homes.items():
        assert first_of(view, Prompt(1100), session) == home


def test_a_session_whose_replica_is_gone_goes_to_another_one_of_its_node():
    view = two_nodes()
    view.routed("q", "r2", Prompt(1000), "s", 0.0, 0.0)
    view.there({"r1": "n1", "r3": "n2"})
    view.routed("other", "r1", Prompt(9), "t", 0.0, 0.0)  # r3 has fewer sessions
    view.completed("other", "r1", 0.0)
    [best, rest] = view.rank(Prompt(1000), "s", ("r1", "r3"), {}, None, 0.0)
    assert best.replica.name == "r1"
    assert 0 < best.work_s < rest.work_s


def test_a_session_is_known_as_long_as_a_replica_of_its_node_is_there():
    view = two_nodes()
    view.routed("q", "r2", Prompt(1000), "s", 0.0, 0.0)
    view.there({"r1": "n1", "r3": "n2"})
    assert view.knows("s")
    view.there({"r3": "n2"})
    assert not view.knows("s")


def test_a_session_that_only_the_directory_knows_goes_to_its_node():
    view = two_nodes()
    assert first_of(view, Prompt(1000), "s", placed=Placed("n2", 900)) == "r3"
    far = Placed("n2", 900, bring_s=60.0)
    assert first_of(view, Prompt(1000), "s", placed=far) != "r3"


def test_a_long_queue_moves_a_session_and_its_end_brings_it_back():
    view = two_nodes()
    view.routed("q", "r1", Prompt(1000), "s", 0.1, 0.0)
    view.completed("q", "r1", 0.1)
    view.routed("long", "r1", Prompt(50_000), None, 50.0, 0.1)
    assert first_of(view, Prompt(1000), "s", now=0.2) == "r2"
    view.completed("long", "r1", 3.0)
    assert first_of(view, Prompt(1000), "s", now=3.0) == "r1"


def test_the_backlog_shrinks_as_time_passes():
    view = two_nodes()
    view.routed("q", "r1", Prompt(1000), "s", 0.0, 0.0)
    view.routed("long", "r1", Prompt(50_000), None, 5.0, 0.0)
    assert first_of(view, Prompt(1000), "s", now=0.0) != "r1"
    assert first_of(view, Prompt(1000), "s", now=5.0) == "r1"


def test_requests_of_other_routers_count_by_the_queue_that_serve_reports():
    view = two_nodes()
    view.routed("q", "r1", Prompt(1000), "s", 0.0, 0.0)
    view.completed("q", "r1", 0.0)
    assert first_of(view, Prompt(1000), "s", r1=1, r2=0, r3=0) == "r2"


def test_what_a_replica_reports_is_known_to_a_router_that_has_just_started():
    watch = Watch()
    prompt = prompt_of(chat(words(2000)))
    turn = watch.began(prompt, "s", 0.0)
    watch.first(turn, 2.0)
    watch.ended(turn, 10)
    view = two_nodes()
    view.heard("r3", watch.report())
    assert view.knows("s")
    assert not view.knows("t")
    assert first_of(view, prompt, "s") == "r3"
    assert first_of(view, prompt, None) == "r3"


# -- what a replica reports -------------------------------------------------------------------


def served(watch: Watch, session: str, began: float, took: float) -> None:
    turn = watch.began(Prompt(1000), session, began)
    watch.first(turn, began + took)
    watch.first(turn, began + 100.0)  # later pieces say nothing
    watch.ended(turn, 5)


def test_prefill_is_the_median_of_cold_requests_that_were_alone():
    watch = Watch()
    served(watch, "warm-up", 0.0, 9.0)
    served(watch, "a", 10.0, 2.0)
    assert watch.prefill_s_per_token is None
    served(watch, "b", 20.0, 2.2)
    assert watch.prefill_s_per_token == pytest.approx(0.0022)
    served(watch, "a", 30.0, 0.001)  # it was here already
    first = watch.began(Prompt(1000), "c", 40.0)
    served(watch, "d", 41.0, 50.0)  # not alone
    watch.ended(first, 0)
    assert watch.prefill_s_per_token == pytest.approx(0.0022)


def test_a_replica_that_measured_itself_slow_keeps_its_sessions():
    view = two_nodes()
    view.routed("q", "r1", Prompt(1000), "s", 0.0, 0.0)
    view.completed("q", "r1", 0.0)
    for name, rate in (("r1", 0.01), ("r2", 0.0001), ("r3", 0.0001)):
        view.heard(name, {"prefill_s_per_token": rate})
    assert first_of(view, Prompt(1050), "s") == "r1"


def test_a_request_that_failed_before_its_first_token_leaves_nothing_behind():
    watch = Watch()
    watch.ended(watch.began(Prompt(1000), "a", 0.0), 0)
    assert watch.report()["sessions"] == {}


def test_a_report_is_bounded_however_much_was_served():
    watch = Watch()
    watch.has_room_for(1 << 40)
    for i in range(3 * MAX_SESSIONS):
        turn = watch.began(prompt_of(chat(words(800, i))), f"s{i}", float(i))
        watch.first(turn, float(i))
        watch.ended(turn, 1)
    report = watch.report()
    assert len(report["sessions"]) == MAX_SESSIONS
    assert len(report["marks"]) <= MAX_MARKS
    assert f"s{3 * MAX_SESSIONS - 1}" in report["sessions"]
