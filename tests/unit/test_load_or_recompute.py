"""Load or recompute: the published break-even points, and never slower than recomputing."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.load_or_recompute import (
    A800_FLOPS as A800,
)
from tiered_kv.bench.load_or_recompute import (
    BLOCK,
    GQA,
    LATE,
    LAYERS,
    SAVED,
    SCALAR_BYTES,
    TOKEN_BYTES,
    D,
    percentile,
    prefill_of,
    run,
    stream,
)
from tiered_kv.bench.load_or_recompute import (
    H800_FLOPS as H800,
)
from tiered_kv.errors import BadInput
from tiered_kv.policies.load_or_recompute import (
    Decision,
    Hit,
    Link,
    Meter,
    Prefill,
    break_even_bytes_per_s,
    decide,
    modelled_s,
)

BLOCK_TOKENS, BLOCK_BYTES = BLOCK.block_tokens, BLOCK.block_bytes

links = st.builds(
    Link,
    st.one_of(st.just(0.0), st.floats(1e3, 1e13)),
    st.floats(0, 10),
    st.floats(0, 1e13),
)
prefills = st.builds(Prefill, st.floats(0, 1e-2), st.floats(0, 1e-6))
hits = st.builds(
    Hit,
    st.integers(0, 300),
    st.integers(1, 1024),
    st.integers(1, 1 << 28),
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 32, 80]),
)


@pytest.mark.parametrize(("flops", "published"), [(A800, 5.9), (H800, 18.6)])
def test_the_break_even_points_of_a_70b_model_are_the_published_ones(
    flops: float, published: float
) -> None:
    """Mooncake (FAST'25) eq. 2: loading `p` tokens pays when B / G > 2 d s / (gqa (a p d + b d^2)).

    It follows from layers (a p^2 d + b p d^2) / G seconds of computing against
    2 layers p d s / gqa bytes to load; layers and one p cancel.
    """
    p = 8192
    closed = flops * 2 * D * SCALAR_BYTES / (GQA * (4 * p * D + 22 * D * D))
    assert closed / 1e9 == pytest.approx(published, abs=0.05)
    ours = break_even_bytes_per_s(prefill_of(flops), p, TOKEN_BYTES)
    assert ours == pytest.approx(closed)


@pytest.mark.parametrize("flops", [A800, H800])
def test_the_decision_turns_at_the_break_even_point(flops: float) -> None:
    prefill, hit = prefill_of(flops), Hit(16, BLOCK_TOKENS, BLOCK_BYTES, new_tokens=0)
    even = break_even_bytes_per_s(prefill, 8192, TOKEN_BYTES)
    assert decide(hit, Link(even * 0.99), prefill).load == 0
    assert decide(hit, Link(even * 1.01), prefill).load == 16


@given(hits, links, prefills)
def test_a_decision_is_never_modelled_slower_than_either_extreme(
    hit: Hit, link: Link, prefill: Prefill
) -> None:
    made = decide(hit, link, prefill)
    assert made.seconds <= made.recompute_all_s
    assert made.seconds <= made.load_all_s
    assert made.load + made.recompute == hit.blocks
    assert made.load >= 0
    assert made.recompute >= 0
    assert made.seconds == modelled_s(made.load, hit, link, prefill)


@given(hits, links, prefills)
def test_no_other_number_of_blocks_is_modelled_faster(
    hit: Hit, link: Link, prefill: Prefill
) -> None:
    made = decide(hit, link, prefill)
    fastest = min(modelled_s(k, hit, link, prefill) for k in range(hit.blocks + 1))
    assert made.seconds <= fastest * (1 + 1e-9) + 1e-12


@given(hits, links, prefills, st.floats(0, 1e12))
def test_a_longer_queue_never_makes_a_decision_faster(
    hit: Hit, link: Link, prefill: Prefill, more: float
) -> None:
    busier = Link(link.bytes_per_s, link.latency_s, link.queued_bytes + more)
    assert decide(hit, busier, prefill).seconds >= decide(hit, link, prefill).seconds * (1 - 1e-9)


def test_a_busy_tier_is_left_alone() -> None:
    prefill, hit = prefill_of(H800), Hit(16, BLOCK_TOKENS, BLOCK_BYTES)
    assert decide(hit, Link(64e9), prefill).load == 16
    assert decide(hit, Link(64e9, queued_bytes=64e9), prefill).load == 0
    assert decide(hit, Link(64e9, latency_s=1.0), prefill).load == 0
    assert decide(hit, Link(0.0), prefill).load == 0


def test_nothing_is_loaded_when_nothing_was_hit() -> None:
    made = decide(Hit(0, BLOCK_TOKENS, BLOCK_BYTES, 100), Link(64e9), prefill_of(H800))
    assert made == Decision(0, 0, *[pytest.approx(made.recompute_all_s)] * 3)


def test_layers_that_overlap_make_a_slow_tier_worth_part_of_a_hit() -> None:
    """Below break-even one layer at a time still saves: copy some, compute the rest meanwhile."""
    prefill = prefill_of(H800)
    slow = Link(break_even_bytes_per_s(prefill, 8192, TOKEN_BYTES) / 2)
    whole = decide(Hit(16, BLOCK_TOKENS, BLOCK_BYTES, layers=1), slow, prefill)
    layered = decide(Hit(16, BLOCK_TOKENS, BLOCK_BYTES, layers=LAYERS), slow, prefill)
    assert whole.load == 0
    assert 0 < layered.load < 16
    assert layered.seconds < 0.75 * whole.seconds


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Link(-1.0), "bytes_per_s=-1.0"),
        (lambda: Link(float("nan")), "nan"),
        (lambda: Prefill(-1e-3), "linear_s=-0.001"),
        (lambda: Hit(-1, 16, 16), "blocks=-1"),
        (lambda: Hit(1, 0, 16), "block_tokens=0"),
        (lambda: Meter(0.0), "not 0.0"),
    ],
)
def test_measures_that_cannot_be_are_refused_with_the_value(make, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        make()


# -- whole streams of requests ------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_tier_throttled_below_break_even_costs_at_most_two_percent(layers: int) -> None:
    prefill = prefill_of(H800)
    slow = break_even_bytes_per_s(prefill, 8192, TOKEN_BYTES) / 3
    # It has just become slow: the meter still believes in what the self-test had measured.
    pairs = list(stream(slow, prefill, Meter(64e9), layers))
    ours, recompute = [p[0] for p in pairs], [p[1] for p in pairs]
    assert percentile(ours, 99) <= LATE * percentile(recompute, 99)
    assert percentile([a / b for a, b in pairs], 99) <= LATE
    assert sum(ours) <= 1.001 * sum(recompute)  # what it took to find out


@pytest.mark.parametrize(
    ("flops", "layers", "at_least"),
    [(H800, LAYERS, 0.65), (H800 / 2, 1, SAVED), (A800, 1, SAVED), (H800, 1, 0.5)],
)
def test_a_healthy_tier_halves_the_time_to_the_first_token_and_more(
    flops: float, layers: int, at_least: float
) -> None:
    """Host memory over PCIe 5.0 x16 (64 GB/s), busy half of the time, hits of 80 % and more.

    56 % less at least, with layers that overlap, or without at the half of their peak that GPUs
    reach; the last row is what remains without overlap on GPUs that compute at their very peak.
    """
    pairs = list(stream(64e9, prefill_of(flops), Meter(64e9), layers))
    saved = 1 - sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    assert saved >= at_least
    assert all(a <= b * (1 + 1e-9) for a, b in pairs)


def test_a_meter_follows_a_tier_that_slows_down_and_recovers() -> None:
    meter = Meter(64e9, latency_s=0.001, memory_bytes=1 << 30)
    rates = []
    for rate in (4e9, 64e9):
        for _ in range(40):
            meter.note(1 << 28, (1 << 28) / rate + 0.001)
            rates.append(meter.bytes_per_s)
        assert meter.bytes_per_s == pytest.approx(rate, rel=0.02)
    assert all(b <= a for a, b in pairwise(rates[:40]))
    meter.note(0, 1.0)
    meter.note(1, 0.0)
    assert meter.bytes_per_s == rates[-1]
    assert meter.link(5.0) == Link(rates[-1], 0.001, 5.0)


def test_the_benchmark_says_what_is_promised_and_whether_it_holds() -> None:
    steps: list[tuple[str, int, int]] = []
    results = {
        r.name.removeprefix("load-or-recompute/"): r for r in run(lambda *s: steps.append(s))
    }
    assert results["8xA800/whole/break-even"].value == pytest.approx(5.9, abs=0.05)
    assert results["8xH800/layers/break-even"].value == pytest.approx(18.6, abs=0.05)
    assert all(r.holds for name, r in results.items() if name.endswith("throttled/p99"))
    # Without overlap, GPUs at their very peak leave less to be saved than is promised.
    missed = [name for name, r in results.items() if r.holds is False]
    assert missed == ["8xH800/whole/healthy/mean"]
    assert [step[1:] for step in steps] == [(i, 4) for i in range(4)]
