"""`tiered-kv replay`: what policies and sizes would have done with a trace of yours."""

import csv
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiered_kv.cli.options import Options, common, json_target, words
from tiered_kv.cli.output import Screen, emit, rows, table

if TYPE_CHECKING:
    from tiered_kv.sim.replay import Replayed

FORMATS = ("mooncake", "claude-code", "recorded")


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
@click.option("--csv", "csv_to", metavar="FILE", help="The table as CSV.")
@click.option("--plot", "plot_to", metavar="FILE",
              help="Hit-ratio curves as PNG or SVG; needs matplotlib.")  # fmt: skip
@json_target
@common
def replay(
    _: Options, path: Path, form: str, policies: tuple[str, ...], sizes: tuple[str, ...],
    jobs: int | None, csv_to: str | None, plot_to: str | None, json_to: str | None,
) -> None:  # fmt: skip
    """Replay a trace through the service's own hierarchy.

    One tier of so many blocks, one request at a time; a hit is a block of the longest resident
    prefix. fifo, lru_head_first, s3fifo, sieve, gdsf and min may evict the middle of a prefix, as
    in the literature; the service itself never does.
    """
    from tiered_kv.sim.sweep import sweep, tasks_of
    from tiered_kv.sim.traces import Trace

    if plot_to is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib, which is not installed")
    trace, tasks = Trace(path, form), tasks_of(policies, [_number(text) for text in sizes])
    with Screen(json_to) as screen:
        found = sweep(trace, tasks, jobs or len(os.sched_getaffinity(0)), screen.step)
        headings = ("policy", ">blocks", ">hit %", ">requests", ">accesses", ">accesses/s", ">s")
        screen.show(rows(table(*headings), [_cells(one) for one in found]))
    if csv_to is not None:
        with Path(csv_to).open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([[h.lstrip(">") for h in headings], *map(_cells, found)])
    if plot_to is not None:
        _plot(plot_to, path, found)
    if json_to is not None:
        _report(json_to, path, found)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"--blocks: {text!r} is not a whole number") from None


def _cells(one: "Replayed") -> list[str]:
    rate = one.accesses / one.seconds if one.seconds else 0.0
    return [one.policy, str(one.blocks), f"{one.hit_percent:.2f}", str(one.requests),
            str(one.accesses), f"{rate:.0f}", f"{one.seconds:.1f}"]  # fmt: skip


def _report(json_to: str, file: Path, found: Sequence["Replayed"]) -> None:
    from tiered_kv.bench.report import Result, document
    from tiered_kv.machine import facts

    results = [
        Result(f"replay/{file.stem}/{one.policy}/{one.blocks}", one.hit_percent, "%")
        for one in found
    ]
    emit(document(results, facts(()).as_dict()), json_to)


def _plot(plot_to: str, file: Path, found: Sequence["Replayed"]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    for policy in dict.fromkeys(one.policy for one in found):
        points = sorted((one.blocks, one.hit_percent) for one in found if one.policy == policy)
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    axes.set(xscale="log", xlabel="blocks", ylabel="block hits, %", title=file.name)
    axes.legend()
    figure.savefig(plot_to, dpi=150)
