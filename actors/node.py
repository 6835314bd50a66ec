"""The actor of a host: its DRAM arena and its NVMe files, for as long as the Ray node lives."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import ray

from tiered_kv import assemble
from tiered_kv.actors.shell import GROUPS, PING_S, Build, Shell
from tiered_kv.announcing import Announcer
from tiered_kv.config import Config
from tiered_kv.directory import Member
from tiered_kv.errors import TieredKVError
from tiered_kv.hosts import host_identity
from tiered_kv.node import Node
from tiered_kv.runner import Runner
from tiered_kv.types import SessionId


def with_share(config: Config, share: int) -> Config:
    """The configuration of the `share`-th of several Ray nodes on one host.

    Each needs folders of its own, since a folder has one owner: the first uses the configured
    ones, the others `peer-1`, `peer-2` ... inside of them, each with the full `nvme.bytes`.
    """
    if share == 0 or not config.nvme.bytes:
        return config
    nvme = replace(
        config.nvme,
        folder=str(config.nvme_folder / f"peer-{share}"),
        devices=tuple(f"{device}/peer-{share}" for device in config.nvme.devices),
    )
    return replace(config, nvme=nvme)


class NodeShell(Shell):
    """One a Ray node; see `launch` for how it is started and named."""

    def __init__(
        self, config: Config, name: str, share: int = 0, build: Build | None = None
    ) -> None:
        """`build` puts the node together (default `assemble.host`): tests give media that fail."""
        own = with_share(config, share)
        self.share = share
        self._build = build
        self._announcer: Announcer | None = None
        super().__init__(own, name, self._assemble)

    def about(self) -> dict[str, Any]:
        """See `Shell.about`."""
        return super().about() | {"share": self.share}

    def _assemble(self, _: Shell) -> Awaitable[Node]:
        if self._build is not None:
            return self._build(self.config)
        return assemble.host(self.config, self.life.progress)

    def _beat(self) -> bool:
        try:
            runner = self.life.runner
        except TieredKVError:
            return False  # not there yet, or `status` tells why not
        if self._announcer is None:
            self._announcer = Announcer(self.coordinator, lambda: self._facts(runner))
        superseded = self._announcer.beat()
        self.missed_beats = self._announcer.missed
        return superseded

    def _facts(self, runner: Runner) -> tuple[Member, list[SessionId]]:
        """Asked of the node's own loop: a node that hangs falls silent, and is not placed upon."""
        usage, sessions = runner.call("holdings", timeout_s=PING_S)
        parts = runner.node.parts
        member = Member(
            parts.node_id, parts.incarnation, self.name,
            host_identity(self.config.shm_folder),
            sum(tier.capacity_bytes for tier in usage), sum(tier.used_bytes for tier in usage),
        )  # fmt: skip
        return member, sessions

    def _farewell(self, node: Node) -> None:
        self._tell("leave", node.parts.node_id)


NodeActor: Any = ray.remote(concurrency_groups=GROUPS)(NodeShell)  # type: ignore[call-overload]
