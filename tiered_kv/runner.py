"""A node on an event loop of its own, in a thread of its own, for callers of any kind.

Ray runs each concurrency group of an actor on another loop, and a user's process may have none:
so the node gets one that is nobody else's, and whoever blocks elsewhere cannot stop it.
"""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tiered_kv.errors import BadInput, Unreachable
from tiered_kv.node import Node
from tiered_kv.types import Reservation
from tiered_kv.wire import Fetched, Found

VERBS = frozenset(
    name for name, _ in inspect.getmembers(Node, asyncio.iscoroutinefunction)
    if not name.startswith("_")
)  # fmt: skip
"""What may be called from outside: the public coroutines of `Node`."""


class Runner:
    """Starts a node and passes calls to it; a `Link` within the process. Thread-safe."""

    def __init__(self, build: Callable[[], Awaitable[Node]]) -> None:
        """Start it and wait until it is up. Raises what `build` raises; nothing runs then."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-node", daemon=True)
        self._lock = threading.Lock()
        self._open = True  # takes calls
        self._ended = threading.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(_await(build), self._loop)
        try:
            self.node: Node = starting.result()
        except BaseException:
            self._end()
            raise

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Start a verb and return its future.

        The verb is carried out to its end also when the future is cancelled: half a commit would
        help nobody. A reservation or lease that comes of it is given back then. Raises `BadInput`
        for a name that is no verb, and `Unreachable` when the node has been stopped.
        """
        if verb not in VERBS:
            raise BadInput(f"{verb!r} is not one of {', '.join(sorted(VERBS))}")
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if not self._open:
                raise Unreachable("the node has been stopped")
            self._loop.call_soon_threadsafe(self._begin, answer, verb, args, kwargs)
        return answer

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `wire.Link`."""
        answer = self.submit(verb, *args, **kwargs)
        try:
            return answer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if answer.cancel():
                raise Unreachable(f"{verb} was not answered in {timeout_s} s") from None
            return answer.result()  # it came at this moment, or is an error of the verb
        except KeyboardInterrupt:
            answer.cancel()
            raise

    def stop(self, flush: bool = True) -> None:
        """Stop the node and its thread. Idempotent; blocks while memory is written below.

        Calls that are under way then raise `Unreachable`.
        """
        with self._lock:
            first, self._open = self._open, False
        if not first:
            self._ended.wait()
            return
        try:
            asyncio.run_coroutine_threadsafe(self.node.stop(flush), self._loop).result()
        finally:
            self._end()

    def _begin(
        self, answer: "concurrent.futures.Future[Any]", verb: str, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        task = self._loop.create_task(self._carry_out(verb, args, kwargs), name=f"kv-{verb}")
        self._calls.add(task)  # or it could be collected while it waits
        task.add_done_callback(partial(self._answer, answer))

    async def _carry_out(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await getattr(self.node, verb)(*args, **kwargs)

    def _answer(self, answer: "concurrent.futures.Future[Any]", task: "asyncio.Task[Any]") -> None:
        self._calls.discard(task)
        error = Unreachable("the node has been stopped") if task.cancelled() else task.exception()
        if not answer.set_running_or_notify_cancel():  # nobody waits any longer
            if error is None:
                self._give_back(task.result())
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def _give_back(self, value: Any) -> None:
        """End what nobody else knows the handle of: its owner lives, and would hold it for ever."""
        match value:
            case Reservation(id=reservation):
                self._begin(concurrent.futures.Future(), "abort", (reservation,), {})
            case Fetched(lease=lease):
                self._begin(concurrent.futures.Future(), "release", (lease.id,), {})
            case Found(leases=leases):
                for lease in leases:
                    self._begin(concurrent.futures.Future(), "release", (lease.id,), {})

    def _end(self) -> None:
        self._open = False
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ended.set()


async def _await(build: Callable[[], Awaitable[Node]]) -> Node:
    return await build()


async def _cancel_all() -> None:
    """End all other tasks of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
