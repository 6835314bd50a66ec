"""The actor of a GPU: the HBM of engines that have none of their own, above its host's node.

Where there is no GPU, one CPU stand-in a node plays its part, and every report says so.
"""

from collections.abc import Awaitable
from typing import Any

import ray

from tiered_kv import assemble
from tiered_kv.actors.shell import GROUPS, Shell
from tiered_kv.config import Config
from tiered_kv.directory import Ack, GpuMember
from tiered_kv.errors import TieredKVError
from tiered_kv.node import Node
from tiered_kv.raylink import RayLink


class GpuShell(Shell):
    """One a GPU. What is in HBM ends with its process: misses, which the host's copies answer."""

    def __init__(self, config: Config, name: str, node: str, index: int = 0) -> None:
        """`node` is the Ray name of the host's actor; it may restart at any time."""
        self.node = node
        self.index = index
        super().__init__(config, name, self._assemble)

    def about(self) -> dict[str, Any]:
        """See `Shell.about`."""
        return super().about() | {"node": self.node, "index": self.index}

    def _assemble(self, _: Shell) -> Awaitable[Node]:
        link = RayLink(self.node, self.config.service.namespace)
        return assemble.gpu(self.config, link, self.index)

    def _beat(self) -> bool:
        try:
            parts = self.life.runner.node.parts
        except TieredKVError:
            return False
        gpu = GpuMember(self.name, self.node, parts.incarnation, parts.pool.describe())
        ack: Ack | None = self._tell("announce_gpu", gpu)
        return ack is not None and ack.superseded

    def _farewell(self, node: Node) -> None:
        self._tell("leave", self.name)


GpuActor: Any = ray.remote(concurrency_groups=GROUPS)(GpuShell)  # type: ignore[call-overload]
