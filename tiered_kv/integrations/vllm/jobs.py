"""Transfers of one worker as the engine's thread sees them: under way, ended, given up.

The engine's pages belong to a transfer only while it copies. Whoever wants them back asks `yield_`:
it waits for a copy that runs (milliseconds) and forbids one that has not begun (a transfer may
hang in a call to the node for as long as it likes). So this cannot happen:

1. A save of request A waits for slots.
2. A is preempted; its pages go to request B, whose prefill overwrites them.
3. The save of A gets its slots and copies B's bytes under A's name.
"""

import threading
from enum import Enum


class Phase(Enum):
    """`WAITING` owns no page now and may never again once it is `OVER`."""

    WAITING = "waiting"
    COPYING = "copying"
    OVER = "over"


class Job:
    """One transfer of one request. `begin` and `pause` are called by the thread that carries it
    out, the other methods by the engine's."""

    def __init__(self, request: str, now: float) -> None:
        self.request = request
        self.began_s = now
        self._phase = Phase.WAITING
        self._changed = threading.Condition()

    @property
    def over(self) -> bool:
        """Whether it will never touch a page again."""
        return self._phase is Phase.OVER

    def begin(self) -> bool:
        """Start to copy; False when the pages are no longer its own."""
        with self._changed:
            if self._phase is Phase.OVER:
                return False
            self._phase = Phase.COPYING
            return True

    def pause(self) -> None:
        """Done copying for now."""
        self._move(Phase.WAITING)

    def end(self) -> None:
        """Done with the pages for good. Idempotent."""
        self._move(Phase.OVER)

    def yield_(self) -> None:
        """Take the pages back: wait for a copy that runs, forbid any other."""
        with self._changed:
            while self._phase is Phase.COPYING:
                self._changed.wait()
            self._phase = Phase.OVER

    def wait(self, seconds: float) -> bool:
        """Wait so long at most until it is over; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.over, seconds)

    def give_up(self) -> bool:
        """Like `yield_`, without waiting: False while it copies."""
        with self._changed:
            if self._phase is Phase.COPYING:
                return False
            self._phase = Phase.OVER
            return True

    def _move(self, phase: Phase) -> None:
        with self._changed:
            if self._phase is not Phase.OVER:
                self._phase = phase
            self._changed.notify_all()
