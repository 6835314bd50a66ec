"""`tiered-kv bench`: what this machine does, against what it could do at best."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiered_kv.cli.demo import embedded, within
from tiered_kv.cli.options import (
    Options,
    common,
    json_target,
    one_size,
    refuse_given_options,
    words,
)
from tiered_kv.cli.output import Screen, emit
from tiered_kv.cli.replay import FORMATS

if TYPE_CHECKING:
    from tiered_kv.bench.report import Result

Measure = Callable[[Screen], "Sequence[Result]"]


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """A callback for `1024,4096`."""
    try:
        counts = tuple(int(word) for word in value.split(",") if word)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers") from None
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{value!r} names no number above zero")
    return counts


@click.group(invoke_without_command=True)
@click.option("--out", metavar="FOLDER", help="Run all of them, with a JSON file each in FOLDER.")
@click.pass_context
def bench(ctx: click.Context, out: str | None) -> None:
    """Measure this machine. Each result stands beside what it was measured against."""
    if ctx.invoked_subcommand is not None:
        refuse_given_options()
        return
    if out is None:
        raise click.UsageError(f"name a benchmark ({', '.join(bench.commands)}), or give --out")
    for name, command in bench.commands.items():
        args = ["--json", str(Path(out) / f"{name}.json")]
        with command.make_context(name, args, parent=ctx) as below:
            command.invoke(below)


@bench.command()
@click.option("--seconds", default=180.0, show_default=True, type=click.FloatRange(min=0),
              help="When they are over, each leg gets three rounds.")  # fmt: skip
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--sizes", callback=words, metavar="SIZE,...", help="Block sizes.")
@click.option("--legs", callback=words, metavar="NAME,...", help="Such as dram-to-nvme.")
@click.option("--engines", callback=words, metavar="NAME,...", help="Such as threads.")
@click.option("--bytes", "nbytes", callback=one_size, default="256MiB", show_default=True,
              metavar="SIZE", help="What a pass moves.")  # fmt: skip
@click.option("--folder", metavar="FOLDER", help="On the disk to measure [default: nvme.folder].")
@json_target
@common
def io(
    options: Options, seconds: float, rounds: int, sizes: tuple[str, ...] | None,
    legs: tuple[str, ...] | None, engines: tuple[str, ...] | None, nbytes: int,
    folder: str | None, json_to: str | None,
) -> None:  # fmt: skip
    """Copies between tiers, each against the bare medium."""
    from tiered_kv.bench import io as legs_between_tiers
    from tiered_kv.sizes import parse_size

    where = Path(folder) if folder else options.config().nvme_folder
    measured = [int(parse_size(text)) for text in sizes or ()] or legs_between_tiers.SIZES

    def measure(screen: Screen) -> "Sequence[Result]":
        return legs_between_tiers.run(
            folder=where, sizes=measured, rounds=rounds, seconds=seconds, nbytes=nbytes,
            legs=legs or legs_between_tiers.LEGS, engines=engines or legs_between_tiers.ENGINES,
            progress=screen.step,
        )  # fmt: skip

    _report(measure, json_to, where)


@bench.command()
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(min=0))
@json_target
@common
def hierarchy(options: Options, seconds: float, json_to: str | None) -> None:
    """Decisions alone, no I/O: block accesses a second."""
    from tiered_kv.bench.hierarchy import run

    with options.exported():
        _report(lambda screen: run(seconds=seconds, progress=screen.step), json_to)


@bench.command()
@click.option("--minutes", default=2.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--ray/--no-ray", default=True, show_default=True,
              help="In a Ray cluster of its own, or within this process.")  # fmt: skip
@json_target
@common
def churn(options: Options, minutes: float, ray: bool, json_to: str | None) -> None:
    """Random sessions through all tiers, comparing every byte and looking for leaks."""
    from tiered_kv.bench.churn import run

    connect = embedded if ray else within
    with options.exported():
        _report(lambda s: run(minutes=minutes, connect=connect, progress=s.step), json_to)


@bench.command("load-or-recompute")
@json_target
@common
def load_or_recompute(options: Options, json_to: str | None) -> None:
    """Modelled times to the first token when a tier is healthy, and when it is not worth it."""
    from tiered_kv.bench.load_or_recompute import run

    with options.exported():
        _report(lambda screen: run(progress=screen.step), json_to)


@bench.command()
@click.option("--trace", "path", metavar="FILE", type=click.Path(path_type=Path),
              help="A trace of yours [default: coding agents, made up].")  # fmt: skip
@click.option("--format", "form", type=click.Choice(FORMATS), default="mooncake",
              show_default=True, help="What the file is.")  # fmt: skip
@click.option("--policy", default="lru", show_default=True)
@click.option("--blocks", default=2_000, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(min=0))
@json_target
@common
def replay(
    options: Options, path: Path | None, form: str, policy: str, blocks: int, seconds: float,
    json_to: str | None,
) -> None:  # fmt: skip
    """Block accesses a second of a replay, beside cachetools.LRUCache; peak memory."""
    from tiered_kv.bench import replay as speed
    from tiered_kv.sim.traces import Trace

    trace = None if path is None else Trace(path, form)

    def measure(screen: Screen) -> "Sequence[Result]":
        return speed.run(trace=trace, policy=policy, blocks=blocks, seconds=seconds,
                         progress=screen.step)  # fmt: skip

    with options.exported():
        _report(measure, json_to)


@bench.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default="1024,4096", show_default=True, callback=_counts,
              metavar="N,...", help="Lengths of the prompts that return.")  # fmt: skip
@click.option("--peers", callback=words, metavar="NAME,...",
              help="vllm-cpu-tier, vllm-fs, lmcache [default: all].")  # fmt: skip
@click.option("--model", metavar="FOLDER", type=click.Path(path_type=Path, exists=True),
              help="A model that vLLM loads [default: SmolLM2, from its package].")  # fmt: skip
@click.option("--folder", metavar="FOLDER",
              help="On the disk to measure [default: beside nvme.folder].")  # fmt: skip
@click.option("--engine-python", metavar="FILE",
              help="A Python with vLLM [default: this one, or of setup-engine].")  # fmt: skip
@click.option("--peers-python", metavar="FILE",
              help="A Python with LMCache too [default: of setup-peers].")  # fmt: skip
@json_target
@common
def engine(
    options: Options, rounds: int, tokens: tuple[int, ...], peers: tuple[str, ...] | None,
    model: Path | None, folder: str | None, engine_python: str | None, peers_python: str | None,
    json_to: str | None,
) -> None:  # fmt: skip
    """vLLM with our connector: wakes against computing anew and against other caches."""
    from tiered_kv.bench import engine as waking
    from tiered_kv.bench import engine_contenders as contenders

    where = Path(folder) if folder else options.config().nvme_folder.parent
    plan = waking.Plan(
        pythons=contenders.Pythons(
            contenders.engine_python(engine_python), contenders.peers_python(peers_python)
        ),
        folder=where, model=model, sizes=tokens, rounds=rounds,
        peers=contenders.PEERS if peers is None else contenders.check_peers(peers),
    )  # fmt: skip
    with options.exported():
        _report(
            lambda screen: waking.run(plan=plan, progress=screen.step, say=screen.say),
            json_to,
            where,
        )


@bench.command()
@click.option("--sessions", default=1024, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=512, show_default=True, type=click.IntRange(64),
              help="Of a session's first turn.")  # fmt: skip
@click.option("--folder", metavar="FOLDER",
              help="On the disk to use [default: beside nvme.folder].")  # fmt: skip
@click.option("--engine-python", metavar="FILE",
              help="A Python with vLLM [default: this one, or of setup-engine].")  # fmt: skip
@json_target
@common
def sessions(
    options: Options, sessions: int, tokens: int, folder: str | None, engine_python: str | None,
    json_to: str | None,
) -> None:  # fmt: skip
    """More sessions through one vLLM than its own cache can hold: do all come back?"""
    from tiered_kv.bench import engine_contenders as contenders
    from tiered_kv.bench import engine_sessions as many

    where = Path(folder) if folder else options.config().nvme_folder.parent
    pythons = contenders.Pythons(contenders.engine_python(engine_python), None)
    plan = many.Plan(pythons, where, sessions=sessions, tokens=tokens)
    with options.exported():
        _report(
            lambda screen: many.run(plan=plan, progress=screen.step, say=screen.say),
            json_to,
            where,
        )


def _report(measure: Measure, json_to: str | None, *folders: Path) -> None:
    """Measure, print the table, write the JSON with facts about this machine."""
    from tiered_kv.bench.report import document, table
    from tiered_kv.machine import facts

    with Screen(json_to) as screen:
        results = measure(screen)
        screen.quiet()
        table(results, screen.console)
    emit(document(results, facts(folders).as_dict()), json_to)
