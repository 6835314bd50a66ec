"""Which replica answers a request: the one that is expected to finish its prompt first.

Pure arithmetic over what the router was told. A replica's part of the prompt can lie on several
shelves: in the engine itself (free), or in the node below it (to be loaded). Prompts that nobody
knows go where the queue is shortest, and among equals where the fewest sessions live; a session
stays where it is until waiting there costs more than its cache saves. Tokens and seconds
throughout; both may be estimates, if the same for all replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.errors import BadInput
from tiered_kv.policies.load_or_recompute import Prefill


@dataclass(frozen=True, slots=True)
class Shelf:
    """The leading `tokens` of the prompt lie here, and are in the engine `load_s` after its turn
    has come: 0 for the engine's own cache."""

    tokens: int
    load_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.tokens >= 0 and self.load_s >= 0):
            raise BadInput(f"{self} cannot be a shelf")


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the router knows it. `queue_s` are ahead of a request that comes now;
    `running` requests and `sessions` only decide among equals."""

    name: str
    prefill: Prefill
    queue_s: float = 0.0
    running: int = 0
    sessions: int = 0
    shelves: tuple[Shelf, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """What a replica would do with the request: `queue_s` until its turn, `work_s` for the load
    of what it has and the prefill of the rest; `cached` tokens need no prefill."""

    replica: Replica
    queue_s: float
    work_s: float
    cached: int

    @property
    def finish_s(self) -> float:
        """Until the last token of the prompt is computed."""
        return self.queue_s + self.work_s


def expect(tokens: int, replica: Replica) -> Expected:
    """The best that the replica can do with a prompt of `tokens`: it loads from one of its
    shelves, or from none where computing is faster. O(shelves)."""
    best = Expected(replica, replica.queue_s, replica.prefill.seconds(0, tokens), 0)
    for shelf in replica.shelves:
        cached = min(shelf.tokens, tokens)
        # Loading a part of a shelf takes a part of its time, as far as anybody knows.
        load_s = shelf.load_s * cached / shelf.tokens if shelf.tokens else 0.0
        work_s = load_s + replica.prefill.seconds(cached, tokens)
        if work_s < best.work_s:
            best = Expected(replica, replica.queue_s, work_s, cached)
    return best


def rank(tokens: int, replicas: Sequence[Replica]) -> list[Expected]:
    """All replicas, the one that is expected to finish first in front. O(replicas log replicas).

    Among equals: the fewest running requests, the fewest sessions, the name, so that the answer
    depends on nothing else.
    """
    found = [expect(tokens, replica) for replica in replicas]
    return sorted(
        found,
        key=lambda e: (e.finish_s, e.replica.running, e.replica.sessions, e.replica.name),
    )
