"""Load or recompute: the published break-even points, and never slower than recomputing."""

import math
from dataclasses import replace
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
    MFU,
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
from tiered_kv.policies.links import Link, Meter
from tiered_kv.policies.load_or_recompute import (
    IN_POOL,
    Decision,
    Hit,
    Prefill,
    break_even_bytes_per_s,
    decide,
    modelled_s,
)

BLOCK_TOKENS, BLOCK_BYTES = BLOCK.block_tokens, BLOCK.block_bytes

MEDIA = 3

links = st.builds(
    Link,
    st.one_of(st.just(0.0), st.floats(1e3, 1e13)),
    st.floats(0, 10),
    st.floats(0, 1e13),
)
media = st.lists(links, min_size=MEDIA, max_size=MEDIA)
copies = st.none() | links
prefills = st.builds(
    Prefill, st.floats(0, 1e-2), st.floats(0, 1e-6), st.just(0.0) | st.floats(0, 5)
)


@st.composite
def hits(draw: st.DrawFn) -> Hit:
    """Hits that lie in stretches here and there, or wholly in the first medium."""
    blocks = draw(st.integers(0, 60))
    stretches = draw(st.lists(st.integers(IN_POOL, MEDIA - 1), max_size=5))
    where = tuple(p for p in stretches for _ in range(-(-blocks // len(stretches))))[:blocks]
    return Hit(
        blocks, draw(st.integers(1, 1024)), draw(st.integers(1, 1 << 28)),
        draw(st.integers(0, 10_000)), draw(st.sampled_from([1, 2, 32, 80])), where,
        draw(st.integers(0, 10_000)),
    )  # fmt: skip


def stepped_s(load: int, hit: Hit, media: list[Link], prefill: Prefill, copy: Link | None) -> float:
    """The same as `modelled_s`, block by block and layer by layer."""
    at = hit.before_tokens + load * hit.block_tokens
    end = hit.before_tokens + hit.blocks * hit.block_tokens + hit.new_tokens
    compute = prefill.seconds(float(at), end)
    where = (hit.where or (0,) * hit.blocks)[:load]
    if any(media[i].wait_s() == math.inf for i in where if i != IN_POOL):
        return math.inf
    if load and copy is not None and copy.wait_s() == math.inf:
        return math.inf
    read = {i: media[i].wait_s() for i in where if i != IN_POOL}
    engine = copy.queued_bytes / copy.bytes_per_s if copy and load else 0.0
    for place in where:
        if place != IN_POOL:
            read[place] += hit.block_bytes / media[place].bytes_per_s
        if copy is not None:
            engine = max(engine, read.get(place, 0.0)) + hit.block_bytes / copy.bytes_per_s
    streams = [(media[i].wait_s(), ended) for i, ended in read.items()]
    if copy is not None and load:
        streams = [(max([copy.wait_s(), *read.values()]), engine + copy.latency_s)]
    done = prefill.queued_s
    for layer in range(1, hit.layers + 1):
        there = [wait + (ended - wait) * layer / hit.layers for wait, ended in streams]
        done = max([done, *there]) + compute / hit.layers
    return done


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
    assert decide(hit, [Link(even * 0.99)], prefill).load == 0
    assert decide(hit, [Link(even * 1.01)], prefill).load == 16


@given(hits(), media, prefills, copies)
def test_a_decision_is_never_modelled_slower_than_either_extreme(
    hit: Hit, media: list[Link], prefill: Prefill, copy: Link | None
) -> None:
    made = decide(hit, media, prefill, copy)
    assert made.seconds <= made.recompute_all_s
    assert made.seconds <= made.load_all_s
    assert made.load + made.recompute == hit.blocks
    assert made.load >= 0
    assert made.recompute >= 0
    assert 0 <= made.read_s <= made.seconds * (1 + 1e-9)
    assert made.seconds == modelled_s(made.load, hit, media, prefill, copy)


@given(hits(), media, prefills, copies)
def test_no_other_number_of_blocks_is_faster_when_gone_through_step_by_step(
    hit: Hit, media: list[Link], prefill: Prefill, copy: Link | None
) -> None:
    made = decide(hit, media, prefill, copy)
    stepped = [stepped_s(n, hit, media, prefill, copy) for n in range(hit.blocks + 1)]
    modelled = [modelled_s(n, hit, media, prefill, copy) for n in range(hit.blocks + 1)]
    assert modelled == pytest.approx(stepped, rel=1e-6, abs=1e-9)
    assert made.seconds <= min(stepped) * (1 + 1e-6) + 1e-9
    assert made.load_all_s == pytest.approx(stepped[-1], rel=1e-6, abs=1e-9)
    assert made.recompute_all_s == pytest.approx(stepped[0], rel=1e-6, abs=1e-9)


@given(hits(), media, prefills, copies, st.integers(0, MEDIA - 1), st.floats(0, 1e12))
def test_a_longer_queue_never_makes_a_decision_faster(
    hit: Hit, media: list[Link], prefill: Prefill, copy: Link | None, which: int, more: float
) -> None:
    one = media[which]
    busier = list(media)
    busier[which] = Link(one.bytes_per_s, one.latency_s, one.queued_bytes + more)
    before = decide(hit, media, prefill, copy).seconds
    assert decide(hit, busier, prefill, copy).seconds >= before * (1 - 1e-9)


def test_media_are_read_side_by_side_and_the_copy_goes_on_meanwhile() -> None:
    free = Prefill(1e-9)
    hit = Hit(40, 256, 1_000_000, new_tokens=1, where=(0,) * 20 + (1,) * 20)
    one, two = Link(1e9), Link(2e9)
    assert modelled_s(40, hit, [one, two], free) == pytest.approx(0.020, rel=1e-3)
    # A copy of 10 GB/s takes 100 us a block, and is ready one block after the last was read.
    assert modelled_s(40, hit, [one, one], free, Link(10e9)) == pytest.approx(0.0221, rel=1e-2)
    # One of 1 GB/s is what binds.
    assert modelled_s(40, hit, [one, two], free, Link(1e9)) == pytest.approx(0.041, rel=1e-3)
    pooled = replace(hit, where=(IN_POOL,) * 40)
    assert modelled_s(40, pooled, [], free, Link(10e9)) == pytest.approx(0.004, rel=1e-2)
    assert decide(pooled, [], Prefill(1e-6)).load == 40  # the engine reads it where it is


def test_a_hit_is_loaded_up_to_the_tier_that_is_not_worth_it() -> None:
    hit = Hit(16, BLOCK_TOKENS, BLOCK_BYTES, where=(IN_POOL,) * 4 + (0,) * 4 + (1,) * 8)
    fast, slow, dead = Link(64e9), Link(1e9), Link(0.0)
    prefill, copy = prefill_of(H800), Link(100e9)
    assert decide(hit, [fast, fast], prefill, copy).load == 16
    assert decide(hit, [fast, slow], prefill, copy).load == 8
    assert decide(hit, [fast, dead], prefill, copy).load == 8
    assert decide(hit, [slow, fast], prefill, copy).load == 4
    assert decide(hit, [fast, fast], prefill, Link(1e9)).load == 0
    assert decide(hit, [fast, fast], prefill, dead).load == 0
    assert decide(hit, [fast, dead], prefill, copy).load_all_s == math.inf


def test_what_waits_for_the_gpu_anyway_may_be_loaded_meanwhile() -> None:
    hit, slow = Hit(16, BLOCK_TOKENS, BLOCK_BYTES), Link(6e9)
    assert decide(hit, [slow], prefill_of(H800)).load == 0
    busy = replace(prefill_of(H800), queued_s=1.0)
    made = decide(hit, [slow], busy)
    assert made.load == 16
    assert made.recompute_all_s > 1.0
    assert made.seconds == pytest.approx(1.0, rel=1e-2)


def test_tokens_before_the_hit_make_recomputing_dearer() -> None:
    link = Link(break_even_bytes_per_s(prefill_of(H800), 8192, TOKEN_BYTES) * 0.99)
    hit = Hit(16, BLOCK_TOKENS, BLOCK_BYTES, new_tokens=0)
    assert decide(hit, [link], prefill_of(H800)).load == 0
    assert decide(replace(hit, before_tokens=8192), [link], prefill_of(H800)).load == 16


def test_a_busy_tier_is_left_alone() -> None:
    prefill, hit = prefill_of(H800), Hit(16, BLOCK_TOKENS, BLOCK_BYTES)
    assert decide(hit, [Link(64e9)], prefill).load == 16
    assert decide(hit, [Link(64e9, queued_bytes=64e9)], prefill).load == 0
    assert decide(hit, [Link(64e9, latency_s=1.0)], prefill).load == 0
    assert decide(hit, [Link(0.0)], prefill).load == 0


def test_nothing_is_loaded_when_nothing_was_hit() -> None:
    made = decide(Hit(0, BLOCK_TOKENS, BLOCK_BYTES, 100), [], prefill_of(H800))
    assert made == Decision(0, 0, *[pytest.approx(made.recompute_all_s)] * 3)


def test_layers_that_overlap_make_a_slow_tier_worth_part_of_a_hit() -> None:
    """Below break-even one layer at a time still saves: copy some, compute the rest meanwhile."""
    prefill = prefill_of(H800)
    slow = Link(break_even_bytes_per_s(prefill, 8192, TOKEN_BYTES) / 2)
    whole = decide(Hit(16, BLOCK_TOKENS, BLOCK_BYTES, layers=1), [slow], prefill)
    layered = decide(Hit(16, BLOCK_TOKENS, BLOCK_BYTES, layers=LAYERS), [slow], prefill)
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
        (lambda: Prefill(1e-3, queued_s=-1.0), "queued_s=-1.0"),
        (lambda: Hit(1, 0, 16), "block_tokens=0"),
        (lambda: Hit(1, 16, 16, before_tokens=-1), "before_tokens=-1"),
        (lambda: Hit(3, 16, 16, where=(0, 0)), r"where = \(0, 0\) is not one place for each of 3"),
        (lambda: decide(Hit(1, 16, 16, where=(1,)), [Link(1e9)], Prefill(1.0)), r"where = \(1,\)"),
        (lambda: decide(Hit(1, 16, 16, where=(-2,)), [Link(1e9)], Prefill(1.0)), r"\(-2,\)"),
        (lambda: decide(Hit(1, 16, 16), [], Prefill(1.0)), r"where = \(0,\)"),
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
    [(A800 * MFU, 1, SAVED), (A800 * MFU, LAYERS, SAVED), (H800 * MFU, 1, SAVED),
     (H800 * MFU, LAYERS, SAVED), (A800, 1, SAVED), (H800, LAYERS, SAVED), (H800, 1, 0.5)],
)  # fmt: skip
def test_a_healthy_tier_halves_the_time_to_the_first_token_and_more(
    flops: float, layers: int, at_least: float
) -> None:
    """Host memory over PCIe 5.0 x16 (64 GB/s), busy half of the time, hits of 80 % and more.

    56 % less at least; the last row is what remains without overlap on the faster GPUs if they
    computed at the very peak of their data sheet.
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
    assert results["8xA800 at peak/break-even"].value == pytest.approx(5.9, abs=0.05)
    assert results["8xH800 at peak/break-even"].value == pytest.approx(18.6, abs=0.05)
    assert results["8xH800/break-even"].value == pytest.approx(18.6 * MFU, abs=0.05)
    throttled = [r for name, r in results.items() if name.endswith("throttled/p99")]
    assert len(throttled) == 8
    assert all(r.holds for r in throttled)
    assert [name for name, r in results.items() if r.holds is False] == []
    # Nothing is promised for GPUs at their very peak, and one row of them misses the bar.
    unpromised = {name: r for name, r in results.items() if r.bar and r.holds is None}
    assert all("at peak" in name for name in unpromised)
    missed = [name for name, r in unpromised.items() if r.ratio and r.bar and r.ratio > r.bar]
    assert missed == ["8xH800 at peak/whole/healthy/mean"]
    assert [step[1:] for step in steps] == [(i, 8) for i in range(8)]
