"""The status of a cluster (`Cluster.status`) as tables."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tiered_kv.cli.cluster import short
from tiered_kv.cli.output import counted, rows, size, table

if TYPE_CHECKING:
    from rich.table import Table

Status = dict[str, Any]


def everything(status: Status) -> "Iterator[Table]":
    """All tables that have rows, most wanted first."""
    yield from tiers(status)
    made = (_sessions(status), _answers(status), _moves(status), _processes(status))
    yield from (one for one in (*made, _errors(status)) if one.row_count)


def tiers(status: Status) -> "Iterator[Table]":
    """Tiers, and before them who does not answer."""
    silent = [
        (short(name), found["problem"])
        for name, found in [("coordinator", status["coordinator"]), *_all(status)]
        if "problem" in found
    ]
    if silent:
        yield rows(table("actor", "does not answer"), silent)
    cells = [
        (short(name), str(tier["medium"]), size(tier["used_bytes"]), size(tier["capacity_bytes"]),
         f"{tier['used_bytes'] / tier['capacity_bytes']:.0%}",
         f"{tier['low']:.0%} to {tier['high']:.0%}", str(tier["blocks"]),
         _health(found, tier))
        for name, found in _answering(status)
        for tier in found["tiers"]
    ]  # fmt: skip
    if cells:
        headings = ("actor", "tier", ">used", ">of", ">%", ">watermarks", ">blocks", "state")
        yield rows(table(*headings), cells)


def _health(found: Status, tier: Status) -> str:
    why = found["offline"].get(str(tier["medium"]))
    if tier["online"] and why is None:
        return "online"
    return f"OFFLINE: {why or 'taken out'}"


def _sessions(status: Status) -> "Table":
    cells = [
        (short(name), counted(found["sessions"]), counted(found["pending"]))
        for name, found in _answering(status)
        if not name.startswith("gpu-")  # sessions belong to hosts
    ]
    return rows(table("actor", "sessions", "on their way"), cells)


def _answers(status: Status) -> "Table":
    cells = [
        (short(name), str(found["hits"]), str(sum(found["misses"].values())),
         counted(found["misses"]), counted(found["counts"]))
        for name, found in _answering(status)
    ]  # fmt: skip
    return rows(table("actor", ">hits", ">misses", "misses by reason", "events"), cells)


def _moves(status: Status) -> "Table":
    cells = [
        (short(name), f"{leg['from']} to {leg['to']}", str(leg["blocks"]), size(leg["bytes"]),
         f"{leg['bytes'] / leg['seconds'] / 1e9:.2f} GB/s" if leg["seconds"] else "",
         str(leg["failed"]))
        for name, found in _answering(status)
        for leg in found["moves"]
    ]  # fmt: skip
    return rows(table("actor", "moved", ">blocks", ">bytes", ">speed", ">failed"), cells)


def _processes(status: Status) -> "Table":
    cells = [
        (short(name), str(process["pid"]), f"{found['up_s']:.0f} s", size(process["rss_bytes"]),
         size(process["private_bytes"]), str(process["fds"]), str(process["threads"]),
         found["pool"])
        for name, found in _answering(status)
        for process in [found["process"]]
    ]  # fmt: skip
    return rows(
        table("actor", ">pid", ">up", ">memory", ">private", ">fds", ">threads", "pool"), cells
    )


def _errors(status: Status) -> "Table":
    now = time.time()
    cells = [
        (short(name), f"{now - error['at_s']:.0f} s ago", str(error["times"]), error["text"])
        for name, found in _answering(status)
        for error in found["errors"]
    ]
    return rows(table("actor", ">last", ">times", "error"), cells)


def _all(status: Status) -> list[tuple[str, Status]]:
    return [*status["nodes"].items(), *status["gpus"].items()]


def _answering(status: Status) -> list[tuple[str, Status]]:
    return [(name, found) for name, found in _all(status) if "problem" not in found]
