"""`tiered-kv workload`: requests like those of public traces, made up here."""

import sys
from pathlib import Path
from typing import TextIO

import click

from tiered_kv.cli.options import STDOUT, Options, common
from tiered_kv.cli.output import Screen

KINDS = ("chat", "agent", "rag", "mix")
EVERY = 1_000  # requests between two steps of the bar


@click.command()
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="mix",
    show_default=True,
    help="Conversations, tool-using agents, questions about documents, or all of them.",
)
@click.option("--sessions", default=1_000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, type=int, help="Same seed, same file.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Sessions that begin in a second [default: as in the trace of the kind].",
)
@click.option("--out", required=True, metavar="FILE", help="Where to write; - is stdout.")
@common
def workload(
    options: Options, kind: str, sessions: int, seed: int, rate: float | None, out: str
) -> None:
    """Write a synthetic trace in the format of Mooncake.

    One JSON object a line: timestamp (ms), input_length, output_length, and hash_ids, one for each
    block of 512 tokens; equal ids mean an equal whole prefix. Shapes follow public traces.
    """
    with Screen(out) as screen, options.exported():
        if out == STDOUT:
            line = _write(sys.stdout, kind, sessions, seed, rate, screen)
        else:
            with Path(out).open("w", encoding="utf-8") as file:
                line = _write(file, kind, sessions, seed, rate, screen)
        screen.quiet()
        screen.say(line)


def _write(
    file: TextIO, kind: str, sessions: int, seed: int, rate: float | None, screen: Screen
) -> str:
    """Write all requests as they are made; what was written, in a line."""
    from tiered_kv.sim.workload import generate, write_mooncake

    written = blocks = 0
    end_s = 0.0
    for request in generate(kind, sessions, seed, rate):
        write_mooncake((request,), file)
        written, blocks, end_s = written + 1, blocks + len(request.hash_ids), request.at_s
        if written % EVERY == 0:
            screen.step(f"writing requests of {kind} sessions, {written} so far")
    return (
        f"{written} requests of {sessions} {kind} sessions over {end_s / 3600:.2f} h, "
        f"{blocks / written:.1f} blocks of 512 tokens a request"
    )
