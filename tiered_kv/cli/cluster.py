"""Finding a Ray cluster, and the service in it, without waiting long for either."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from tiered_kv.cli.options import DEBUG
from tiered_kv.errors import Unreachable
from tiered_kv.ray_address import WHAT_TO_DO, ray_address

if TYPE_CHECKING:
    from tiered_kv.config import Config
    from tiered_kv.connecting import Cluster

WAIT_S = 10.0
"""For a coordinator that is being restarted."""
TOKEN = "RAY_AUTH_MODE=token"


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
