"""A node on an event loop of its own, in a thread of its own, for callers of any kind.

Ray runs each concurrency group of an actor on another loop, and a user's process may have none:
so the node gets one that is nobody else's, and whoever blocks elsewhere cannot stop it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tiered_kv.errors import BadInput, Unreachable
from tiered_kv.node import Node

VERBS = frozenset(
    name for name, value in vars(Node).items() if asyncio.iscoroutinefunction(value)
    and not name.startswith("_")
)  # fmt: skip
"""What may be called from outside: the public coroutines of `Node`."""


class Runner:
    """Starts a node and passes calls to it; a `Link` within the process. Thread-safe."""

    def __init__(self, build: Callable[[], Awaitable[Node]]) -> None:
        """Start it and wait until it is up. Raises what `build` raises; nothing runs then."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-node", daemon=True)
        self._thread.start()
        try:
            self.node: Node = asyncio.run_coroutine_threadsafe(_await(build), self._loop).result()
        except BaseException:
            self._end()
            raise

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Start a verb and return its future. Raises `BadInput` for a name that is no verb."""
        if verb not in VERBS:
            raise BadInput(f"{verb!r} is not one of {', '.join(sorted(VERBS))}")
        return asyncio.run_coroutine_threadsafe(
            getattr(self.node, verb)(*args, **kwargs), self._loop
        )

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `wire.Link`."""
        if self._loop.is_closed():
            raise Unreachable("the node has been stopped")
        future = self.submit(verb, *args, **kwargs)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise Unreachable(f"{verb} was not answered in {timeout_s} s") from None

    def stop(self, flush: bool = True) -> None:
        """Stop the node and its thread. Idempotent; blocks while memory is written below."""
        if self._loop.is_closed():
            return
        self.submit("stop", flush).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _await(build: Callable[[], Awaitable[Node]]) -> Node:
    return await build()
