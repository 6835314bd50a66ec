"""Whether the media below a pool can be trusted right now, and what went wrong lately."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tiered_kv.breaker import Breaker
from tiered_kv.errors import TieredKVError
from tiered_kv.hierarchy import Hierarchy
from tiered_kv.mover import Mover
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import Failed, Medium, Move, Why

REMEMBERED = 50
BROKEN = (Why.IO_ERROR, Why.OFFLINE, Why.UNREACHABLE)
"""Failures that speak against the medium; a corrupt or missing block speaks against itself."""


class Health:
    """A breaker a tier and a short memory of errors. Takes tiers out and probes them back in."""

    def __init__(
        self, tiers: Mapping[Medium, Tier], hierarchy: Hierarchy, deadline_s: float
    ) -> None:
        self._tiers = tiers
        self._hierarchy = hierarchy
        self._deadline_s = deadline_s
        self._breakers = {medium: Breaker() for medium in tiers}
        self.errors: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    def note(self, move: Move, failed: Failed) -> None:
        """Remember one failure of a move."""
        self.remark(f"{move.source} -> {move.target}: {failed.why}: {failed.detail}")

    def remark(self, text: str) -> None:
        """Remember a sentence; repeats of the last one are counted, not repeated."""
        if self.errors and self.errors[-1]["text"] == text:
            self.errors[-1]["times"] += 1
            self.errors[-1]["at_s"] = time.time()
        else:
            self.errors.append({"at_s": time.time(), "text": text, "times": 1})

    def ended(self, medium: Medium, failed: Sequence[Failed], n: int, now: float) -> None:
        """A batch of `n` blocks has ended on this medium."""
        broken = [f for f in failed if f.why in BROKEN]
        if len(broken) < n:
            self._breakers[medium].ok()
        elif self._breakers[medium].failed(broken[0].detail, now):
            self._take_out(medium)

    def offline(self) -> dict[Medium, str]:
        """Media that are taken out, and why."""
        return {m: b.why for m, b in self._breakers.items() if b.open}

    async def check(self, mover: Mover, now: float, io: Callable[..., Awaitable[Any]]) -> None:
        """Take out what hangs or has vanished; probe what was taken out and is due."""
        overdue = mover.overdue(self._deadline_s)
        for medium, breaker in self._breakers.items():
            tier = self._tiers[medium]
            why = ""
            if medium in overdue:
                why = f"a copy has been running for more than {self._deadline_s} s"
            elif isinstance(tier, NvmeTier) and not tier.healthy():
                why = "its folder or files were removed or replaced"
            if why and not breaker.open and breaker.failed_now(why, now):
                self._take_out(medium)
            if medium in overdue:
                mover.give_up(medium, why)
            if not why and breaker.probe_due(now):
                await self._probe(medium, io)

    async def _probe(self, medium: Medium, io: Callable[..., Awaitable[Any]]) -> None:
        try:
            await io(self._tiers[medium].probe)
        except TieredKVError as error:
            self.remark(f"{medium} stays offline: {error}")
            return
        self._breakers[medium].probed()
        self._hierarchy.set_online(medium, True)
        self.remark(f"{medium} is back")

    def _take_out(self, medium: Medium) -> None:
        self._hierarchy.set_online(medium, False)
        self.remark(f"{medium} is taken out: {self._breakers[medium].why}")
