"""Places in a node at which a test can stop it, to kill it exactly there.

A gate is a file beside the NVMe folder. Who comes to a closed gate says so and waits.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiered_kv.assemble import host
from tiered_kv.config import Config
from tiered_kv.node import Node

PHASES = ("commit", "session", "demote-before-data", "demote-before-rows", "demote-after-rows")


def folder_of(config: Config) -> Path:
    return config.nvme_folder.parent / "gates"


def shut(config: Config, phase: str) -> None:
    assert phase in PHASES
    folder_of(config).mkdir(exist_ok=True)
    (folder_of(config) / phase).touch()


def reached(config: Config, phase: str) -> bool:
    return (folder_of(config) / f"{phase}.reached").exists()


def open_all(config: Config) -> None:
    for file in folder_of(config).iterdir():
        file.unlink()


async def host_with_gates(config: Config) -> Node:
    """A host's node whose steps pass gates. At module level: Ray sends it to the actor by name."""
    node = await host(config)
    nvme = node.parts.nvme
    assert nvme is not None
    _before(node.hierarchy, "commit", lambda: _pass(config, "commit"))
    _before(node.keeper.table, "save", lambda: _pass(config, "session"))
    _before(nvme, "write", lambda: _pass(config, "demote-before-data"))
    index = nvme._files.index
    _before(index, "put", lambda: _pass(config, "demote-before-rows"))
    put = index.put

    def put_and_wait(*args: Any) -> None:
        put(*args)
        _pass(config, "demote-after-rows")

    index.put = put_and_wait  # type: ignore[method-assign]
    return node


def _before(owner: object, name: str, step: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def with_gate(*args: Any, **kwargs: Any) -> Any:
        step()
        return call(*args, **kwargs)

    setattr(owner, name, with_gate)


def _pass(config: Config, phase: str) -> None:
    gate = folder_of(config) / phase
    if gate.exists():
        gate.with_suffix(".reached").touch()
        while gate.exists():
            time.sleep(0.01)
