"""`tiered-kv plan`: how many sessions a node holds, how fast they wake, at what price."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiered_kv.cli.options import Options, common, json_target
from tiered_kv.cli.output import Screen, emit, rows, table

if TYPE_CHECKING:
    from tiered_kv.bench.report import Result
    from tiered_kv.sim.plan import Requests
    from tiered_kv.sim.plan_rows import Configuration, Row


@click.command()
@click.option(
    "--model",
    "model_name",
    default="llama-3.1-70b",
    show_default=True,
    metavar="NAME",
    help="A built-in model, or a Hugging Face config.json.",
)
@click.option("--weights", default="bfloat16", show_default=True, metavar="DTYPE")
@click.option("--kv", default="bfloat16", show_default=True, metavar="DTYPE")
@click.option(
    "--profile",
    "profile_name",
    default="h100",
    show_default=True,
    metavar="NAME",
    help="A built-in hardware profile, or a .toml file.",
)
@click.option("--sessions", default=1024, show_default=True, type=int, help="Concurrent ones.")
@click.option("--start-tokens", default=8192, show_default=True, type=int)
@click.option(
    "--end-tokens",
    default=32768,
    show_default=True,
    type=int,
    help="A session grows from start to end.",
)
@click.option("--prompt-tokens", default=256, show_default=True, type=int, help="New ones a turn.")
@click.option("--output-tokens", default=256, show_default=True, type=int, help="A turn.")
@click.option(
    "--tool-share",
    default=0.7,
    show_default=True,
    type=float,
    help="Share of pauses that are a tool's (9 s); the others are a person's (210 s).",
)
@click.option(
    "--slower",
    default=1.0,
    show_default=True,
    type=float,
    help="Make all pauses longer by this factor.",
)
@click.option(
    "--workload",
    "kind",
    metavar="KIND",
    help="Instead: chat, agent, rag or mix, as `tiered-kv workload` makes them.",
)
@click.option("--trace", metavar="FILE", help="Instead: a trace in the format of Mooncake.")
@click.option("--nodes", default="1", show_default=True, metavar="N,...", help="Node counts.")
@click.option("--tiers", metavar="NAME,...", help="Only these configurations.")
@click.option("--target-sessions", type=int, help="Sessions to hold [default: all].")
@click.option("--target-wake", type=float, metavar="SECONDS", help="99th percentile.")
@click.option("--target-ttft", type=float, metavar="SECONDS", help="99th percentile.")
@click.option(
    "--block-tokens", type=int, help="[default: 512; with --reference 256, as in the service]"
)
@click.option(
    "--warm",
    "warm_s",
    type=float,
    metavar="SECONDS",
    help="Simulated, before measuring [default: until all have arrived].",
)
@click.option("--window", "window_s", type=float, metavar="SECONDS", help="Simulated, measured.")
@click.option("--seed", default=1, show_default=True, type=int)
@click.option("--jobs", type=click.IntRange(1), metavar="N",
              help="Configurations at a time [default: one for each core].")  # fmt: skip
@click.option("--html", metavar="FILE", help="A report with plots.")
@click.option("--reference", is_flag=True, help="Reproduce the published reference table.")
@click.option("--validate", is_flag=True, help="Compare the simulator with the node here.")
@json_target
@common
def plan(
    options: Options, json_to: str | None, reference: bool, validate: bool, **given: Any
) -> None:
    """Simulate a node with each set of tiers and name the cheapest that meets the targets.

    The service's own hierarchy decides; clock, media and GPUs are modelled. Same seed, same
    result. The configuration is that of the node which --validate runs.
    """  # fmt: skip
    if reference and validate:
        raise click.UsageError("give --reference or --validate, not both")
    with Screen(json_to) as screen:
        if validate:
            from tiered_kv.sim.validate import run

            with options.exported():
                made = run(progress=screen.step)
            _results(screen, made, json_to)
        elif reference:
            _reference(screen, json_to, given)
        else:
            _plan(screen, json_to, given)


def _reference(screen: Screen, json_to: str | None, given: dict[str, Any]) -> None:
    from tiered_kv.sim import reference

    found = reference.rows(
        block_tokens=_or(given["block_tokens"], 256), warm_s=given["warm_s"],
        window_s=given["window_s"],
        seed=given["seed"], jobs=_jobs(given), progress=screen.step,
    )  # fmt: skip
    _show(screen, found)
    _results(screen, reference.results(found), json_to, found)


def _plan(screen: Screen, json_to: str | None, given: dict[str, Any]) -> None:
    from tiered_kv.sim import models, plan_rows, profiles
    from tiered_kv.sim import plan as planning

    model = models.model(given["model_name"], given["weights"], given["kv"])
    profile = profiles.load(given["profile_name"])
    work = _work(given)
    asked = given["target_sessions"]
    if asked is None and not callable(work):
        asked = work.sessions
    targets = planning.Targets(asked, given["target_wake"], given["target_ttft"])
    found = planning.plan(
        profile, model, work, targets,
        configurations=_configurations(given["tiers"]), nodes=_counts(given["nodes"]),
        block_tokens=_or(given["block_tokens"], 512), seed=given["seed"], warm_s=given["warm_s"],
        window_s=given["window_s"], jobs=_jobs(given), progress=screen.step,
    )  # fmt: skip
    for note in model.notes:
        screen.say(f"note: {note}")
    screen.say(f"{model.name} on {profile.name}: {profile.title}")
    _show(screen, found)
    best = planning.cheapest(found)
    screen.say(
        f"cheapest that meets the targets: {best.name}, ${best.usd_per_month:,.0f} a month; "
        f"what binds: {best.binds}"
        if best else "no configuration meets the targets; the column `misses` says which"
    )  # fmt: skip
    if given["html"]:
        from tiered_kv.sim.report_html import page

        facts = {"model": f"{model.name}: {model.kv_bytes:,} B of KV a token, "
                          f"{model.weight_bytes / 1e9:,.0f} GB of weights",
                 "hardware": profile.title, "workload": _describe(given), "seed":
                 str(given["seed"]), "targets": str(targets)}  # fmt: skip
        text = page(f"Plan: {model.name} on {profile.name}", facts, found, profile.sources)
        Path(given["html"]).write_text(text, encoding="utf-8")
        screen.say(f"report: {given['html']}")
    if json_to is not None:
        _emit(json_to, plan_rows.results(found), found)


def _work(given: dict[str, Any]) -> Any:
    """The description of a workload, or what opens a trace."""
    from tiered_kv.sim.description import Workload

    if given["kind"] and given["trace"]:
        raise click.UsageError("give --workload or --trace, not both")
    if given["kind"]:
        from tiered_kv.sim.workload import generate

        generate(given["kind"], given["sessions"], given["seed"])  # a wrong name is told now
        return partial(generate, given["kind"], given["sessions"], given["seed"])
    if given["trace"]:
        return _trace(given["trace"])
    return Workload(
        given["sessions"], given["start_tokens"], given["end_tokens"], given["prompt_tokens"],
        given["output_tokens"], given["tool_share"],
    ).slower(given["slower"])  # fmt: skip


def _trace(name: str) -> "Requests":
    from tiered_kv.sim.mooncake import requests

    file = Path(name)
    with file.open():
        pass  # a file that is not there is told now
    return partial(requests, file)


def _describe(given: dict[str, Any]) -> str:
    if given["trace"]:
        return f"trace {Path(given['trace']).name}"
    if given["kind"]:
        return f"{given['sessions']} sessions of kind {given['kind']}"
    return (
        f"{given['sessions']} sessions of {given['start_tokens']} to {given['end_tokens']} tokens, "
        f"{given['prompt_tokens']} + {given['output_tokens']} a turn, pauses x {given['slower']:g}"
    )


def _configurations(names: str | None) -> "Sequence[Configuration]":
    from tiered_kv.errors import UnknownName
    from tiered_kv.sim.plan import CONFIGURATIONS

    if names is None:
        return CONFIGURATIONS
    known = {one.name.lower(): one for one in CONFIGURATIONS if one.admission}
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise UnknownName(f"configuration {name!r} is not one of {', '.join(known)}")
    return [known[name] for name in wanted]


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _jobs(given: dict[str, Any]) -> int:
    return given["jobs"] or len(os.sched_getaffinity(0))


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--nodes {text!r} is not like 1,2,4") from None


def _show(screen: Screen, found: "Sequence[Row]") -> None:
    from tiered_kv.sim.report_html import HEADINGS, cells

    numbers = {name for name in HEADINGS if name not in ("configuration", "misses", "what binds")}
    headings = [f">{name}" if name in numbers else name for name in HEADINGS]
    screen.show(rows(table(*headings), [cells(row) for row in found]))


def _results(
    screen: Screen, made: "Sequence[Result]", json_to: str | None, found: "Sequence[Row]" = ()
) -> None:
    from tiered_kv.bench import report

    screen.quiet()
    report.table(made, screen.console)
    if json_to is not None:
        _emit(json_to, made, found)


def _emit(json_to: str, made: "Sequence[Result]", found: "Sequence[Row]") -> None:
    from tiered_kv.bench import report
    from tiered_kv.machine import facts
    from tiered_kv.sim.plan_rows import document

    emit({**report.document(made, facts(()).as_dict()), "plan": document(found)}, json_to)
