"""Media and links as fluids: what is under way on a device shares its bandwidth.

A transfer crosses one or more devices at once (NVMe and PCIe, say) and goes as fast as the
slowest share it gets. On a duplex device the two directions do not disturb each other; on any
other one reads and writes take turns, so that demotions slow restores down. Transfers wait in
lanes like those of `mover`: one up and one down a medium, `LANE_WORKERS` at once, restores before
stores before demotions.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tiered_kv.errors import BadInput
from tiered_kv.policies.links import Link
from tiered_kv.sim.clock import Clock

LANE_WORKERS = 2
"""As in `tiered_kv.mover`."""

EPSILON_S = 1e-9
"""A transfer that would end within this time has ended: less is rounding."""


@dataclass(frozen=True, slots=True)
class Device:
    """A medium or a link. `read` is towards the GPU. Bytes a second, and seconds until the first
    byte of a transfer."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    duplex: bool = True

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{self.name}: {name} = {getattr(self, name)} must be positive")
        if not 0 <= self.latency_s < float("inf"):
            raise BadInput(f"{self.name}: latency_s = {self.latency_s} must not be negative")


class Leg(NamedTuple):
    """One device of a transfer's path, and whether it is read or written."""

    device: Device
    read: bool

    @property
    def bytes_per_s(self) -> float:
        """What the device gives to a transfer that has it alone."""
        return self.device.read_bytes_per_s if self.read else self.device.write_bytes_per_s


Lane = tuple[str, bool]
"""Name of a medium, and whether it is read."""


@dataclass(slots=True)
class _Flow:
    lane: Lane
    legs: tuple[Leg, ...]
    nbytes: int
    left: float  # bytes
    then: Callable[[], None]
    rate: float = 0.0  # bytes a second

    @property
    def over(self) -> bool:
        return self.left <= self.rate * EPSILON_S


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    flow: _Flow = field(compare=False)


class Traffic:
    """All transfers of one machine. O(transfers under way) an event; lanes keep these few."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: list[_Flow] = []
        self._queues: defaultdict[Lane, list[_Waiting]] = defaultdict(list)
        self._taken: Counter[Lane] = Counter()
        self._backlog: Counter[Lane] = Counter()
        self._since = 0.0
        self._version = 0
        self._number = 0
        self.bytes: Counter[tuple[str, bool]] = Counter()
        self.busy_s: defaultdict[str, float] = defaultdict(float)

    def submit(
        self, lane: Lane, legs: Sequence[Leg], nbytes: int, priority: int,
        then: Callable[[], None],
    ) -> None:  # fmt: skip
        """Queue a transfer; `then` is called when its last byte has arrived."""
        self._number += 1
        flow = _Flow(lane, tuple(legs), nbytes, float(nbytes), then)
        self._backlog[lane] += nbytes
        heapq.heappush(self._queues[lane], _Waiting(priority, self._number, flow))
        self._admit(lane)

    def link(self, lane: Lane, legs: Sequence[Leg]) -> Link:
        """What a node would know of a lane: how fast it is when alone, and what is queued."""
        alone = min(leg.bytes_per_s for leg in legs)
        latency_s = sum(leg.device.latency_s for leg in legs)
        return Link(alone, latency_s, float(self._backlog[lane]))

    def _admit(self, lane: Lane) -> None:
        queue = self._queues[lane]
        while queue and self._taken[lane] < LANE_WORKERS:
            flow = heapq.heappop(queue).flow
            self._taken[lane] += 1
            latency_s = sum(leg.device.latency_s for leg in flow.legs)
            self._clock.after(latency_s, partial(self._begin, flow))

    def _begin(self, flow: _Flow) -> None:
        self._advance()
        self._active.append(flow)
        self._share()

    def _advance(self) -> None:
        """Move everything on to now."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed > 0:
            for name in {leg.device.name for flow in self._active for leg in flow.legs}:
                self.busy_s[name] += passed
            for flow in self._active:
                flow.left -= flow.rate * passed

    def _share(self) -> None:
        """Equal shares of each device, then the slowest share on the path of each transfer."""
        users: Counter[tuple[str, bool]] = Counter()
        for flow in self._active:
            users.update((leg.device.name, leg.read) for leg in flow.legs)
        for flow in self._active:
            flow.rate = min(leg.bytes_per_s / self._rivals(users, leg) for leg in flow.legs)
        self._version += 1
        if self._active:
            next_s = min(max(0.0, flow.left) / flow.rate for flow in self._active)
            version = self._version
            self._clock.after(next_s, lambda: self._arrive(version))

    def _rivals(self, users: Counter[tuple[str, bool]], leg: Leg) -> int:
        name = leg.device.name
        same = users[name, leg.read]
        return same if leg.device.duplex else same + users[name, not leg.read]

    def _arrive(self, version: int) -> None:
        if version != self._version:
            return  # somebody came or went since this was foreseen
        self._advance()
        ended = [flow for flow in self._active if flow.over]
        self._active = [flow for flow in self._active if not flow.over]
        self._share()
        for flow in ended:
            self._taken[flow.lane] -= 1
            self._backlog[flow.lane] -= flow.nbytes
            for leg in flow.legs:
                self.bytes[leg.device.name, leg.read] += flow.nbytes
            flow.then()
            self._admit(flow.lane)
