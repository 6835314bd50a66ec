"""Options that commands share, and the configuration that comes of them."""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from tiered_kv.config import Config

DEBUG = "tiered_kv.debug"
"""Key in click's `Context.meta`."""

STDOUT = "-"
Command = Callable[..., None]


@dataclass(frozen=True)
class Options:
    """What `--config` and `--set` gave."""

    file: str | None = None
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def config(self) -> "Config":
        """The configuration of all sources. Raises `BadConfig`."""
        from tiered_kv.settings import load

        return load(self.file, self.overrides)

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Meanwhile `settings.load()` gives this configuration everywhere in this process: for
        the demo and benchmarks, whose budgets replace the configured ones. Raises `BadConfig`."""
        from tiered_kv.settings import PREFIX

        self.config()
        wanted = {f"{PREFIX}{section}_{key}".upper(): value
                  for section, values in self.overrides.items()
                  for key, value in values.items()}  # fmt: skip
        if self.file:
            wanted[f"{PREFIX}CONFIG"] = self.file
        former = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in former.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def common(command: Command) -> Command:
    """`--config`, `--set` and `--debug`. The command gets `Options` as its first argument."""

    @click.option("--config", "file", metavar="FILE", help="A TOML file with the configuration.")
    @click.option(
        "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", callback=_overrides,
        help="One field of the configuration, as in --set dram.bytes=8GiB; may be repeated.",
    )  # fmt: skip
    @debuggable
    @functools.wraps(command)
    def with_options(file: str | None, overrides: dict[str, Any], **others: Any) -> None:
        command(Options(file, overrides), **others)

    return with_options


def debuggable(command: Command) -> Command:
    """`--debug`, for commands that read no configuration."""
    return click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_debug,
        help="Show tracebacks.",
    )(command)  # fmt: skip


def address(command: Command) -> Command:
    """`--address`: which Ray cluster."""
    return click.option(
        "--address", metavar="HOST:PORT",
        help="The Ray cluster [default: RAY_ADDRESS, else that of this machine].",
    )(command)  # fmt: skip


def json_target(command: Command) -> Command:
    """`--json [FILE]`: one JSON document to stdout or into a file, checked before work begins."""
    return click.option(
        "--json", "json_to", is_flag=False, flag_value=STDOUT, metavar="[FILE]", callback=_target,
        help="One JSON document into FILE, or to stdout and nothing else there.",
    )(command)  # fmt: skip


def one_size(_: click.Context, __: click.Parameter, value: str) -> int:
    """A callback for a size like 64MiB, in bytes. Raises `BadConfig` naming the value."""
    from tiered_kv.sizes import parse_size

    return int(parse_size(value))


def refuse_given_options() -> None:
    """In a group that has a command of its own: options before that command's name would be
    ignored. Raises `click.UsageError`."""
    ctx = click.get_current_context()
    for name in ctx.params:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"options go behind {ctx.invoked_subcommand!r}", ctx)


def words(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """A callback that splits `a,b`; None where the option was not given."""
    return None if value is None else tuple(word for word in value.split(",") if word)


def _overrides(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in values:
        name, equals, value = text.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and section and key):
            raise click.BadParameter(f"{text!r} is not like dram.bytes=8GiB")
        found.setdefault(section, {})[key] = value
    return found


def _debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True
        sys.excepthook = sys.__excepthook__


def _target(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Fail now rather than after minutes of work. Raises `OSError` with the path."""
    if value is None or value == STDOUT:
        return value
    path = Path(value)
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        return value
