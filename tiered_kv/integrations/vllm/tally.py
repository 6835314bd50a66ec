"""Counts that a worker's threads make and its engine's thread takes away, once a step."""

import threading
from collections import Counter

from tiered_kv.integrations.vllm.plans import Told


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()
        self._bytes = 0
        self._seconds = 0.0

    def add(self, name: str, n: int = 1) -> None:
        """Count something."""
        if n:
            with self._lock:
                self._counts[name] += n

    def copied(self, nbytes: int, seconds: float) -> None:
        """Bytes that were copied into pages."""
        with self._lock:
            self._bytes += nbytes
            self._seconds += seconds

    def stored(self, request: str) -> None:
        """A save of this request has ended, however."""
        with self._lock:
            self._stored[request] += 1

    def take(self) -> Told | None:
        """All of it since the last call; None when nothing happened."""
        with self._lock:
            if not (self._counts or self._stored or self._bytes):
                return None
            told = Told(self._bytes, self._seconds, dict(self._counts), dict(self._stored))
            self._counts, self._stored = Counter(), Counter()
            self._bytes, self._seconds = 0, 0.0
            return told
