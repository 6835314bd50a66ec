"""One simulated node: the real hierarchy and session table, whose moves take simulated time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from tiered_kv.errors import BadInput
from tiered_kv.hierarchy import Hierarchy, TierSpec
from tiered_kv.sessions import SessionTable
from tiered_kv.sim.clock import Clock, Process, Signal
from tiered_kv.sim.devices import Device, Lane, Leg, Traffic
from tiered_kv.sim.models import ModelSpec
from tiered_kv.sim.profiles import Profile, StorePart
from tiered_kv.types import (
    Done,
    Fingerprint,
    Held,
    Medium,
    Move,
    Outcome,
    Refused,
    Reservation,
    Run,
    Why,
)

LAYOUT = Fingerprint(bytes(16))
GROUP_BYTES = 16 << 30
"""Moves of one kind between the same tiers are carried as one transfer up to this size: the node
pipelines them, and the simulator saves events."""
RECENT_S = 300.0
LEASE_S = 1e9
WAKE_DEADLINE_S = STORE_DEADLINE_S = 5.0
"""As in the defaults of the service."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a simulated node consists of. `tiers` are those of the node below HBM; `shelves` lie
    beyond it (other hosts' memory, an object store) and take whole sessions. Without `admission`
    nothing ever leaves HBM, which ends at its high watermark: above it is what activations need."""

    profile: Profile
    model: ModelSpec
    block_tokens: int = 512
    tiers: tuple[Medium, ...] = (Medium.DRAM, Medium.NVME)
    shelves: tuple[str, ...] = ()
    policy: str = "lru"
    admission: bool = True

    def __post_init__(self) -> None:
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise BadInput(f"block_tokens = {self.block_tokens!r} must be a positive whole number")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all GPUs."""
        return self.block_tokens * self.model.kv_bytes

    def specs(self) -> list[TierSpec]:
        """The tiers, HBM first: what the weights leave of it. Raises `BadInput`."""
        gpu, weights = self.profile.gpu, self.model.weight_bytes
        pool = self.profile.hbm_bytes - weights
        room = gpu.high * self.profile.hbm_bytes - weights
        if room < self.block_bytes:
            raise BadInput(
                f"model {self.model.name}: {weights / 1e9:.0f} GB of weights leave no KV in "
                f"{gpu.high:.0%} of {self.profile.hbm_bytes / 1e9:.0f} GB of HBM "
                f"(profile {self.profile.name})"
            )
        low = max((gpu.low * self.profile.hbm_bytes - weights) / pool, room / pool / 2)
        if not self.admission:
            return [self._spec(Medium.HBM, room, 1.0, 1.0)]
        found = [self._spec(Medium.HBM, pool, room / pool, low)]
        for medium in self.tiers:
            part = self.part(medium)
            found.append(self._spec(medium, part.bytes, part.high, part.low))
        return found

    def part(self, name: str) -> StorePart:
        """The medium below HBM of this name. Raises `BadInput` where the profile has none."""
        part: StorePart | None = getattr(self.profile, name, None)
        if part is None:
            raise BadInput(f"profile {self.profile.name} has no {name}")
        return part

    def _spec(self, medium: Medium, nbytes: float, high: float, low: float) -> TierSpec:
        blocks = int(nbytes / self.block_bytes)
        if blocks < 1:
            raise BadInput(f"{medium}: {nbytes / 1e9:g} GB hold no block of {self.block_bytes} B")
        size = blocks * self.block_bytes
        return TierSpec(medium, size, self.block_bytes, high=high, low=low, policy=self.policy)


class Machine:
    """Hierarchy, sessions and traffic of one node."""

    def __init__(self, clock: Clock, setup: Setup, traffic: Traffic | None = None) -> None:
        self.clock = clock
        self.setup = setup
        self.traffic = traffic or Traffic(clock)
        self.hierarchy = Hierarchy(setup.specs())
        self.table = SessionTable(RECENT_S)
        self.block_bytes = setup.block_bytes
        self._flights: dict[int, Signal] = {}
        self._moved = clock.signal()
        self._devices = devices(setup.profile)

    @property
    def pool_blocks(self) -> int:
        """Blocks that HBM holds below its high watermark."""
        spec = self.hierarchy.book.top.spec
        return int(spec.high * spec.capacity_bytes / self.block_bytes + 1e-9)

    @property
    def link_bytes_per_s(self) -> float:
        """Of the link to the GPUs, in each direction."""
        return self._devices["link"].read_bytes_per_s

    def path(self, name: str, up: bool) -> tuple[Lane, tuple[Leg, ...]]:
        """Lane and devices between HBM and a medium."""
        legs = (Leg(self._devices[name], up), Leg(self._devices["link"], up))
        return (name, up), legs

    def beside(self, name: str, source: str) -> tuple[Lane, tuple[Leg, ...]]:
        """Lane and devices from a medium of the node down to one below it."""
        legs = (Leg(self._devices[source], True), Leg(self._devices[name], False))
        return (name, False), legs

    def kick(self) -> None:
        """Start what the hierarchy wants to move now."""
        groups: list[list[Move]] = []
        sizes: list[int] = []
        for move in self.hierarchy.due(self.clock.now):
            nbytes = move.nbytes * len(move.blocks)
            if not groups or not _alike(groups[-1][0], move) or sizes[-1] + nbytes > GROUP_BYTES:
                groups.append([])
                sizes.append(0)
            groups[-1].append(move)
            sizes[-1] += nbytes
            self._flights[move.id] = self.clock.signal()
        for moves, size in zip(groups, sizes, strict=True):
            first = moves[0]
            if first.target is Medium.HBM:
                lane, legs = self.path(first.source, True)
            elif first.source is Medium.HBM:
                lane, legs = self.path(first.target, False)
            else:
                lane, legs = self.beside(first.target, first.source)
            self.traffic.submit(lane, legs, size, int(first.kind), partial(self._landed, moves))

    def _landed(self, moves: Sequence[Move]) -> None:
        for move in reversed(moves):  # heads last: they are to be the most recent ones below
            outcomes: list[Outcome] = [Done(1)] * len(move.blocks)
            self.hierarchy.done(move, outcomes)
            self._flights.pop(move.id).fire()
        moved, self._moved = self._moved, self.clock.signal()
        moved.fire()
        self.kick()

    def wake(self, run: Run) -> Process:
        """Bring the leading held part of a run into HBM; what `Node.fetch` does, without lease."""
        end = self.clock.now + WAKE_DEADLINE_S
        while run:
            late = self.clock.now >= end
            wanted = self.hierarchy.want(run, LAYOUT, self.block_bytes, force=late)
            self.kick()
            if wanted.moves:
                yield from [self._flights[i] for i in wanted.moves if i in self._flights]
            elif not wanted.short or late or wanted.why is not Why.DEMOTING:
                return
            else:
                yield from self._something_moves()

    def store(self, run: Run, into: list[Reservation]) -> Process:
        """Reserve what is missing of a run; nothing is appended where nothing can leave."""
        end = self.clock.now + STORE_DEADLINE_S
        while True:
            late = self.clock.now >= end
            answer = self.hierarchy.reserve(run, LAYOUT, self.block_bytes, "sim", force=late)
            self.kick()
            match answer:
                case Reservation():
                    into.append(answer)
                    return
                case Refused(why=Why.DEMOTING) if not late:
                    yield from self._something_moves()
                case _:
                    return

    def carry(
        self, lane: Lane, legs: Sequence[Leg], nbytes: int, priority: int = 0
    ) -> Signal:  # fmt: skip
        """A transfer that is no move of the hierarchy; fires when it has arrived."""
        ended = self.clock.signal()
        self.traffic.submit(lane, legs, nbytes, priority, ended.fire)
        return ended

    def where(self, run: Run) -> list[Medium]:
        """The fastest tier of each block of the leading held part of a run."""
        held = takewhile(lambda answer: isinstance(answer, Held), self.hierarchy.lookup(run))
        return [answer.tiers[0] for answer in held if isinstance(answer, Held)]

    def holds(self, run: Run) -> bool:
        """Whether a whole run is somewhere here: its last block says so, since a block's parent
        is resident wherever it is (prefix closure)."""
        return bool(run) and run[-1] in self.hierarchy.book.blocks

    def _something_moves(self) -> Process:
        if self._flights:
            yield self._moved
        else:
            yield 0.001


def devices(profile: Profile) -> dict[str, Device]:
    """The devices of a node by name. Memory and links are duplex; a drive is not."""
    link = profile.link
    rate = link.links * link.bytes_per_s
    found = {"link": Device("link", rate, rate, link.latency_s)}
    for name in ("dram", "nvme", "remote", "s3"):
        part: StorePart | None = getattr(profile, name)
        if part is not None:
            found[name] = Device(
                name, part.read_bytes_per_s, part.write_bytes_per_s, part.latency_s,
                duplex=name != "nvme",
            )  # fmt: skip
    return found


def _alike(one: Move, other: Move) -> bool:
    return (one.kind, one.source, one.target) == (other.kind, other.source, other.target)
