"""Reservations that a node may still hold for us because it did not answer.

They do not end by time, and their owner lives; so whoever gave up on one remembers it and gives it
back when the node answers again.
"""

import threading
from collections.abc import Callable
from typing import Any

from tiered_kv.errors import StaleHandle, Unreachable


class Owed:
    """Thread-safe."""

    def __init__(self) -> None:
        self._handles: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, reservation: int) -> None:
        """Remember one whose commit or abort was not answered."""
        with self._lock:
            self._handles.append(reservation)

    def settle(self, call: Callable[[str, int], Any]) -> None:
        """Abort them through `call(verb, reservation)`: one call each, none when nothing is owed.

        Raises nothing: what is not answered stays owed.
        """
        while True:
            with self._lock:
                if not self._handles:
                    return
                reservation = self._handles.pop()
            try:
                call("abort", reservation)
            except StaleHandle:
                pass  # it was committed after all, or the node has restarted
            except Unreachable:
                self.add(reservation)
                return
