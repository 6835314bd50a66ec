"""`wire.Link` to an actor of the service: one actor call a call, and our own errors only."""

import threading
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from tiered_kv.errors import TieredKVError, Unreachable
from tiered_kv.types import Reservation

IO = frozenset(
    ("reserve", "commit", "fetch", "wake", "persist", "flush", "forget", "put_session",
     "close_session", "end_session")
)  # fmt: skip
"""Verbs that may wait for media."""
HEALTH = frozenset(("ping", "about", "status", "list_sessions"))
"""Verbs that an operator asks, above all when the others hang."""


def group_of(verb: str) -> str:
    """The concurrency group that answers a verb; each has an event loop of its own."""
    return "io" if verb in IO else "health" if verb in HEALTH else "control"


class RayLink:
    """A link by name: it survives restarts of the actor. Safe from any thread of any process
    that has joined Ray; never call it on an event loop, it blocks."""

    def __init__(self, actor: str, namespace: str) -> None:
        """`actor` is looked up at the first call."""
        self.actor = actor
        self.namespace = namespace
        self._handle: Any = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RayLink({self.actor!r}, {self.namespace!r})"

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `wire.Link`. One actor call; the first one, and one after the actor's end, also
        look the name up.

        An actor that ended for good is looked up again at the next call, not at this one: only
        the caller knows what may be done twice. An `Unreachable` call may have been carried out,
        or be carried out later: it is cancelled as far as possible, and a reservation that still
        comes of it is given back.
        """
        try:
            handle = self._resolve()
            ref = getattr(handle, group_of(verb)).remote(verb, args, kwargs)
            return self._wait(handle, verb, ref, timeout_s)
        except RayTaskError as error:
            raise self._cause(error, verb) from None
        except RayError as error:
            if isinstance(error, ActorDiedError) and not isinstance(error, ActorUnavailableError):
                with self._lock:
                    self._handle = None  # that actor never returns, another may have its name
            raise Unreachable(f"{self.actor} cannot be reached: {_line(error)}") from None

    def _resolve(self) -> Any:
        with self._lock:
            if self._handle is None:
                if not ray.is_initialized():  # or get_actor would start a cluster of its own
                    raise Unreachable(f"{self.actor}: this process has not joined Ray")
                try:
                    self._handle = ray.get_actor(self.actor, self.namespace)
                except ValueError:
                    raise Unreachable(
                        f"no actor {self.actor!r} runs in Ray namespace {self.namespace!r}"
                    ) from None
            return self._handle

    def _wait(self, handle: Any, verb: str, ref: "ray.ObjectRef[Any]", timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=max(0.0, timeout_s))
        except GetTimeoutError:
            ref.future().add_done_callback(lambda answer: _late(handle, answer))
            if verb != "reserve":  # which may be done already: its id would be lost
                ray.cancel(ref)
            raise Unreachable(f"{self.actor} did not answer {verb} in {timeout_s:g} s") from None

    def _cause(self, error: RayTaskError, verb: str) -> Exception:
        """What the verb raised, as it would be raised in process."""
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            return cause
        if isinstance(error, TaskCancelledError):
            return Unreachable(f"{self.actor}: {verb} was cancelled")
        return Unreachable(f"{self.actor}: {verb} failed: {_line(error)}")


def reason(error: TieredKVError) -> str:
    """One line for `status`: what kind of failure, and its sentence."""
    return f"{type(error).__name__}: {error}"


def _late(handle: Any, answer: "Future[Any]") -> None:
    """Take an answer that nobody waits for: Ray prints errors that are not looked at, and a
    reservation whose id nobody knows would last as long as this process. In a thread of Ray's."""
    if answer.exception() is None and isinstance(answer.result(), Reservation):
        handle.control.remote("abort", (answer.result().id,), {})


def _line(error: RayError) -> str:
    """Ray's messages are paragraphs with ids and logs; their first line says it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
