"""`wire.Link` over a unix socket, for engines and nodes in real processes without Ray.

Pickled messages between processes of one test, which trust each other; the service itself has no
such thing. One connection a call; a server answers each in a thread of its own.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from tiered_kv.errors import TieredKVError, Unreachable
from tiered_kv.types import Reservation
from tiered_kv.wire import Link

LOST = (EOFError, OSError)
CALL_S = 60.0


class SocketLink:
    """Calls whoever serves `path`."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def call(self, verb: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        try:
            with Client(self.path, "AF_UNIX") as there:
                there.send((verb, args, kwargs))
                if not there.poll(timeout_s):
                    raise Unreachable(f"{verb} was not answered in {timeout_s} s")
                error, value = there.recv()
        except LOST as lost:
            raise Unreachable(f"{verb}: {lost!r}") from None
        if error is not None:
            raise error
        return value


@contextmanager
def serving(path: Any, link: Link) -> Iterator[None]:
    """Pass calls on to a link, until the block ends."""
    with Listener(str(path), "AF_UNIX", backlog=64) as listener:
        ending = threading.Event()
        accepting = threading.Thread(target=_accept, args=(listener, link, ending), daemon=True)
        accepting.start()
        try:
            yield
        finally:
            ending.set()
            with contextlib.suppress(*LOST):
                Client(str(path), "AF_UNIX").close()  # wakes `accept`
            accepting.join()


def _accept(listener: Listener, link: Link, ending: threading.Event) -> None:
    while not ending.is_set():
        with contextlib.suppress(*LOST):
            there = listener.accept()
            threading.Thread(target=_answer, args=(there, link), daemon=True).start()


def _answer(there: Connection, link: Link) -> None:
    value: Any = None
    with there, contextlib.suppress(*LOST):
        verb, args, kwargs = there.recv()
        try:
            value = link.call(verb, *args, timeout_s=CALL_S, **kwargs)
            error = None
        except TieredKVError as failure:
            error = failure
        try:
            there.send((error, value))
        except LOST:
            if isinstance(value, Reservation):  # nobody else knows its id
                link.call("abort", value.id, timeout_s=CALL_S)
