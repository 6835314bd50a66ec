"""Joining a Ray cluster, or starting a small one inside this process's own life."""

import os

import ray

from tiered_kv.errors import BadInput, Unreachable
from tiered_kv.ray_address import ray_address

OBJECT_STORE_BYTES = 100 << 20
"""Of an embedded cluster. No block travels through it, and /dev/shm must hold the arena."""
RESOURCE = "tiered_kv"
"""Custom resource of which a node actor holds a little: a Ray node full of KV is not idle."""


def join(address: str | None = None, embedded: bool | None = None) -> bool:
    """Make this process part of a Ray cluster; True when it was started here and ends here.

    The cluster that this process has joined already, or `address`, or the one that `RAY_ADDRESS`
    or this machine's last `ray start` names, or an embedded one. `embedded=True` asks for the
    last, `embedded=False` forbids it. Blocks for seconds. Raises `BadInput` for a contradiction
    and `Unreachable` when there is nothing to join.
    """
    if embedded and (address or ray.is_initialized()):
        have = f"address {address!r}" if address else "this process has joined a cluster already"
        raise BadInput(f"embedded=True starts a Ray cluster of its own, but {have}")
    if ray.is_initialized():
        return False
    if embedded:
        _start()
        return True
    named = None if address == "auto" else address or os.environ.get("RAY_ADDRESS")
    try:
        where = ray_address(named)
        ray.init(address=where or "auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, Unreachable) as error:
        if named or embedded is False:
            where = named or "this machine"
            raise Unreachable(f"no Ray cluster answers at {where}: {_first(error)}") from None
        _start()
        return True
    return False


def _start() -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        resources={RESOURCE: 1},
        log_to_driver=False,
        configure_logging=False,
    )


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
