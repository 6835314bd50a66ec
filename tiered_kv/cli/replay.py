"""`tiered-kv replay`: what policies and sizes would have done with a trace of yours."""

import csv
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiered_kv.cli.options import Options, common, json_target, one_size, words
from tiered_kv.cli.output import Screen, emit, rows, table

if TYPE_CHECKING:
    from tiered_kv.cli.plots import Tiers
    from tiered_kv.sim.replay import Replayed
    from tiered_kv.sim.sweep import Task
    from tiered_kv.sim.traces import Trace
    from tiered_kv.sim.two_tier import Fill

FORMATS = ("mooncake", "claude-code", "recorded")
PICTURES = (".pdf", ".png", ".svg")
POINTS = 400
"""Points of a curve over time."""


def _picture(_: click.Context, __: click.Parameter, file: str | None) -> str | None:
    if file is not None and Path(file).suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{file!r} does not end in {', '.join(PICTURES)}")
    return file


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="mooncake",
              show_default=True, help="What the file is.")  # fmt: skip
@click.option("--policy", "policies", default="lru,adaptive", show_default=True, callback=words,
              metavar="NAME,...", help="Eviction policies.")  # fmt: skip
@click.option("--blocks", "sizes", default="1000,10000", show_default=True, callback=words,
              metavar="N,...", help="Sizes of the cache.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), metavar="N",
              help="Replays at a time [default: one for each core].")  # fmt: skip
@click.option(
    "--hints",
    is_flag=True,
    help="Also with what stop reasons say of the next request, where policies use it.",
)
@click.option("--csv", "csv_to", metavar="FILE", help="The table as CSV.")
@click.option("--plot", "plot_to", metavar="FILE", callback=_picture,
              help="Hit-ratio curves as PNG or SVG, and the bytes that two tiers of the smallest "
              "and the largest size hold over time; needs matplotlib.")  # fmt: skip
@click.option("--block-bytes", callback=one_size, default="160MiB", show_default=True,
              metavar="SIZE", help="Of a block in the plot [of a 70B model].")  # fmt: skip
@json_target
@common
def replay(
    _: Options, path: Path, form: str, policies: tuple[str, ...], sizes: tuple[str, ...],
    jobs: int | None, hints: bool, csv_to: str | None, plot_to: str | None, block_bytes: int,
    json_to: str | None,
) -> None:  # fmt: skip
    """Replay a trace through the service's own hierarchy.

    One tier of so many blocks, one request at a time; a hit is a block of the longest resident
    prefix. fifo, lru_head_first, s3fifo, sieve, gdsf and min may evict the middle of a prefix, as
    in the literature; the service itself never does.
    """
    from tiered_kv.sim.sweep import sweep, tasks_of
    from tiered_kv.sim.traces import Trace

    if plot_to is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'tiered-kv[plot]'")
    trace = Trace(path, form)
    tasks = tasks_of(policies, [_number(text) for text in sizes], hints)
    with Screen(json_to) as screen:
        found = sweep(trace, tasks, jobs or len(os.sched_getaffinity(0)), screen.step)
        headings = ("policy", ">blocks", ">hit %", ">requests", ">accesses", ">accesses/s", ">s")
        screen.show(rows(table(*headings), [_cells(one) for one in found]))
        if plot_to is not None:
            from tiered_kv.cli.plots import draw

            draw(plot_to, trace.name, found, _tiers(trace, tasks, block_bytes, screen))
    if csv_to is not None:
        with Path(csv_to).open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([[h.lstrip(">") for h in headings], *map(_cells, found)])
    if json_to is not None:
        _report(json_to, trace.name, found)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"--blocks: {text!r} is not a whole number") from None


def _cells(one: "Replayed") -> list[str]:
    rate = one.accesses / one.seconds if one.seconds else 0.0
    return [one.policy, str(one.blocks), f"{one.hit_percent:.2f}", str(one.requests),
            str(one.accesses), f"{rate:.0f}", f"{one.seconds:.1f}"]  # fmt: skip


def _report(json_to: str, name: str, found: Sequence["Replayed"]) -> None:
    from tiered_kv.bench.report import Result, document
    from tiered_kv.machine import facts

    results = [
        Result(f"replay/{name}/{one.policy}/{one.blocks}", one.hit_percent, "%") for one in found
    ]
    emit(document(results, facts(()).as_dict()), json_to)


def _tiers(
    trace: "Trace", tasks: Sequence["Task"], block_bytes: int, screen: Screen
) -> "Tiers | None":
    """A replay through two tiers of the smallest and the largest size, if there are two."""
    from tiered_kv.cli.plots import Tiers
    from tiered_kv.policies import SERVING
    from tiered_kv.sim.two_tier import TwoTier
    from tiered_kv.sizes import Size

    dram, nvme = min(task.blocks for task in tasks), max(task.blocks for task in tasks)
    policy = next((t.policy for t in tasks if t.policy in SERVING), None)
    if dram == nvme or policy is None:
        return None
    total = trace.size()
    fills: list[Fill] = []
    tiers = TwoTier(dram, nvme, policy=policy)
    for number, fill in enumerate(tiers.fills(trace, max(1, total // POINTS)), 1):
        fills.append(fill)
        screen.step("two tiers for the plot", min(number, POINTS), POINTS)
    return Tiers(policy, dram, nvme, Size(block_bytes), fills)
