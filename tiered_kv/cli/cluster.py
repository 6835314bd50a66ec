"""Finding a Ray cluster, and the service in it, without waiting long for either."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tiered_kv.errors import BadInput, Unreachable

if TYPE_CHECKING:
    from tiered_kv.config import Config
    from tiered_kv.connecting import Cluster

ANSWERS_S = 3.0
WAIT_S = 10.0
"""For a coordinator that is being restarted."""
WHAT_TO_DO = "start one with `ray start --head`, or name one with --address HOST:PORT"


def ray_address(given: str | None) -> str | None:
    """The address to join: `given`, `RAY_ADDRESS`, or that of this machine's last `ray start`.

    None when none of them is there: Ray looks for its processes then. Raises `Unreachable` when
    nothing listens there (Ray itself would try for minutes), `BadInput` for no address.
    """
    named = given or os.environ.get("RAY_ADDRESS")
    if named and (given or ":" in named):
        if not answers(named):
            raise Unreachable(f"no Ray cluster answers at {named}; {WHAT_TO_DO}")
        return named
    last = last_started()
    if last is not None and not answers(last):
        raise Unreachable(f"the last `ray start` here made {last}, which is gone; {WHAT_TO_DO}")
    return last


def last_started() -> str | None:
    """What `ray start` wrote down on this machine, whether or not it still runs."""
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(base) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def answers(address: str) -> bool:
    """Whether something listens there. Raises `BadInput` for what is no `HOST:PORT`."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise BadInput(f"{address!r} is not an address like 10.0.0.1:6379")
    try:
        socket.create_connection((host, port), ANSWERS_S).close()
    except OSError:
        return False
    return True


@contextmanager
def joined(config: "Config", address: str | None) -> Iterator["Cluster"]:
    """The service that runs. Raises `Unreachable` with what to do when there is none."""
    where = ray_address(address)
    import ray

    from tiered_kv.connecting import connect

    try:
        cluster = connect(config, address=where, embedded=False, wait_s=WAIT_S)
    except Unreachable as error:
        if ray.is_initialized():
            raise
        raise no_ray(where, error) from None
    with cluster:
        yield cluster


def no_ray(where: str | None, error: Unreachable) -> Unreachable:
    """What `error` means where Ray was not joined, with what to do."""
    if where is None:
        return Unreachable(f"no Ray cluster runs on this machine; {WHAT_TO_DO}")
    return Unreachable(f"what answers at {where} is no Ray cluster to join: {error}")


def short(actor: str) -> str:
    """An actor's name for people: Ray's node ids have 56 digits, of which 8 tell them apart."""
    return "-".join(part[:8] if len(part) > 40 else part for part in actor.split("-"))
