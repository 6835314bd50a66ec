"""What a router knows of its replicas: who holds what, and what each has still to do. Pure.

`now` is seconds of one monotonic clock. All of it is soft: a router that starts anew learns what
the replicas report and what the service's directory answers, and at worst sends a session to a
replica that has to load or compute it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from tiered_kv.integrations.ray_serve.prompts import Prompt
from tiered_kv.integrations.ray_serve.seen import Reported, Seen
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.policies.routing import Expected, Replica, Shelf, rank

PREFILL_S_PER_TOKEN = 1e-4
"""Of replicas that have not measured it yet."""
LOAD_SHARE = 0.1
"""What loading a token from its node's memory takes, compared with computing it, while nobody
knows better: a tenth is a slow link under a fast GPU."""
CAPACITY_TOKENS = 1 << 18
"""What an engine's own cache holds, of one that has not said."""
NODE_TOKENS = 1 << 24
"""What the tiers of a node hold, as far as the router remembers: the directory knows better."""


class Placed(NamedTuple):
    """What the directory says of a session: `tokens` of it are on a Ray node, and would be in
    its memory after `bring_s`."""

    node: str
    tokens: int
    bring_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    node: str
    seen: Seen
    reported: Reported = field(default_factory=lambda: Reported({}, {}))
    prefill_s: float | None = None
    busy_until: float = 0.0
    running: dict[str, float] = field(default_factory=dict)  # ours, with what each should take


class View:
    """Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._nodes: dict[str, Seen] = {}

    def there(self, replicas: Mapping[str, str]) -> None:
        """The replicas that are there now, with their Ray nodes. What others held in their own
        cache is gone; what their nodes hold is not. Cheap when nothing changed."""
        for name in self._replicas.keys() - replicas.keys():
            del self._replicas[name]
        for name, node in replicas.items():
            if name not in self._replicas:
                self._replicas[name] = _Replica(node, Seen(CAPACITY_TOKENS))
                self._nodes.setdefault(node, Seen(NODE_TOKENS))

    def heard(self, name: str, report: Mapping[str, Any]) -> None:
        """What a replica said of itself (`replica.report`)."""
        replica = self._replicas[name]
        replica.prefill_s = report.get("prefill_s_per_token")
        replica.seen.capacity_tokens = report.get("capacity_tokens") or CAPACITY_TOKENS
        replica.reported = Reported.of(report.get("sessions", {}), report.get("marks", ()))

    def knows(self, session: str) -> bool:
        """Whether a replica or a node that is there is known to have served the session."""
        nodes = {replica.node for replica in self._replicas.values()}
        return any(session in self._nodes[node] for node in nodes) or any(
            session in replica.reported.sessions for replica in self._replicas.values()
        )

    def rank(
        self, prompt: Prompt, session: str | None, names: Collection[str],
        queues: Mapping[str, int], placed: Placed | None, now: float,
    ) -> list[Expected]:  # fmt: skip
        """The replicas `names`, the one that should finish the prompt first in front.

        `queues` are requests that each has, whoever sent them, where that is known; `placed` is
        what the directory answered.
        """
        prefill = Prefill(self._prefill_s())
        on_node = {node: seen.holds(prompt, session) for node, seen in self._nodes.items()}
        known = [
            self._candidate(name, prompt, session, queues.get(name), on_node, placed, prefill, now)
            for name in names
        ]
        return rank(max(1, prompt.tokens), known)

    def routed(
        self, request: str, name: str, prompt: Prompt, session: str | None, work_s: float,
        now: float,
    ) -> None:  # fmt: skip
        """A request was sent to a replica, where it should take `work_s`."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.busy_until = max(now, replica.busy_until) + work_s
        replica.running[request] = work_s
        replica.seen.note(prompt, session)
        self._nodes[replica.node].note(prompt, session)

    def completed(self, request: str, name: str, now: float) -> None:
        """A request has ended, however."""
        replica = self._replicas.get(name)
        if replica is None or replica.running.pop(request, None) is None:
            return
        if not replica.running:
            replica.busy_until = now  # whatever was modelled, nothing of ours is left

    def _prefill_s(self) -> float:
        """Seconds a token, the same for all: replicas of a deployment are alike, and one that
        measured itself in a bad moment must not seem to gain less from what it holds."""
        known = [r.prefill_s for r in self._replicas.values() if r.prefill_s]
        return median(known) if known else PREFILL_S_PER_TOKEN

    def _cached(self, replica: _Replica, prompt: Prompt, session: str | None) -> int:
        ours = replica.seen.holds(prompt, session)
        return max(ours, replica.reported.holds(prompt, session))

    def _candidate(
        self, name: str, prompt: Prompt, session: str | None, queued: int | None,
        on_node: Mapping[str, int], placed: Placed | None, prefill: Prefill, now: float,
    ) -> Replica:  # fmt: skip
        replica = self._replicas[name]
        load_s = prefill.linear_s * LOAD_SHARE
        shelves = [Shelf(self._cached(replica, prompt, session))]
        below = on_node.get(replica.node, 0)
        shelves.append(Shelf(below, below * load_s))
        if placed is not None and placed.node == replica.node:
            tokens = min(placed.tokens, prompt.tokens)
            shelves.append(Shelf(tokens, tokens * load_s + placed.bring_s))
        ours = len(replica.running)
        others = max(0, (queued or 0) - ours)
        # What requests of other routers take is not known: as much as this one, computed anew.
        queue_s = max(0.0, replica.busy_until - now) + others * prefill.seconds(0, prompt.tokens)
        return Replica(name, prefill, queue_s, ours + others, len(replica.seen), tuple(shelves))
