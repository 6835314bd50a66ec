"""The one form of all benchmark results: JSON to compare runs, a table to read.

A number alone says little on a machine that others use too; so a result carries what it was
measured against in the same run, and, where the design promises something, the bar.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    """One measured value. `holds` is None where nothing is promised."""

    name: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    bar: float | None = None
    holds: bool | None = None


def compared(
    name: str,
    value: float,
    unit: str,
    against: str,
    against_value: float,
    *,
    ratio: float | None = None,
    bar: float | None = None,
    at_most: bool = False,
) -> Result:
    """A result that holds when its ratio is at least `bar`, or at most `bar` for values that
    should be small. Where rounds were measured in pairs, `ratio` is the median over the pairs;
    by default it is `value / against_value` (None against 0)."""
    if ratio is None and against_value:
        ratio = value / against_value
    holds = None
    if bar is not None and ratio is not None:
        holds = ratio <= bar if at_most else ratio >= bar
    return Result(name, value, unit, against, against_value, ratio, bar, holds)


def document(results: Sequence[Result], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "machine": dict(machine),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "results": [asdict(result) for result in results],
    }


def write(path: Path, results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    """Write the report as JSON. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(results, machine), indent=2) + "\n")


def table(results: Sequence[Result], console: Console | None = None) -> None:
    """Print the results, one a line; what misses its bar is marked."""
    grid = Table()
    for column in ("name", "unit", "against"):
        grid.add_column(column, overflow="fold")
    for column in ("value", "its value", "ratio", "bar"):
        grid.add_column(column, justify="right")
    grid.add_column("holds")
    for r in results:
        holds = {None: "", True: "yes", False: "[bold red]NO[/]"}[r.holds]
        numbers = (_text(n) for n in (r.value, r.against_value, r.ratio, r.bar))
        grid.add_row(r.name, r.unit, r.against, *numbers, holds)
    (console or Console()).print(grid)


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
