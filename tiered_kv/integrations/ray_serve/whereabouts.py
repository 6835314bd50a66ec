"""Asking the service's directory where a session sleeps, without keeping a request waiting."""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from tiered_kv.connecting import Cluster, connect
from tiered_kv.errors import TieredKVError, UnknownSession
from tiered_kv.integrations.ray_serve.view import Placed
from tiered_kv.settings import load
from tiered_kv.supervise import surviving

logger = logging.getLogger(__name__)

FRESH_S = 5.0
"""For how long an answer is believed."""
AWAY_S = 5.0
"""For how long a service that could not be joined is not tried again."""
MAX_REMEMBERED = 1 << 14
NODE = "node-"
"""What the Ray names of node actors begin with; the rest is their Ray node."""


class Whereabouts:
    """One for a router. `find` runs on an event loop, everything that blocks in one thread."""

    def __init__(self, namespace: str, ask_s: float) -> None:
        """`ask_s`: how long `find` waits at most."""
        self._namespace = namespace
        self._ask_s = ask_s
        self._answers: OrderedDict[str, tuple[float, Placed | None]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-whereabouts")
        self._asking: set[str] = set()
        self._cluster: Cluster | None = None
        self._away_until = 0.0

    async def find(self, session: str) -> Placed | None:
        """Where the session is, as far as is known in time; an answer that comes later serves
        the next request."""
        known = self._fresh(session)
        if known is not None:
            return known[1]
        if time.monotonic() < self._away_until:
            return None
        with self._lock:
            if session in self._asking:
                return None
            self._asking.add(session)
        asked = asyncio.get_running_loop().run_in_executor(self._pool, self._ask, session)
        try:
            return await asyncio.wait_for(asyncio.shield(asked), self._ask_s)
        except TimeoutError:
            return None

    def _fresh(self, session: str) -> tuple[float, Placed | None] | None:
        with self._lock:
            known = self._answers.get(session)
        return known if known is not None and time.monotonic() - known[0] < FRESH_S else None

    def _ask(self, session: str) -> Placed | None:
        """In the thread."""
        placed: Placed | None = None
        with surviving("asking where a session is"):
            try:
                placed = self._placed(session)
            except UnknownSession:
                pass  # it has ended since its node announced it
            except TieredKVError as error:
                if time.monotonic() >= self._away_until:
                    logger.info("routing by load alone: %s", error)
                self._away_until = time.monotonic() + AWAY_S
        with self._lock:
            self._asking.discard(session)
            self._answers[session] = time.monotonic(), placed
            self._answers.move_to_end(session)
            while len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)
        return placed

    def _placed(self, session: str) -> Placed | None:
        if self._cluster is None:
            mine = load(overrides={"service": {"namespace": self._namespace}})
            self._cluster = connect(mine, embedded=False, wait_s=AWAY_S)
        member = self._cluster.where(session)
        if member is None or not member.actor.startswith(NODE):
            return None
        held = self._cluster.resident(member, session)
        return Placed(member.actor.removeprefix(NODE), held.tokens, held.bring_s)
