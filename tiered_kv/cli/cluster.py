"""Finding a Ray cluster, and the service in it, without waiting long for either."""

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from tiered_kv.cli.options import DEBUG
from tiered_kv.errors import BadInput, Unreachable

if TYPE_CHECKING:
    from tiered_kv.config import Config
    from tiered_kv.connecting import Cluster

ANSWERS_S = 3.0
WAIT_S = 10.0
"""For a coordinator that is being restarted."""
TOKEN = "RAY_AUTH_MODE=token"
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


@contextmanager
def joined(config: "Config", address: str | None) -> Iterator["Cluster"]:
    """The service that runs. Raises `Unreachable` with what to do when there is none."""
    where = ray_address(address)
    hush_ray()
    import ray

    from tiered_kv.connecting import connect

    try:
        with stderr_elsewhere():
            cluster = connect(config, address=where, embedded=False, wait_s=WAIT_S)
    except Unreachable as error:
        if ray.is_initialized():
            raise
        raise no_ray(where) from error
    with cluster:
        yield cluster


def no_ray(where: str | None) -> Unreachable:
    """Why Ray was not joined, with what to do."""
    if where is None:
        return Unreachable(f"no Ray cluster runs on this machine; {WHAT_TO_DO}")
    return Unreachable(f"no Ray cluster lets us in at {where}; if it has a token, set {TOKEN}")


def hush_ray() -> None:
    """No advice from Ray beside the output of a command; errors still show."""
    import ray

    logging.getLogger(ray.__name__).setLevel(logging.ERROR)


@contextmanager
def stderr_elsewhere() -> Iterator[None]:
    """Ray's native code logs every second that it cannot join; our error says it once. Not with
    `--debug`."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.meta.get(DEBUG):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


def short(text: str) -> str:
    """For people: Ray's ids have 56 digits, of which 8 tell them apart; and no colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"\b[0-9a-f]{40,}\b", lambda found: found[0][:8], plain)
