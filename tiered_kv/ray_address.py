"""Which Ray cluster to join, found out without waiting long. Does not import Ray."""

import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tiered_kv.errors import BadInput, Unreachable

ANSWERS_S = 3.0
WHAT_TO_DO = "start one with `ray start --head`, or name one with --address HOST:PORT"


def ray_address(given: str | None) -> str | None:
    """The address to join: `given`, or `RAY_ADDRESS`. None when Ray is to find its cluster.

    Raises `Unreachable` when nothing listens there, or where this machine's last `ray start`
    was: Ray itself would try for minutes. Raises `BadInput` for what is no address.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return None  # this process has joined one
    named = given or os.environ.get("RAY_ADDRESS")
    if named and (given or ":" in named):
        if not answers(named):
            raise Unreachable(f"no Ray cluster answers at {named}; {WHAT_TO_DO}")
        return named
    last = last_started()
    if last is not None and not answers(last):
        raise Unreachable(f"the last `ray start` here made {last}, which is gone; {WHAT_TO_DO}")
    return None  # and not `last`: only a cluster that it finds itself does Ray show its token


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
