"""The router as Serve calls it, over replicas that are not started: no cluster, no engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from tiered_kv.errors import BadInput
from tiered_kv.integrations.ray_serve import SessionRouter
from tiered_kv.integrations.ray_serve.view import Placed
from tiered_kv.integrations.vllm.hints import FIELD

APP = DeploymentID(name="llm", app_name="app")


class Replica:
    """What the router reads of a running replica."""

    def __init__(self, name: str, node: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=APP)
        self.node_id = node
        self.routing_stats: dict[str, Any] = {}
        self.multiplexed_model_ids: set[str] = set()
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Directory:
    """Answers as the service's directory would, at once."""

    def __init__(self) -> None:
        self.placed: Placed | None = None
        self.asked: list[str] = []

    async def find(self, session: str) -> Placed | None:
        self.asked.append(session)
        return self.placed


def pending(request: str, session: str = "", prompt: Any = "x" * 8000, **more: Any) -> Any:
    body = SimpleNamespace(prompt=prompt, model="m", kv_transfer_params=None, **more)
    metadata = SimpleNamespace(
        internal_request_id=request, request_id=request, session_id=session,
        multiplexed_model_id="", call_method="completions",
    )  # fmt: skip
    return PendingRequest(args=[body], kwargs={}, metadata=metadata)


@pytest.fixture
async def router() -> SessionRouter:
    one = SessionRouter(
        deployment_id=APP, handle_source=DeploymentHandleSource.UNKNOWN,
        use_replica_queue_len_cache=True,
    )  # fmt: skip
    one.initialize_state(namespace="kv")
    one._whereabouts = Directory()  # type: ignore[assignment]
    one.update_replicas([Replica("r1", "n1"), Replica("r2", "n1"), Replica("r3", "n2")])  # type: ignore[list-item]
    return one


async def route(router: SessionRouter, request: Any) -> str:
    """As Serve does: choose, send, tell."""
    ranks = await router.choose_replicas(router._replicas_list, request)
    chosen = ranks[0][0]
    router.on_request_routed(request, chosen.replica_id, None)
    return str(chosen.replica_id.unique_id)


def complete(router: SessionRouter, request: str, name: str) -> None:
    router.on_request_completed(ReplicaID(unique_id=name, deployment_id=APP), request)


async def test_all_replicas_are_offered_the_best_first(router: SessionRouter):
    ranks = await router.choose_replicas(router._replicas_list, pending("q", "s"))
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    assert len({rank[0].replica_id for rank in ranks}) == 3


async def test_sessions_spread_stay_and_move_when_their_replica_goes(router: SessionRouter):
    homes = {}
    for i in range(3):
        homes[f"s{i}"] = await route(router, pending(f"q{i}", f"s{i}", str(i) + "x" * 8000))
        complete(router, f"q{i}", homes[f"s{i}"])
    assert len(set(homes.values())) == 3
    for session, home in homes.items():
        turn = pending("again" + session, session, session + "x" * 9000)
        assert await route(router, turn) == home
        complete(router, "again" + session, home)
    on_r1 = next(session for session, home in homes.items() if home == "r1")
    router.update_replicas([Replica("r2", "n1"), Replica("r3", "n2")])  # type: ignore[list-item]
    assert await route(router, pending("moved", on_r1, on_r1 + "x" * 9000)) == "r2"


async def test_only_sessions_that_no_replica_knows_are_looked_up(router: SessionRouter):
    directory: Any = router._whereabouts
    directory.placed = Placed("n2", 1900)
    assert await route(router, pending("q1", "asleep")) == "r3"
    complete(router, "q1", "r3")
    assert await route(router, pending("q2", "asleep")) == "r3"
    await route(router, pending("q3"))
    assert directory.asked == ["asleep"]


async def test_the_body_names_the_session_before_the_header_does(router: SessionRouter):
    directory: Any = router._whereabouts
    request = pending("q", "header")
    request.args[0].kv_transfer_params = {FIELD: {"session": "body"}}
    await router.choose_replicas(router._replicas_list, request)
    await router.choose_replicas(router._replicas_list, pending("q2", "not a name!"))
    assert directory.asked == ["body"]


async def test_a_replicas_report_is_weighed(router: SessionRouter):
    third = router._replicas_list[2]
    third.routing_stats = {FIELD: {"sessions": {"s": 2000}, "marks": []}}  # type: ignore[misc]
    assert await route(router, pending("q", "s")) == "r3"


@pytest.mark.parametrize("body", [[], ["a", "b"], None, [[1, 2], [3]], 7])
async def test_requests_of_any_kind_are_routed(router: SessionRouter, body: Any):
    assert await route(router, pending("q", prompt=body)) in ("r1", "r2", "r3")
    nothing = pending("q2")
    nothing.args = []
    assert await route(router, nothing) in ("r1", "r2", "r3")


async def test_an_unknown_setting_is_refused_by_name(router: SessionRouter):
    with pytest.raises(BadInput, match="imbalanced_threshold"):
        router.initialize_state(imbalanced_threshold=1)
