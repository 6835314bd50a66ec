"""How a command ends when it cannot do what was asked: one line on stderr and an exit code."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import click

NAME = "tiered-kv"
LONGEST = 500
SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Failure(click.ClickException):
    """Ends the program with this line and `code`."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Stopped(KeyboardInterrupt):
    """A signal asked this program to end. Everything on the way out cleans up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def line_of(error: BaseException) -> str:
    """An error in one line of a bearable length, whatever it holds."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def stopped(error: KeyboardInterrupt) -> Failure:
    """The end after a signal, with the exit code that shells give to it."""
    number = error.number if isinstance(error, Stopped) else signal.SIGINT
    return Failure(SIGNALS[signal.Signals(number)], 128 + number)


def show_defect(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """A `sys.excepthook` for what no command expects; `--debug` puts Python's own back."""
    line = f"{NAME}: {kind.__name__}: {line_of(error)}"
    print(f"{line} (not expected; --debug shows where)", file=sys.stderr)


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the program once: what is being cleaned up then may finish.

    A second one is answered with a line, a third ends the process where it is.
    """
    former = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> None:
    signal.signal(number, _ask_for_patience)
    raise Stopped(number)


def _ask_for_patience(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    # Not print: it may be this very stream that the signal has interrupted.
    os.write(2, b"still cleaning up; once more ends at once and leaves things behind\n")
