"""What is measured of an engine while it works."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.integrations.vllm.rates import LEAST_COPY_BYTES, LEAST_TOKENS, CopyRate, PrefillRate

MIB = 1 << 20


def seconds(linear: float, quadratic: float, start: int, end: int) -> float:
    return linear * (end - start) + quadratic * (end * end - start * start)


def test_nothing_is_known_before_two_steps() -> None:
    rate = PrefillRate()
    assert rate.prefill() is None
    rate.note([(0, 512)], 1.0)
    assert rate.prefill() is None
    rate.note([(512, 1024)], 1.5)
    assert rate.prefill() is not None


@given(st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-6))
def test_both_terms_are_found_where_steps_tell_them_apart(linear: float, quadratic: float) -> None:
    rate = PrefillRate()
    for start in range(0, 8192, 512):
        rate.note([(start, start + 512)], seconds(linear, quadratic, start, start + 512))
    found = rate.prefill(queued_s=2.0)
    assert found is not None
    assert found.linear_s == pytest.approx(linear, rel=0.02, abs=1e-7)
    assert found.quadratic_s == pytest.approx(quadratic, rel=0.02, abs=1e-11)
    assert found.queued_s == 2.0


def test_equal_steps_give_their_mean_cost() -> None:
    rate = PrefillRate()
    for _ in range(5):
        rate.note([(0, 256)], 0.5)
    found = rate.prefill()
    assert found is not None
    assert found.seconds(0, 256) == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(64, 4096), st.floats(1e-6, 100.0)),
        min_size=2,
        max_size=30,
    )
)
def test_no_term_is_ever_negative(steps: list[tuple[int, int, float]]) -> None:
    rate = PrefillRate()
    for start, n, took in steps:
        rate.note([(start, start + n)], took)
    found = rate.prefill()
    assert found is not None  # or Prefill would have raised
    assert found.seconds(0, 1000) >= 0


def test_steps_that_tell_nothing_are_ignored() -> None:
    rate = PrefillRate()
    for _ in range(3):
        rate.note([(0, LEAST_TOKENS - 1)], 1.0)  # decoding
        rate.note([(0, 512)], 0.0)
        rate.note([(0, 512)], float("nan"))
        rate.note([], 1.0)
    assert rate.prefill() is None


def test_old_steps_fade() -> None:
    rate = PrefillRate()
    for _ in range(50):
        rate.note([(0, 512)], 10.0)
    for _ in range(400):
        rate.note([(0, 512)], 1.0)
    found = rate.prefill()
    assert found is not None
    assert found.seconds(0, 512) == pytest.approx(1.0, rel=0.05)


def test_chunks_of_one_step_add_up() -> None:
    rate = PrefillRate()
    for _ in range(2):
        rate.note([(0, 100), (1000, 1100)], 2.0)
    found = rate.prefill()
    assert found is not None
    assert found.seconds(0, 100) + found.seconds(1000, 1100) == pytest.approx(2.0, rel=1e-6)


def test_the_copy_rate_is_bytes_over_seconds_of_all_ranks() -> None:
    rate = CopyRate()
    assert rate.link() is None
    rate.note(LEAST_COPY_BYTES - 1, 100.0)  # too small to tell
    rate.note(64 * MIB, 0.0)
    assert rate.link() is None
    rate.note(64 * MIB, 0.5)
    one, four = rate.link(), rate.link(4)
    assert one is not None
    assert four is not None
    assert one.bytes_per_s == pytest.approx(128 * MIB)
    assert four.bytes_per_s == pytest.approx(512 * MIB)


def test_an_old_copy_rate_fades() -> None:
    rate = CopyRate()
    rate.note(256 * MIB, 100.0)
    for _ in range(100):
        rate.note(256 * MIB, 0.1)
    found = rate.link()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(2560 * MIB, rel=0.05)
