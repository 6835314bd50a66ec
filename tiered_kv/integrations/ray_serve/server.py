"""`TieredKVServer`: Ray Serve LLM's server with sessions that the service keeps."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import psutil
import ray
from ray.serve.llm.deployment import LLMServer

from tiered_kv.inputs import short
from tiered_kv.integrations.ray_serve.companion import Companion
from tiered_kv.integrations.ray_serve.headers import with_headers
from tiered_kv.integrations.ray_serve.options import enable
from tiered_kv.integrations.ray_serve.prompts import Prompt, prompt_of
from tiered_kv.integrations.ray_serve.report import Watch
from tiered_kv.integrations.vllm.hints import FIELD, hints
from tiered_kv.supervise import surviving
from tiered_kv.types import SessionId

logger = logging.getLogger("ray.serve.tiered_kv")

ENGINE_CHECK_S = 0.5
SESSION_HEADER = "RAY_SERVE_SESSION_ID_HEADER_KEY"
"""Ray's own variable for the header that names a session."""


class Sessions:
    """What `TieredKVServer` adds to a server class. To add it to another one, put it in front:
    `class MyServer(Sessions, DPServer)`."""

    _watch: Watch
    _companion: Companion
    _warned: bool = False
    _guard: asyncio.Task[None]

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """`enable`, then what the server class says. Runs where the application is built."""
        enable(llm_config)
        options: dict[str, Any] = super().get_deployment_options(llm_config)  # type: ignore[misc]
        return options

    async def start(self) -> None:
        """Start the engine, and beside it join the service or start it: neither waits."""
        here = ray.get_runtime_context()
        # The engine's processes are none of Ray's: they would have to guess which cluster to join.
        os.environ.setdefault("RAY_ADDRESS", here.gcs_address)
        self._watch = Watch()
        self._companion = Companion(here.get_node_id(), self._watch.counts)
        self._companion.start()
        await super().start()  # type: ignore[misc]
        capacity = _capacity_tokens(getattr(self, "engine", None))
        if capacity:
            self._watch.has_room_for(capacity)
        self._guard = asyncio.create_task(self._end_with_the_engine())

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """See `LLMServer.chat`."""
        session = self._arrived(request, raw_request_info)
        answer = await super().chat(request, raw_request_info)  # type: ignore[misc]
        return self._watched(prompt_of(request), session, answer)

    async def completions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """See `LLMServer.completions`."""
        session = self._arrived(request, raw_request_info)
        answer = await super().completions(request, raw_request_info)  # type: ignore[misc]
        return self._watched(prompt_of(request), session, answer)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers weigh: see `Watch.report`. Serve asks every `STATS_PERIOD_S`."""
        stats: dict[str, Any] = await super().record_routing_stats()  # type: ignore[misc]
        return {**stats, FIELD: self._watch.report()}

    async def _end_with_the_engine(self) -> None:
        """End this process soon after its engine has died.

        Serve would take half a minute to notice, and a replica without an engine answers fast:
        it would draw requests and fail them all. Those in flight are lost either way.
        """
        while True:
            await asyncio.sleep(ENGINE_CHECK_S)
            with surviving("checking the engine") as failure:
                await super().check_health()  # type: ignore[misc]
            if failure:
                logger.error("tiered_kv: the engine is dead, so this replica ends: %s", failure[0])
                for child in psutil.Process().children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()  # what is left of the engine would outlive us
                os.kill(os.getpid(), signal.SIGKILL)

    def _arrived(self, request: Any, raw_request_info: Any) -> SessionId | None:
        """Read the request's hints, put them where the engine finds them, and have a sleeping
        session brought up. Returns at once and never raises for what a client wrote."""
        headers = getattr(raw_request_info, "headers", None) or {}
        named = os.environ.get(SESSION_HEADER, "x-session-id")
        params = with_headers(headers, getattr(request, "kv_transfer_params", None), named)
        request.kv_transfer_params = params
        found = hints(params)
        if found.bad:
            self._watch.counts["hints.bad"] += found.bad
            if not self._warned:
                self._warned = True
                logger.warning("tiered_kv: ignored what makes no sense in %s", short(params))
        if found.session is not None:
            self._companion.prefetch(found.session)
        return found.session

    async def _watched(
        self, prompt: Prompt, session: SessionId | None, answer: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """The answer as it is, its first token and its end noted."""
        turn = self._watch.began(prompt, session, time.monotonic())
        tokens = 0
        try:
            async with aclosing(answer) as stream:
                async for item in stream:
                    if getattr(item, "error", None) is None:
                        self._watch.first(turn, time.monotonic())
                        tokens += _tokens(item)
                    yield item
        finally:
            self._watch.ended(turn, tokens)


class TieredKVServer(Sessions, LLMServer):  # type: ignore[misc]
    """The server class to name in an `LLMConfig`; everything else is as with `LLMServer`."""


def _tokens(item: Any) -> int:
    """Tokens of a piece of an answer, about: a stream has one a line, in batches."""
    usage = getattr(item, "usage", None)
    if usage is not None:
        return int(usage.completion_tokens or 0)
    return len(item) if isinstance(item, list) else 1


def _capacity_tokens(engine: Any) -> int:
    """Tokens that the engine's own cache holds; 0 where it does not say. The engine's inside is
    not public, so everything may be missing."""
    client = getattr(engine, "_engine_client", None)
    cache = getattr(getattr(client, "vllm_config", None), "cache_config", None)
    blocks = getattr(cache, "num_gpu_blocks", None)
    size = getattr(cache, "block_size", None)
    return blocks * size if isinstance(blocks, int) and isinstance(size, int) else 0
