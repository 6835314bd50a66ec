"""The request router: Serve asks it where a request goes. It decides nothing itself; `view` does.

Runs in the processes that send requests (ingress replicas, proxies, drivers) and needs no engine.
"""

import logging
import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from tiered_kv.errors import BadInput, BadSession
from tiered_kv.integrations.ray_serve.prompts import Prompt, prompt_of
from tiered_kv.integrations.ray_serve.view import View
from tiered_kv.integrations.ray_serve.whereabouts import Whereabouts
from tiered_kv.integrations.vllm.hints import FIELD, hints
from tiered_kv.sessions import session_id

logger = logging.getLogger(__name__)

MAX_UNDECIDED = 1 << 14
"""Requests that were ranked and have not been sent yet, which one remembers."""


class SessionRouter(MultiplexMixin, RequestRouter):
    """Sends a request where its prompt should be computed first: see `policies.routing`."""

    def initialize_state(
        self, namespace: str = "tiered_kv", ask_s: float = 0.02, **kwargs: Any
    ) -> None:
        """`namespace` is the service's; a request waits at most `ask_s` for its directory.

        Raises `BadInput` for other `request_router_kwargs`.
        """
        if kwargs:
            raise BadInput(f"SessionRouter takes namespace and ask_s, not {', '.join(kwargs)}")
        self._view = View()
        self._reports: dict[str, Any] = {}
        self._undecided: OrderedDict[str, tuple[Prompt, str | None, dict[str, float]]] = (
            OrderedDict()
        )
        self._whereabouts = Whereabouts(namespace, ask_s)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:  # fmt: skip
        """All candidates, each a rank of its own, the best first. Never raises and never waits
        for longer than `ask_s`."""
        replicas = {r.replica_id.to_full_id_str(): r for r in candidate_replicas}
        self._learn(replicas)
        if pending_request is None:
            return [list(candidate_replicas)]
        if pending_request.metadata.multiplexed_model_id:
            able = self.apply_multiplex_routing(pending_request)
            replicas = {n: r for n, r in replicas.items() if r.replica_id in able} or replicas
        prompt = prompt_of(pending_request.args[0]) if pending_request.args else Prompt(0)
        session = session_of(pending_request)
        placed = None
        if session is not None and not self._view.knows(session):
            placed = await self._whereabouts.find(session)
            self._learn({r.replica_id.to_full_id_str(): r for r in self.curr_replicas.values()})
            replicas = {n: r for n, r in replicas.items() if r.replica_id in self.curr_replicas}
        ranked = self._view.rank(
            prompt, session, replicas, self._queues(replicas), placed, time.monotonic()
        )
        work_s = {expected.replica.name: expected.work_s for expected in ranked}
        self._undecided[pending_request.metadata.internal_request_id] = prompt, session, work_s
        while len(self._undecided) > MAX_UNDECIDED:
            self._undecided.popitem(last=False)
        pending_request.routing_context.should_backoff = True
        return [[replicas[expected.replica.name]] for expected in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note what the replica has now to do, and will hold."""
        request = pending_request.metadata.internal_request_id
        found = self._undecided.pop(request, None)
        if found is not None:
            prompt, session, work_s = found
            name = replica_id.to_full_id_str()
            self._view.routed(
                request, name, prompt, session, work_s.get(name, 0.0), time.monotonic()
            )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The replica has less to do."""
        self._view.completed(internal_request_id, replica_id.to_full_id_str(), time.monotonic())

    def _learn(self, replicas: dict[str, RunningReplica]) -> None:
        self._view.there({name: replica.node_id or "" for name, replica in replicas.items()})
        for name, replica in replicas.items():
            report = (replica.routing_stats or {}).get(FIELD)
            if report is not None and self._reports.get(name) is not report:
                self._reports[name] = report
                self._view.heard(name, report)
        for name in self._reports.keys() - replicas.keys():
            del self._reports[name]

    def _queues(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        cache = self.replica_queue_len_cache
        lengths = {name: cache.get(replica.replica_id) for name, replica in replicas.items()}
        return {name: length for name, length in lengths.items() if length is not None}


def session_of(request: PendingRequest) -> str | None:
    """The session that a request names: in its body, else in the header that Serve reads."""
    params = getattr(request.args[0], "kv_transfer_params", None) if request.args else None
    try:
        return hints(params).session or session_id(request.metadata.session_id)
    except BadSession:
        return None  # the replica counts it; here it is a request without a session
