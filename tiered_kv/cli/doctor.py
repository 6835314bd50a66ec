"""`tiered-kv doctor`: what of this machine will be used, and what not and why."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tiered_kv.cli.failures import Failure
from tiered_kv.cli.options import Options, common, json_target
from tiered_kv.cli.output import Screen, emit, table

if TYPE_CHECKING:
    from rich.table import Table

    from tiered_kv.cli.checks import Row

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
@json_target
@common
def doctor(options: Options, json_to: str | None) -> None:
    """What of this machine will be used, and why not.

    Looks at memory, disks, GPUs and Ray, and whether the configured service could start here;
    fails only if it could not. Writes some MB to the configured disks, and removes them.
    """
    config = options.config()
    from tiered_kv.cli import checks, checks_disk
    from tiered_kv.machine import facts

    with Screen(json_to) as screen:
        screen.step("looking at the machine")
        machine = facts(checks_disk.folders(config))
        holder = checks_disk.holder(config)
        rows = [*checks.machine(config, machine), *checks.budgets(config, machine, holder)]
        if config.nvme.bytes:
            screen.step("measuring the disk")
            rows += checks_disk.check(config, holder)
        rows.append(checks.ray())
        screen.show(_table(rows))
    counts = Counter(row.state for row in rows)
    emit(
        {"rows": [asdict(row) for row in rows], "counts": counts, "config": config.as_dict(),
         "machine": machine.as_dict()},
        json_to,
    )  # fmt: skip
    if counts["problem"]:
        first = next(row for row in rows if row.state == "problem")
        more = f" (and {counts['problem'] - 1} more)" if counts["problem"] > 1 else ""
        raise Failure(f"the configured service cannot start here: {first.says}{more}")


def _table(found: "list[Row]") -> "Table":
    from rich.text import Text

    made = table("", "what", "finding")
    for row in found:
        made.add_row(Text(row.state, STYLES[row.state]), row.what, Text(row.says))
    return made
