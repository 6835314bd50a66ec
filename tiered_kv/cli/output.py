"""What a command prints: results, progress beside them, JSON instead of them."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tiered_kv.cli.options import STDOUT

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.table import Table

PLAIN_COLUMNS = 160
"""Width of tables that do not go to a terminal."""
PLAIN_EVERY_S = 1.0


class Pace:
    """How fast steps come and when they end. Pure but for `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first = self._done = self._total = 0

    def step(self, done: int, total: int) -> bool:
        """Note `done` of `total` steps; True when this begins another row of steps."""
        fresh = done < self._done or total != self._total
        if fresh:
            self._began, self._first = self._clock(), done
        self._done, self._total = done, total
        return fresh

    def describe(self) -> str:
        """Steps a second and the time left; empty before the first step."""
        passed, made = self._clock() - self._began, self._done - self._first
        if made < 1 or passed <= 0:
            return ""
        left = max(0, self._total - self._done) * passed / made
        return f"{made / passed:.2g}/s, {left:.0f} s left"


class Screen:
    """Results on stdout, or on stderr when stdout is to carry JSON. Progress is a live bar where
    they go to a terminal, and plain lines elsewhere."""

    def __init__(self, json_to: str | None = None) -> None:
        from rich.console import Console

        self.console = Console(stderr=json_to == STDOUT, highlight=False)
        if not self.console.is_terminal:
            self.console.width = PLAIN_COLUMNS
        self._pace = Pace()
        self._live: Progress | None = None
        self._spoke = -PLAIN_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.quiet()

    def say(self, line: str) -> None:
        """A line of result, exactly as it is."""
        self.console.print(line, markup=False, soft_wrap=True)

    def show(self, *results: "RenderableType") -> None:
        """Tables, after the bar has gone."""
        self.quiet()
        for result in results:
            self.console.print(result)

    def step(self, text: str, done: int = 0, total: int = 0) -> None:
        """What is being done: steps done and in all, 0 where nobody knows how many."""
        fresh = self._pace.step(done, total)
        if self.console.is_terminal:
            self._bar(text, done, total)
        elif fresh or time.monotonic() - self._spoke >= PLAIN_EVERY_S:
            self._spoke = time.monotonic()
            count = f"[{done}/{total}] " if total else ""
            pace = self._pace.describe()
            self.say(f"{count}{text}{f' ({pace})' if pace else ''}")

    def quiet(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _bar(self, text: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        if self._live is None:
            self._live = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._live.add_task("", total=None, count="")
            self._live.start()
        pace = self._pace.describe()
        count = f"{done}/{total}{f', {pace}' if pace else ''}" if total else ""
        task = self._live.task_ids[0]
        self._live.update(task, description=text, completed=done, total=total or None, count=count)


def table(*columns: str) -> "Table":
    """An empty table; columns that begin with `>` hold numbers."""
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify)
    return made


def rows(into: "Table", cells: Sequence[Sequence[str]]) -> "Table":
    """The table with these rows of plain text."""
    from rich.text import Text

    for row in cells:
        into.add_row(*(Text(cell) for cell in row))
    return into


def emit(document: Any, json_to: str | None) -> None:
    """Write the document where `--json` said, if it did. Raises `OSError`."""
    if json_to == STDOUT:
        print(json.dumps(document, indent=2))
    elif json_to is not None:
        Path(json_to).write_text(json.dumps(document, indent=2) + "\n")


def size(nbytes: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1000 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if nbytes >= 1000 else f"{nbytes:.3g} {unit}"


def counted(counts: dict[str, int]) -> str:
    """`3 absent, 1 deadline`, without zeros; `none` when nothing is left."""
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "none"
