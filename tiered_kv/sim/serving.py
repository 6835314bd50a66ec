"""A serving engine over a simulated node: admission, wake, prefill, decode, save.

With admission a request waits until HBM has room for all running ones. Without it the server
keeps the KV of every open session in HBM and takes each request that comes: an allocation that
fails ends the process, with all that it held. That is what "OOM" counts.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import IN_POOL, Hit, decide
from tiered_kv.sessions import Session
from tiered_kv.sim.clock import Clock, Process, Signal
from tiered_kv.sim.gpu import Gpu, Rates
from tiered_kv.sim.machine import LAYOUT, LEASE_S, Machine, Setup
from tiered_kv.sim.shelves import Archive
from tiered_kv.types import BlockKey, Lease, Medium, Reservation, SessionId

Attempt = Generator["float | Signal", None, bool]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `run` are the blocks of its prompt that may be held, `after` all blocks when
    it has been answered; with `tail` the last of these is incomplete. `sid` is None for requests
    that belong to no session."""

    sid: SessionId | None
    run: tuple[BlockKey, ...]
    known_tokens: int  # of `run`
    prompt_tokens: int
    output_tokens: int
    after: tuple[BlockKey, ...]
    tail: bool = False


@dataclass(slots=True)
class Log:
    """What happened to requests that were answered since `since_s`. Seconds and tokens."""

    since_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    wakes: list[tuple[str, float]] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    lost_requests: int = 0
    ooms: int = 0
    held_at_oom: list[int] = field(default_factory=list)
    chosen_recompute: int = 0
    uncached: int = 0


class Gate:
    """Lets requests in, first come first served, as long as their blocks fit. A request that
    wants more than everything is let in alone."""

    def __init__(self, clock: Clock, capacity: int) -> None:
        self._clock = clock
        self._capacity = capacity
        self._taken = 0
        self._queue: deque[tuple[int, Signal]] = deque()

    def enter(self, need: int) -> Process:
        """Wait for one's turn."""
        turn = self._clock.signal()
        self._queue.append((need, turn))
        self._next()
        yield turn

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def leave(self, need: int) -> None:
        """The counterpart of `enter`."""
        self._taken -= need
        self._next()

    def open(self) -> None:
        """Let everybody go: the server has ended."""
        while self._queue:
            self._queue.popleft()[1].fire()

    def _next(self) -> None:
        while self._queue:
            need, turn = self._queue[0]
            if self._taken and self._taken + need > self._capacity:
                return
            self._queue.popleft()
            self._taken += need
            turn.fire()


class Server:
    """The engine of one node."""

    def __init__(self, clock: Clock, setup: Setup, *, choose: bool = True) -> None:
        """`choose`: recompute where loading would take longer."""
        gpu = setup.profile.gpu
        rates = Rates(setup.model, gpu.count * gpu.flops, gpu.count * gpu.hbm_bytes_per_s,
                      gpu.mfu, gpu.mbu)  # fmt: skip
        self.clock = clock
        self.setup = setup
        self.log = Log()
        self.gpu = Gpu(clock, rates)
        self._naive = not setup.admission
        self._choose = choose
        self._up_s = 0.0
        self._start()

    def _start(self) -> None:
        """A fresh process, with empty memory."""
        self.machine = Machine(self.clock, self.setup)
        self.archive = Archive(self.machine)
        self._gate = Gate(self.clock, 1 if self._naive else self.machine.pool_blocks)
        self._kept: dict[SessionId, int] = {}  # leases of open sessions, where nothing may leave
        self._running: set[SessionId] = set()  # whose blocks are in HBM, whole

    @property
    def queued(self) -> int:
        """Requests that wait for room in HBM."""
        return len(self._gate)

    def serve(self, ask: Ask) -> Process:
        """Answer a request; however often the server has to start again for it."""
        arrived = self.clock.now
        while True:
            while self.clock.now < self._up_s:
                yield self._up_s - self.clock.now
            machine, gate = self.machine, self._gate
            need = 1 if self._naive else max(1, len(ask.after))
            yield from gate.enter(need)
            if machine is self.machine:
                answered = yield from self._answer(ask, arrived, gate, need)
                if answered:
                    return
            self._count("lost_requests", 1, arrived)

    def close(self, sid: SessionId) -> None:
        """A session has ended: its blocks are worth nothing any more."""
        machine = self.machine
        if sid in self._kept:
            machine.hierarchy.release(self._kept.pop(sid))
        self.archive.close(sid)
        if machine.table.find(sid) is not None:
            machine.hierarchy.forget(machine.table.close(sid))

    def holds(self, sid: SessionId) -> bool:
        """Whether the whole KV of a session is somewhere in reach."""
        if sid in self._running:
            return True
        session = self.machine.table.find(sid)
        if session is None:
            return False
        return self.machine.holds(session.run) or self.archive.held(sid) >= len(session.run)

    def _answer(self, ask: Ask, arrived: float, gate: Gate, need: int) -> Attempt:
        """True when the request was answered, False when the server crashed meanwhile."""
        machine, log = self.machine, self.log
        hierarchy = machine.hierarchy
        if ask.sid is not None:
            machine.table.enter(ask.sid)
        yield from self._load(ask, machine)
        if machine is not self.machine:
            return False
        lease = hierarchy.lease(ask.run, LEASE_S, self.clock.now)
        held = min(len(lease.keys) * self.setup.block_tokens, ask.known_tokens)
        cached = min(held, max(0, ask.prompt_tokens - 1))  # the last token is always computed
        reserved: list[Reservation] = []
        yield from machine.store(ask.after, reserved)
        if machine is not self.machine:
            return False
        if not reserved and self._naive:
            self._crash()
            return False
        if reserved and ask.sid is not None:
            self._running.add(ask.sid)
        yield self.gpu.prefill(ask.prompt_tokens - cached, cached)
        if machine is not self.machine:
            return False
        if self._naive:
            gate.leave(need)
        first = self.clock.now + self.gpu.step_s() - arrived
        yield self.gpu.decode(ask.output_tokens, ask.prompt_tokens)
        if machine is not self.machine:
            return False
        self._save(ask, lease, reserved)
        if not self._naive:
            gate.leave(need)
        if arrived >= log.since_s:
            log.ttft_s.append(first)
        self._count("uncached", not reserved)
        self._count("output_tokens", ask.output_tokens)
        self._count("prompt_tokens", ask.prompt_tokens)
        self._count("hit_tokens", cached)
        self._count("recomputed_tokens", ask.known_tokens - cached if ask.sid else 0)
        return True

    def _load(self, ask: Ask, machine: Machine) -> Process:
        """Bring up what is held and worth it: from the tiers and from a shelf, side by side."""
        near = machine.where(ask.run)
        where = [*near, *self._on_shelf(ask, len(near))]
        wanted = where[: self._worth(ask, where, machine)]
        slow = [name for name in wanted if name != Medium.HBM]
        if not slow:
            return
        began, shelved = self.clock.now, len(wanted) - len(near)
        if shelved > 0:
            arrived = machine.carry(*machine.path(wanted[-1], True), shelved * machine.block_bytes)
        yield from machine.wake(ask.run[: min(len(near), len(wanted))])
        if shelved > 0 and machine is self.machine:
            reserved: list[Reservation] = []
            yield from machine.store(ask.run[: len(wanted)], reserved)
            yield arrived
            if reserved:
                machine.hierarchy.commit(reserved[0].id)
        self._woke(max(slow, key=[*Medium, *machine.setup.shelves].index), began)

    def _on_shelf(self, ask: Ask, near: int) -> list[str]:
        """The shelf that has what follows, once for each block of it."""
        shelf = None if ask.sid is None else self.archive.where(ask.sid)
        if ask.sid is None or shelf is None:
            return []
        return [shelf] * (min(self.archive.held(ask.sid), len(ask.run)) - near)

    def _worth(self, ask: Ask, where: Sequence[str], machine: Machine) -> int:
        """How many of the held blocks to load, decided as the service does."""
        names = sorted(set(where) - {Medium.HBM})
        if not self._choose or not names:
            return len(where)
        index = {Medium.HBM: IN_POOL} | {name: i for i, name in enumerate(names)}
        size = self.setup.block_tokens
        hit = Hit(
            len(where), size, machine.block_bytes, max(1, ask.prompt_tokens - len(where) * size),
            where=tuple(index[name] for name in where),
        )  # fmt: skip
        media = [machine.traffic.link(*machine.path(name, True)) for name in names]
        # One medium streams through the link to the GPUs; several have to share it.
        shared = Link(machine.link_bytes_per_s) if len(names) > 1 else None
        made = decide(hit, media, self.gpu.outlook(), shared)
        self._count("chosen_recompute", made.recompute > 0)
        return made.load

    def _save(self, ask: Ask, lease: Lease, reserved: list[Reservation]) -> None:
        machine, sid = self.machine, ask.sid
        if reserved:
            machine.hierarchy.commit(reserved[0].id)
        machine.hierarchy.release(lease.id)
        if sid is not None:
            self._running.discard(sid)
            machine.table.leave(sid)
            tokens = ask.prompt_tokens + ask.output_tokens
            session = Session(sid, LAYOUT, ask.after, tokens, ask.tail, self.clock.now)
            superseded = machine.table.save(session)
            if self._naive:
                if sid in self._kept:
                    machine.hierarchy.release(self._kept[sid])
                kept = machine.hierarchy.lease(ask.after, LEASE_S, self.clock.now)
                self._kept[sid] = kept.id
            machine.hierarchy.forget(superseded)
            self.archive.used(sid, len(ask.after))
        machine.kick()

    def _crash(self) -> None:
        """Out of memory: everything is lost, and the server starts again."""
        self._count("ooms", 1)
        self.log.held_at_oom.append(len(self._running | self._kept.keys()))
        self._up_s = self.clock.now + self.setup.profile.gpu.restart_s
        gate = self._gate
        self._start()
        self.gpu.stop()
        gate.open()

    def _woke(self, medium: str, began: float) -> None:
        if began >= self.log.since_s:
            self.log.wakes.append((medium, self.clock.now - began))

    def _count(self, name: str, n: int, when: float | None = None) -> None:
        if (self.clock.now if when is None else when) >= self.log.since_s:
            setattr(self.log, name, getattr(self.log, name) + int(n))
