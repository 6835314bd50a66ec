"""`tiered-kv sessions`: who sleeps where, and waking or forgetting one by hand."""

from typing import TYPE_CHECKING, Any

import click

from tiered_kv.cli.cluster import joined, short
from tiered_kv.cli.options import STDOUT, Options, address, common, refuse_given_options
from tiered_kv.cli.output import Screen, counted, emit, rows, table
from tiered_kv.errors import Unreachable

if TYPE_CHECKING:
    from rich.table import Table

    from tiered_kv.connecting import Cluster

NOT_ANSWERING = "not_answering"


@click.group(invoke_without_command=True)
@address
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1),
              help="Rows at most, the longest unused first.")  # fmt: skip
# A plain flag, unlike elsewhere: a word after it is a command.
@click.option("--json", "as_json", is_flag=True, help="One JSON document and nothing else.")
@common
def sessions(options: Options, address: str | None, limit: int, as_json: bool) -> None:
    """List sessions, or wake or forget one."""
    if click.get_current_context().invoked_subcommand is not None:
        refuse_given_options()
        return
    with joined(options.config(), address) as cluster:
        found = document(cluster, limit)
    if as_json:
        emit(found, STDOUT)
        return
    with Screen() as screen:
        screen.show(_table(found["sessions"]))
        screen.say(f"{len(found['sessions'])} of {found['held']} sessions")
        for name, why in found[NOT_ANSWERING].items():
            screen.say(f"{short(name)} does not answer: {why}")


@sessions.command()
@click.argument("session", metavar="ID")
@address
@common
def wake(options: Options, session: str, address: str | None) -> None:
    """Start bringing a session up to the fastest tier, and do not wait for it."""
    with joined(options.config(), address) as cluster:
        batches = _client(cluster).prefetch(session)
    what = f"on its way up, moves: {batches}" if batches else "nothing has to move"
    click.echo(f"{session}: {what}")


@sessions.command()
@click.argument("session", metavar="ID")
@address
@common
def forget(options: Options, session: str, address: str | None) -> None:
    """End a session and drop the blocks that only it had."""
    with joined(options.config(), address) as cluster:
        blocks = _client(cluster).forget(session)
    click.echo(f"{session}: forgotten, with {blocks} blocks that no other session shares")


def document(cluster: "Cluster", limit: int) -> dict[str, Any]:
    """What `--json` gives. One call a node; a node that does not answer is named, not fatal."""
    found: list[dict[str, Any]] = []
    silent: dict[str, str] = {}
    for member in cluster.members():
        timeout_s = cluster.config.service.call_timeout_s
        try:
            listed = cluster.link(member).call("list_sessions", timeout_s=timeout_s)
        except Unreachable as error:
            silent[member.actor] = str(error)
        else:
            found += [row | {"actor": member.actor} for row in listed]
    found.sort(key=lambda row: float(row["unused_s"]), reverse=True)
    return {"sessions": found[:limit], "held": len(found), NOT_ANSWERING: silent}


def _client(cluster: "Cluster") -> Any:
    from tiered_kv.client import Client

    return Client(cluster)


def _where(tiers: dict[str, int]) -> str:
    """Blocks by tier. A host does not see what only the HBM above it holds."""
    return counted({"in HBM or gone" if t == "absent" else t: n for t, n in tiers.items()})


def _table(found: list[dict[str, Any]]) -> "Table":
    cells = [
        (row["id"], row["state"], f"{row['unused_s']:.0f} s", str(row["tokens"]),
         str(row["blocks"]), _where(row["tiers"]), short(row["actor"]))
        for row in found
    ]  # fmt: skip
    return rows(
        table("session", "state", ">unused", ">tokens", ">blocks", "blocks by tier", "node"), cells
    )
