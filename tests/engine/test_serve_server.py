"""What `Sessions` adds to a server class, over one whose engine is a generator."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.integrations.ray_serve.companion import Companion
from tiered_kv.integrations.ray_serve.report import Watch
from tiered_kv.integrations.ray_serve.server import Sessions
from tiered_kv.integrations.vllm.hints import FIELD


class Server:
    """Answers with what the request asks for; notes what it was given and how it ended."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.closed = 0

    async def chat(self, request: Any, raw_request_info: Any) -> AsyncGenerator[Any, None]:
        if request.fails:
            raise ValueError("no such model")
        self.given.append(request.kv_transfer_params)
        return self._answer(request.pieces)

    async def completions(self, request: Any, raw_request_info: Any) -> AsyncGenerator[Any, None]:
        return await self.chat(request, raw_request_info)

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"engine": 1}

    async def _answer(self, pieces: list[Any]) -> AsyncGenerator[Any, None]:
        try:
            for piece in pieces:
                yield piece
        finally:
            self.closed += 1


class WithSessions(Sessions, Server):
    """As in a replica, with a companion that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._watch = Watch()
        self._companion = Companion("node", self._watch.counts)
        self.prefetched: list[str] = []
        self._companion.prefetch = self.prefetched.append  # type: ignore[method-assign, assignment]


def request(*pieces: Any, params: Any = None, fails: bool = False) -> Any:
    return SimpleNamespace(
        messages=[{"role": "user", "content": "x" * 4000}], model="m", pieces=list(pieces),
        kv_transfer_params=params, fails=fails,
    )  # fmt: skip


def headers(**named: str) -> Any:
    return SimpleNamespace(headers={name.replace("_", "-"): v for name, v in named.items()})


async def test_a_session_in_a_header_reaches_the_engine_and_is_brought_up_at_once():
    server = WithSessions()
    answer = await server.chat(request(["a", "b"], ["c"]), headers(x_session_id="s1"))
    assert server.prefetched == ["s1"]
    assert [piece async for piece in answer] == [["a", "b"], ["c"]]
    assert server.given == [{FIELD: {"session": "s1"}}]
    stats = await server.record_routing_stats()
    assert stats["engine"] == 1
    assert stats[FIELD]["sessions"] == {"s1": 1001 + 3}


@pytest.mark.parametrize("verb", ["chat", "completions"])
async def test_a_request_without_hints_is_passed_on_as_it_is(verb: str):
    server = WithSessions()
    answer = await getattr(server, verb)(request("whole"), None)
    assert [piece async for piece in answer] == ["whole"]
    assert server.given == [None]
    assert server.prefetched == []
    assert (await server.record_routing_stats())[FIELD]["sessions"] == {}


async def test_a_name_that_cannot_be_one_is_served_without_and_counted():
    server = WithSessions()
    answer = await server.chat(request("whole"), headers(x_session_id="not a name"))
    assert [piece async for piece in answer] == ["whole"]
    assert server.prefetched == []
    assert (await server.record_routing_stats())[FIELD]["counts"] == {"hints.bad": 1}


async def test_a_client_that_goes_away_ends_the_engines_work():
    server = WithSessions()
    answer = await server.chat(request("a", "b", "c"), headers(x_session_id="s"))
    assert await anext(answer) == "a"
    await answer.aclose()
    assert server.closed == 1
    assert server._watch._running == 0


async def test_an_error_is_no_first_token_and_leaves_nothing_behind():
    server = WithSessions()
    error = SimpleNamespace(error=SimpleNamespace(code=400))
    answer = await server.chat(request(error), headers(x_session_id="s"))
    assert [piece async for piece in answer] == [error]
    with pytest.raises(ValueError, match="no such model"):
        await server.chat(request(fails=True), headers(x_session_id="t"))
    assert (await server.record_routing_stats())[FIELD]["sessions"] == {}
    assert server._watch._running == 0


async def test_usage_says_how_long_an_answer_was():
    server = WithSessions()
    whole = SimpleNamespace(usage=SimpleNamespace(completion_tokens=40))
    answer = await server.chat(request(whole), headers(x_session_id="s"))
    assert [piece async for piece in answer] == [whole]
    assert (await server.record_routing_stats())[FIELD]["sessions"] == {"s": 1001 + 40}
