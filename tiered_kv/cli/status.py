"""`tiered-kv status`: what the running service holds, moves, misses and suffers."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tiered_kv.cli import tables
from tiered_kv.cli.cluster import joined
from tiered_kv.cli.options import Options, address, common, json_target
from tiered_kv.cli.output import Screen, emit

if TYPE_CHECKING:
    from tiered_kv.connecting import Cluster


@click.command()
@address
@json_target
@common
def status(options: Options, address: str | None, json_to: str | None) -> None:
    """What the running service holds, moves and misses.

    Tiers, sessions, hits and misses by reason, moves, processes and errors.
    """
    config = options.config()
    with joined(config, address) as cluster:
        found = document(cluster)
    with Screen(json_to) as screen:
        if json_to is None:
            for table in tables.everything(found):
                screen.show(table, "")
    emit(found, json_to)


def document(cluster: "Cluster") -> dict[str, Any]:
    """What `--json` gives: members, and the status of coordinator, nodes and GPU actors."""
    members = [asdict(member) for member in cluster.members()]
    return {
        "namespace": cluster.config.service.namespace,
        "members": members,
        **cluster.status(),
    }
