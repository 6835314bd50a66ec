"""A virtual clock: events in the order of their times, and processes written as generators."""

import heapq
from collections.abc import Callable, Generator
from typing import Any

from tiered_kv.errors import BadInput


class Signal:
    """Something that happens once. Processes that yield it go on when it does."""

    __slots__ = ("_clock", "_waiting", "fired")

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []
        self.fired = False

    def fire(self) -> None:
        """Let everybody who waits go on, now and in the order in which they began to wait."""
        if not self.fired:
            self.fired = True
            for call in self._waiting:
                self._clock.after(0.0, call)
            self._waiting.clear()

    def then(self, call: Callable[[], None]) -> None:
        """Call once it has happened."""
        if self.fired:
            self._clock.after(0.0, call)
        else:
            self._waiting.append(call)


Process = Generator["float | Signal", None, None]
"""Yields seconds to sleep, or a signal to wait for. `yield from` composes them."""


class Clock:
    """Simulated seconds. Deterministic: equal times are served in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at a time. Raises `BadInput` for one that has passed."""
        if not when_s >= self.now:
            raise BadInput(f"an event at {when_s} s comes too late: it is {self.now} s")
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds."""
        self.at(self.now + seconds, call)

    def signal(self) -> Signal:
        """A signal of this clock."""
        return Signal(self)

    def spawn(self, process: Process) -> Signal:
        """Run a process from now on; the signal fires when it has ended."""
        ended = self.signal()

        def step() -> None:
            try:
                wish = next(process)
            except StopIteration:
                ended.fire()
                return
            if isinstance(wish, Signal):
                wish.then(step)
            else:
                self.after(wish, step)

        self.after(0.0, step)
        return ended

    def run(self, until_s: float = float("inf")) -> None:
        """Serve events until none is left or the next one is later than `until_s`."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, call = heapq.heappop(events)
            call()
        if until_s < float("inf"):
            self.now = max(self.now, until_s)

    def every(self, seconds: float, call: Callable[[], Any]) -> None:
        """Call again and again, for ever."""

        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(seconds, again)
