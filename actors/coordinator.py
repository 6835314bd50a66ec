"""The actor that knows who is there. It remembers nothing that its members cannot tell again."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from tiered_kv.config import Config
from tiered_kv.directory import Ack, Announcement, Directory, GpuMember, Member, Placement
from tiered_kv.errors import BadInput


class CoordinatorShell:
    """One a service. Every verb is short and purely in memory: no call waits for another."""

    def __init__(self, config: Config) -> None:
        """`config` is what the service was started with, for those who join it."""
        self._config = config
        self._directory = Directory()
        self._lock = threading.Lock()  # each concurrency group has a thread of its own
        self._began = time.monotonic()
        self._verbs: dict[str, Callable[..., Any]] = {
            "announce": self._announce, "announce_gpu": self._announce_gpu,
            "config": lambda: self._config, "leave": self._leave, "members": self._members,
            "place": self._place, "ping": lambda: "coordinator", "status": self._status,
            "stop": lambda flush=True: {"flushed": 0}, "where": self._where,
        }  # fmt: skip

    @ray.method(concurrency_group="control")
    async def control(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What members tell and clients ask; `leave` without a name ends this actor."""
        if verb == "leave" and not args:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        return self._do(verb, args, kwargs)

    @ray.method(concurrency_group="health")
    async def health(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`ping` and `status`; both take the directory's lock, so they vouch for the rest."""
        with self._lock:
            pass
        return self._do(verb, args, kwargs)

    def _do(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verb not in self._verbs:
            raise BadInput(f"{verb!r} is not one of {', '.join(sorted(self._verbs))}")
        return self._verbs[verb](*args, **kwargs)

    def _announce(self, news: Announcement) -> Ack:
        with self._lock:
            return self._directory.announce(news, time.monotonic())

    def _announce_gpu(self, gpu: GpuMember) -> Ack:
        with self._lock:
            return self._directory.announce_gpu(gpu, time.monotonic())

    def _leave(self, name: str) -> bool:
        with self._lock:
            return self._directory.leave(name)

    def _members(self) -> list[Member]:
        with self._lock:
            return self._directory.members(time.monotonic())

    def _place(self, session: str, host: str | None = None, last: str | None = None) -> Placement:
        with self._lock:
            return self._directory.place(session, time.monotonic(), host, last)

    def _where(self, session: str) -> Member | None:
        with self._lock:
            return self._directory.where(session, time.monotonic())

    def _status(self) -> dict[str, Any]:
        with self._lock:
            found = self._directory.status(time.monotonic())
        return found | {"pid": os.getpid(), "up_s": round(time.monotonic() - self._began, 1)}


GROUPS = {"control": 256, "health": 16}
Coordinator: Any = ray.remote(concurrency_groups=GROUPS)(CoordinatorShell)  # type: ignore[call-overload]
