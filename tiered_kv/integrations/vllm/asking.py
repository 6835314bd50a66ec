"""Questions of the scheduler to the node, asked in threads: the scheduler never waits."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiered_kv.errors import BadLayout, StaleHandle, TieredKVError
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.names import Names
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.supervise import surviving
from tiered_kv.types import Lease
from tiered_kv.wire import NO_LEASE, Ask, Events, Found

ASK_THREADS = 4


@dataclass(frozen=True)
class Answer:
    """What the node said to `asks`; `asked_s` is when (monotonic seconds)."""

    asks: tuple[Ask, ...]
    skip: int
    found: Found
    asked_s: float


@dataclass
class Question:
    """One lookup under way. `answer` is None when there was none in the end."""

    skip: int
    asked_s: float
    future: "Future[Answer | None]"

    @property
    def done(self) -> bool:
        """Whether `answer` is there."""
        return self.future.done()

    def wait(self, seconds: float) -> None:
        """Wait so long for it at most."""
        wait([self.future], seconds)

    @property
    def answer(self) -> Answer | None:
        """The answer, once it is `done`."""
        return self.future.result()


class Asking:
    """Thread-safe."""

    def __init__(self, link: NodeLink, names: Names, ttl_s: float) -> None:
        """Leases that come of answers last `ttl_s`."""
        self._link = link
        self._names = names
        self._ttl_s = ttl_s
        self._threads = ThreadPoolExecutor(ASK_THREADS, thread_name_prefix="kv-ask")
        self._lock = threading.Lock()
        self.failed = 0

    def find(
        self, hashes: Sequence[bytes], skip: int, new_tokens: int, prefill: Prefill | None,
        copy: Link | None,
    ) -> Question:  # fmt: skip
        """Ask what is held of a request. Returns at once."""
        now = time.monotonic()
        pages = list(hashes)  # the request's own list grows
        task = self._threads.submit(self._find, pages, skip, new_tokens, prefill, copy, now)
        return Question(skip, now, task)

    def tell(self, call: Callable[[], object]) -> None:
        """Carry out something of which nobody awaits the result."""
        with suppress(RuntimeError):  # closed: an answer of before came late
            self._threads.submit(self._tell, call)

    def hint(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Call a verb of the node and do not wait; what it raises is counted."""
        self.tell(lambda: self._link.call(verb, *args, **kwargs))

    def events(self, since: int) -> "Future[Events | None]":
        """Ask for the node's block events from `since` on; None when it did not answer."""
        return self._threads.submit(self._events, since)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases that nobody will read from."""
        for lease in leases:
            if lease.id != NO_LEASE:
                self.hint("release", lease.id)

    def abandon(self, question: Question) -> None:
        """Nobody waits for this answer any longer: end what comes of it."""

        def late(future: "Future[Answer | None]") -> None:
            answer = None if future.cancelled() else future.result()
            if answer is not None:
                self.release(answer.found.leases)

        if not question.future.cancel():
            question.future.add_done_callback(late)

    def close(self) -> None:
        """Drop what was not asked yet, and ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- in a thread ----------------------------------------------------------------------

    def _find(
        self, hashes: Sequence[bytes], skip: int, new_tokens: int, prefill: Prefill | None,
        copy: Link | None, now: float,
    ) -> Answer | None:  # fmt: skip
        answers: list[Answer] = []
        with surviving("looking blocks of a request up") as failure:
            try:
                asks = self._names.asks(hashes)
                found = self._ask(asks, skip, new_tokens, prefill, copy)
                answers.append(Answer(asks, skip, found, now))
            except TieredKVError:
                self._count()
        if failure:
            self._count()
        return answers[0] if answers else None

    def _ask(self, asks: tuple[Ask, ...], *question: object) -> Found:
        """Asked twice when the node has restarted since the layouts were introduced."""
        try:
            return self._ask_once(asks, *question)
        except (BadLayout, StaleHandle):
            self._link.forget_pool()
            return self._ask_once(asks, *question)

    def _ask_once(self, asks: tuple[Ask, ...], *question: object) -> Found:
        for layout in self._names.layouts:
            self._link.introduce(layout)
        found: Found = self._link.call("find", asks, *question, self._ttl_s)
        return found

    def _events(self, since: int) -> Events | None:
        found: list[Events] = []
        with surviving("asking for block events"):
            try:
                found.append(self._link.call("events", since))
            except TieredKVError:
                self._count()
        return found[0] if found else None

    def _tell(self, call: Callable[[], object]) -> None:
        with surviving("telling the node") as failure:
            try:
                call()
            except TieredKVError:
                self._count()
        if failure:
            self._count()

    def _count(self) -> None:
        with self._lock:
            self.failed += 1
