"""Contenders that do the same work in turn, so that a busy moment of the machine meets all."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.bench.report import Result, compared

GB = 1e9


class Pass(NamedTuple):
    """One execution: wall seconds, and CPU seconds of all threads of the process, user and
    system."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Contender:
    """Somebody who can do the work. `ours` are compared with the best of the others, and those
    that are `judged` have a bar to reach."""

    name: str
    ours: bool
    run: Callable[[], Pass]
    judged: bool = True


def timed(work: Callable[[], None]) -> Pass:
    """Execute once and measure."""
    cpu, started = _cpu_s(), time.perf_counter()
    work()
    return Pass(time.perf_counter() - started, _cpu_s() - cpu)


def contest(
    contenders: Sequence[Contender], rounds: int, deadline_s: float
) -> dict[str, list[Pass]]:
    """Passes of each, by name. The order alternates; after `deadline_s` (of `time.monotonic`) no
    round begins, but three are always made (or `rounds`, if that is less)."""
    passes: dict[str, list[Pass]] = {c.name: [] for c in contenders}
    for turn in range(rounds):
        if turn >= 3 and time.monotonic() > deadline_s:
            break
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            passes[contender.name].append(contender.run())
    return passes


def judge(
    leg: str,
    block_bytes: int,
    nbytes: int,
    contenders: Sequence[Contender],
    passes: dict[str, list[Pass]],
    bar: float | None,
) -> list[Result]:
    """Median GB/s and CPU seconds a GB of everybody; ours against the fastest of the others.

    The ratio is the median over the rounds: both passes of a round met the same machine.
    """
    gb = nbytes / GB
    speed = {n: gb / statistics.median(p.seconds for p in ps) for n, ps in passes.items()}
    cpu = {n: statistics.median(p.cpu_s for p in ps) / gb for n, ps in passes.items()}
    best = max((c.name for c in contenders if not c.ours), key=speed.__getitem__)
    results = []
    for contender in contenders:
        name = contender.name
        label = f"io/{leg}/{name}/{block_bytes}"
        if not contender.ours:
            results.append(Result(label, speed[name], "GB/s"))
            results.append(Result(f"{label}/cpu-s-per-gb", cpu[name], "CPU s/GB"))
            continue
        pairs = zip(passes[name], passes[best], strict=True)
        ratio = statistics.median(raw.seconds / our.seconds for our, raw in pairs)
        judged = bar if contender.judged else None
        results += [
            compared(label, speed[name], "GB/s", best, speed[best], ratio=ratio, bar=judged),
            compared(f"{label}/cpu-s-per-gb", cpu[name], "CPU s/GB", best, cpu[best]),
        ]
    return results


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
