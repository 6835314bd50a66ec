"""What node and GPU actors have in common: calls by group, health, a graceful end.

Ray runs each concurrency group on an event loop of its own, and the node has another one
(`Runner`): an operator's question is answered while a thousand wakes wait.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from tiered_kv.actors.heart import Heart
from tiered_kv.actors.life import Life
from tiered_kv.config import Config
from tiered_kv.errors import BadInput, TieredKVError, Unreachable
from tiered_kv.node import Node
from tiered_kv.raylink import RayLink
from tiered_kv.runner import Runner

COORDINATOR = "coordinator"
PING_S = 5.0
"""How long a node's loop may take to answer before it counts as stuck."""
GROUPS = {"control": 64, "io": 512, "health": 16}
"""Calls at a time in each group; more of them wait in Ray's queue."""
ANNOUNCE_TIMEOUT_S = 5.0
LAST_WORDS_S = 30.0
"""What an orphan may take to write below what only its memory holds."""

Build = Callable[[Config], Awaitable[Node]]


class Shell:
    """Base of an actor class. Its public methods are what `RayLink` calls, one a group."""

    def __init__(
        self, config: Config, name: str, build: Callable[["Shell"], Awaitable[Node]]
    ) -> None:
        """Returns at once and starts in the background; so Ray's restart, which runs this again,
        never fails, and `status` can say why a node does not start."""
        self.config = config
        self.name = name
        self.coordinator = RayLink(COORDINATOR, config.service.namespace)
        self.missed_beats = 0
        self.life = Life(lambda: build(self))
        self.life.start()
        self._heart = Heart(self._beat, self._orphaned)

    # -- one method a group ---------------------------------------------------------------

    @ray.method(concurrency_group="control")
    async def control(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A short verb of `Node`, or `stop` and `leave` of this actor."""
        if verb == "stop":
            return await asyncio.to_thread(self._stop, *args, **kwargs)
        if verb == "leave":
            self._leave()
        return await self._node(verb, args, kwargs)

    @ray.method(concurrency_group="io")
    async def io(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A verb of `Node` that may wait for media."""
        return await self._node(verb, args, kwargs)

    @ray.method(concurrency_group="health")
    async def health(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`ping`, `about`, or a question to `Node`. None waits for the other groups."""
        if verb == "about":
            return self.about()
        if verb == "ping":
            return await self._ping()
        answer = await self._node(verb, args, kwargs)
        return answer | {"actor": self.about()} if verb == "status" else answer

    # -- inside ---------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Who this is, whether or not its node runs. Plain values; does not wait."""
        try:
            _ = self.life.runner
            problem = ""
        except TieredKVError as error:
            problem = f"{type(error).__name__}: {error}"
        return {
            "name": self.name,
            "pid": os.getpid(),
            "problem": problem,
            "missed_beats": self.missed_beats + self._heart.failed,
            "config": self.config.as_dict(),
        }

    async def _ping(self) -> str:
        """The node id, from the node's own loop: a process whose loop hangs does not answer."""
        runner = self.life.runner
        try:
            await asyncio.wait_for(asyncio.wrap_future(runner.submit("lookup", [])), PING_S)
        except TimeoutError:
            raise Unreachable(f"the node's loop has not answered for {PING_S} s") from None
        return runner.node.parts.node_id

    async def _node(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verb == "stop":
            raise BadInput("'stop' belongs to the group control")
        return await asyncio.wrap_future(self.life.runner.submit(verb, *args, **kwargs))

    def _stop(self, flush: bool = True) -> dict[str, int]:
        """Write below what only memory holds, give everything back; what was flushed, in blocks."""
        self._heart.stop()
        flushed = 0
        try:
            runner = self.life.runner
        except TieredKVError:
            pass  # starting, failed or stopped: there is nothing to write
        else:
            self._farewell(runner.node)
            if flush:
                flushed = self._flush(runner)
        self.life.stop(flush)
        return {"flushed": flushed}

    def _flush(self, runner: Runner) -> int:
        """Blocks that were written; a medium that fails does not keep the node from ending."""
        try:
            flushed: int = runner.submit("flush").result()
        except TieredKVError as error:
            print(f"tiered_kv {self.name}: not everything was written: {error}", flush=True)
            return 0
        return flushed

    def _leave(self) -> None:
        """End this process for good: Ray does not restart an actor that ends itself."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def _orphaned(self, why: str, flush: bool) -> None:
        """Nobody can want this process any more: give lock and memory back, and end."""
        print(f"tiered_kv {self.name}: ending, {why}", flush=True)
        if flush:
            last = threading.Thread(target=self.life.stop, daemon=True)
            last.start()
            last.join(LAST_WORDS_S)
        os._exit(1)

    def _tell(self, verb: str, *args: Any) -> Any:
        """A call to the coordinator that may fail; None then."""
        try:
            return self.coordinator.call(verb, *args, timeout_s=ANNOUNCE_TIMEOUT_S)
        except Unreachable:
            self.missed_beats += 1
            return None

    def _beat(self) -> bool:
        raise NotImplementedError

    def _farewell(self, node: Node) -> None:
        raise NotImplementedError
