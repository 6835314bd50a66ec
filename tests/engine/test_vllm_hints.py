"""Hints of a request: what makes no sense is ignored and counted, and never raises."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.inputs import LONGEST_S
from tiered_kv.integrations.vllm.hints import Hints, hints
from tiered_kv.node_hints import _check_hint


def of(**values: Any) -> Hints:
    return hints({"tiered_kv": values})


def test_a_request_without_hints_is_stored_and_has_no_session() -> None:
    for params in (None, {}, {"do_remote_prefill": True}, {"tiered_kv": None}, {"tiered_kv": {}}):
        assert hints(params) == Hints()


def test_all_hints_are_read() -> None:
    found = of(session="chat-17", ended=True, pause_s=120, priority=-3, store=False)
    assert found == Hints("chat-17", True, 120.0, -3, False, 0)


@pytest.mark.parametrize("value", [[], "chat", 3, True])
def test_hints_that_are_no_mapping_count_as_one_bad_value(value: Any) -> None:
    assert hints({"tiered_kv": value}) == Hints(bad=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", "with space"),
        ("session", ""),
        ("session", "x" * 129),
        ("session", 17),
        ("ended", "yes"),
        ("ended", 1),
        ("store", None),
        ("pause_s", -1),
        ("pause_s", float("nan")),
        ("pause_s", float("inf")),
        ("pause_s", "60"),
        ("pause_s", True),
        ("pause_s", 1e9),
        ("priority", 1.0),
        ("priority", True),
        ("priority", 9),
        ("priority", -9),
        ("unknown", 1),
    ],
)
def test_a_bad_value_is_ignored_and_counted(name: str, value: Any) -> None:
    assert of(**{name: value}) == Hints(bad=1)


def test_a_bad_value_does_not_take_the_good_ones_with_it() -> None:
    found = of(session="chat-17", pause_s="soon", priority=2)
    assert found == Hints("chat-17", priority=2, bad=1)


def test_a_pause_of_days_is_told_as_the_longest_one_that_a_node_takes() -> None:
    assert of(pause_s=3 * 86_400).pause_s == LONGEST_S


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
names = st.sampled_from(["session", "ended", "pause_s", "priority", "store", "other"])


@given(st.dictionaries(names, scalars | st.lists(scalars, max_size=2)))
def test_whatever_was_taken_is_something_that_a_node_accepts(values: dict[str, Any]) -> None:
    found = of(**values)
    _check_hint(found.ended, None, found.pause_s, found.priority)
    assert found.bad <= len(values)
