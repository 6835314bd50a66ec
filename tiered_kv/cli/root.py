"""The command `tiered-kv` itself: its parts, its errors, its exit codes."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from tiered_kv import __version__
from tiered_kv.cli.bench import bench
from tiered_kv.cli.demo import demo
from tiered_kv.cli.doctor import doctor
from tiered_kv.cli.failures import NAME, Failure, line_of, show_defect, stoppable, stopped
from tiered_kv.cli.options import DEBUG
from tiered_kv.cli.plan import plan
from tiered_kv.cli.replay import replay
from tiered_kv.cli.service import down, up
from tiered_kv.cli.sessions import sessions
from tiered_kv.cli.status import status
from tiered_kv.cli.workload import workload
from tiered_kv.errors import TieredKVError


class Root(click.Group):
    """Turns the errors that commands may meet into lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of a first visit, not of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises click's exceptions only, and what is a defect."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise stopped(error) from error
        except BrokenPipeError:
            raise  # the reader of our output has gone; click ends quietly
        except (TieredKVError, OSError) as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            raise Failure(line_of(error)) from error


@click.group(cls=Root, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name=NAME)
def cli() -> None:
    """A tiered KV cache service for LLM inference, inside a Ray cluster.

    Exit codes: 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted.
    """


for command in (demo, doctor, up, status, sessions, down, bench, workload, replay, plan):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """The program. Ends with `SystemExit`."""
    sys.excepthook = show_defect
    given = list(sys.argv[1:] if args is None else args)
    with stoppable():
        try:
            code = cli.main(given or ["--help"], prog_name=NAME, standalone_mode=False)
        except Failure as error:
            code = error.code
            click.echo(f"{NAME}: {_line(error)}", err=True)
        except click.UsageError as error:
            code = error.exit_code
            where = error.ctx.command_path if error.ctx else NAME
            click.echo(f"{NAME}: {_line(error)} (see {where} --help)", err=True)
        except click.ClickException as error:
            code = error.exit_code
            click.echo(f"{NAME}: {_line(error)}", err=True)
    sys.exit(code or 0)


def _line(error: click.ClickException) -> str:
    return " ".join(error.format_message().split()).removesuffix(".")
