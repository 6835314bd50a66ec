"""A fleet of replicas under a trace: what a way of routing hits, and how evenly it loads them.

Each replica computes prompts one after another, first come first served, over a cache of its own.
The router knows what each cache holds; the choice `shortest_finish` is that of the real router.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from tiered_kv.errors import UnknownName
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.policies.lru import LRU
from tiered_kv.policies.routing import Replica, Shelf, rank
from tiered_kv.sim.traces import Request
from tiered_kv.types import BlockKey, Run


@dataclass(slots=True)
class Engine:
    """One replica: a cache of `capacity` blocks under LRU, and the time until which it is busy."""

    name: str
    capacity: int
    free_s: float = 0.0
    busy_s: float = 0.0
    requests: int = 0
    _held: set[BlockKey] = field(default_factory=set)
    _order: LRU = field(default_factory=lambda: LRU(0))

    def hit(self, run: Run) -> int:
        """Leading blocks of the run that are here."""
        return sum(1 for _ in takewhile(self._held.__contains__, run))

    def serve(self, at_s: float, run: Run, work_s: float) -> None:
        """Compute a prompt after those before it, and keep its blocks, which never evict each
        other: what does not fit of a run is not kept."""
        self.free_s = max(self.free_s, at_s) + work_s
        self.busy_s += work_s
        self.requests += 1
        kept = run[: self.capacity]
        mine = set(kept)
        new = [key for key in kept if key not in self._held]
        over = len(self._held) + len(new) - self.capacity
        out = self._order.victims(over, lambda key: key not in mine)
        self._order.remove(out)
        self._held.difference_update(out)
        self._order.admit(new, [key for key in kept if key in self._held])
        self._held.update(new)


class Asked(NamedTuple):
    """A request, and in what it is counted."""

    at_s: float
    run: Run
    block_tokens: int
    prefill: Prefill


Choose = Callable[[Asked, Sequence[Engine]], Engine]


def round_robin(_: Asked, fleet: Sequence[Engine]) -> Engine:
    """One after another."""
    return min(fleet, key=lambda engine: (engine.requests, engine.name))


def longest_prefix(asked: Asked, fleet: Sequence[Engine]) -> Engine:
    """Where most of the prompt lies, however busy that is; among equals the first to be free."""
    return min(fleet, key=lambda engine: (-engine.hit(asked.run), engine.free_s))


def shortest_finish(asked: Asked, fleet: Sequence[Engine]) -> Engine:
    """What `policies.routing` ranks first."""
    known = [
        Replica(
            engine.name, asked.prefill, queue_s=max(0.0, engine.free_s - asked.at_s),
            sessions=engine.requests, shelves=(Shelf(engine.hit(asked.run) * asked.block_tokens),),
        )
        for engine in fleet
    ]  # fmt: skip
    best = rank(len(asked.run) * asked.block_tokens, known)[0].replica.name
    return next(engine for engine in fleet if engine.name == best)


CHOICES: dict[str, Choose] = {
    choose.__name__: choose for choose in (round_robin, longest_prefix, shortest_finish)
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`imbalance` is the work of the busiest replica over the mean; `wait_s` the mean time until
    a prompt's last token is computed."""

    hit_ratio: float
    imbalance: float
    wait_s: float


def route(
    requests: Iterable[Request], choice: str, prefill: Prefill,
    replicas: int = 10, capacity: int = 5859, block_tokens: int = 512,
) -> Outcome:  # fmt: skip
    """Send every request where `choice` says. Raises `UnknownName` with the list of known ones."""
    if choice not in CHOICES:
        raise UnknownName(f"routing {choice!r} is not one of {', '.join(sorted(CHOICES))}")
    fleet = [Engine(f"replica-{i:03d}", capacity) for i in range(replicas)]
    hits = blocks = count = 0
    waited = 0.0
    for request in requests:
        engine = CHOICES[choice](Asked(request.at_s, request.run, block_tokens, prefill), fleet)
        hit = engine.hit(request.run)
        work_s = prefill.seconds(hit * block_tokens, len(request.run) * block_tokens)
        engine.serve(request.at_s, request.run, work_s)
        hits, blocks, count = hits + hit, blocks + len(request.run), count + 1
        waited += engine.free_s - request.at_s
    work = [engine.busy_s for engine in fleet]
    mean = sum(work) / replicas
    return Outcome(hits / max(1, blocks), max(work) / mean if mean else 1.0, waited / max(1, count))
