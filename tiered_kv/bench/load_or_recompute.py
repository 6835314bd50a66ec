"""`tiered-kv bench load-or-recompute`: modelled times to the first token, the policy deciding.

Nothing is timed here: requests of a seeded stream share one tier, first come first served, and the
times are those of the model in `policies.load_or_recompute`. The policy believes its meter, the
tier does what it does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from statistics import fmean

from tiered_kv.bench.report import Result, compared
from tiered_kv.policies.links import Link, Meter
from tiered_kv.policies.load_or_recompute import (
    Hit,
    Prefill,
    break_even_bytes_per_s,
    decide,
    modelled_s,
)

# A 70B model with grouped queries (80 layers, hidden size 8192, 8 queries a KV head) in BF16, and
# dense BF16 operations a second of 8 GPUs by their data sheets.
LAYERS, D, GQA, SCALAR_BYTES = 80, 8192, 8, 2
TOKEN_BYTES = 2 * LAYERS * D // GQA * SCALAR_BYTES  # keys and values: 327,680
A800_FLOPS, H800_FLOPS = 8 * 312e12, 8 * 989.5e12
PREFIX_TOKENS = 8192
PUBLISHED = {"8xA800": 5.9e9, "8xH800": 18.6e9}
"""Break-even bytes a second at the peak of these GPUs: Mooncake (FAST'25), eq. 2."""

MFU = 0.63
"""Share of their peak that GPUs reach in prefill: the most that we know of a measurement for
(Llama 3 405B on 128 H100, arXiv 2411.01783). What is more common, 0.3 to 0.5, favours loading."""

HEALTHY_BYTES_PER_S = 64e9
"""Host memory over PCIe 5.0 x16."""

BLOCK_TOKENS = 512
BLOCK = Hit(0, BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)

LATE = 1.02
"""p99 against recomputing, at most, behind a tier that is not worth it."""
SAVED = 0.56
"""Of the mean, at least, behind a healthy tier at hits of 80 % and more."""

ROUNDING = 0.01
"""Relative; of the published break-even points."""

Progress = Callable[[str, int, int], None]


def prefill_of(flops: float) -> Prefill:
    """That model on GPUs of so many operations a second."""
    return Prefill.of_model(layers=LAYERS, d=D, a=4, b=22, flops=flops)


def stream(
    bytes_per_s: float, prefill: Prefill, meter: Meter, layers: int, n: int = 3_000, seed: int = 4
) -> Iterator[tuple[float, float]]:
    """Seconds of each request, and when all of it is recomputed: 4k to 16k tokens of hits of 80 %
    and more, arriving so that loading all of them would keep the tier busy half of the time."""
    rng = Random(seed)
    now = busy_until = 0.0
    for _ in range(n):
        blocks = rng.randrange(8, 33)
        new = rng.randrange(1, blocks * BLOCK_TOKENS // 4)
        hit = replace(BLOCK, blocks=blocks, new_tokens=new, layers=layers)
        now += rng.expovariate(bytes_per_s / 2 / (20 * hit.block_bytes))
        backlog_s = max(0.0, busy_until - now)
        made = decide(hit, [meter.link(backlog_s * meter.bytes_per_s)], prefill)
        really = Link(bytes_per_s, queued_bytes=backlog_s * bytes_per_s)
        if copied := made.load * hit.block_bytes:
            busy_until = max(now, busy_until) + copied / bytes_per_s
            meter.note(copied, copied / bytes_per_s)
        yield modelled_s(made.load, hit, [really], prefill), made.recompute_all_s


def percentile(values: list[float], percent: int) -> float:
    """By rank."""
    return sorted(values)[len(values) * percent // 100]


def run(progress: Progress | None = None) -> list[Result]:
    """Break-even points, a tier throttled to a third of them, and a healthy one.

    With GPUs at `MFU`, and at the peak of their data sheets. No GPU prefills at its peak, which is
    the worst case for loading: nothing is promised there for a healthy tier, but the bar is shown.
    """
    results: list[Result] = []
    cases = [
        (gpu, flops, mfu, how, layers)
        for gpu, flops in (("8xA800", A800_FLOPS), ("8xH800", H800_FLOPS))
        for mfu in (MFU, 1.0)
        for how, layers in (("whole", 1), ("layers", LAYERS))
    ]
    for done, (gpu, flops, mfu, how, layers) in enumerate(cases):
        peak = mfu == 1.0
        name = f"load-or-recompute/{gpu}{' at peak' if peak else ''}"
        if progress is not None:
            progress(f"{name}/{how}", done, len(cases))
        prefill = prefill_of(flops * mfu)
        even = break_even_bytes_per_s(prefill, PREFIX_TOKENS, TOKEN_BYTES)
        slow = list(stream(even / 3, prefill, Meter(HEALTHY_BYTES_PER_S), layers))
        fast = list(stream(HEALTHY_BYTES_PER_S, prefill, Meter(HEALTHY_BYTES_PER_S), layers))
        late, anew = (percentile([pair[i] for pair in slow], 99) for i in (0, 1))
        took, whole = (fmean([pair[i] for pair in fast]) for i in (0, 1))
        if how == "whole":  # the same for both
            results.append(_break_even(name, even, PUBLISHED[gpu] if peak else None))
        healthy = compared(f"{name}/{how}/healthy/mean", took * 1e3, "ms", "recompute",
                           whole * 1e3, bar=1 - SAVED, at_most=True)  # fmt: skip
        results += [
            compared(f"{name}/{how}/throttled/p99", late * 1e3, "ms", "recompute",
                     anew * 1e3, bar=LATE, at_most=True),
            replace(healthy, holds=None) if peak else healthy,
        ]  # fmt: skip
    return results


def _break_even(name: str, even: float, published: float | None) -> Result:
    found = Result(f"{name}/break-even", even / 1e9, "GB/s")
    if published is None:
        return found
    near = abs(even / published - 1) < ROUNDING
    return replace(found, against="published", against_value=published / 1e9,
                   ratio=even / published, bar=1.0, holds=near)  # fmt: skip
