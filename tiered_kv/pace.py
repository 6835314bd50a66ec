"""How fast one leg up is, and how much waits on it: what `load_or_recompute` wants to know."""

import math

from tiered_kv.policies.links import Link, Meter

UNPROBED_BYTES_PER_S = 10e9
"""What a leg is taken for that no self-test has measured: the copy to a GPU, until it was used."""
PROBED_BYTES, UNPROBED_BYTES = 256 << 20, 64 << 20
"""So many bytes that were read outweigh what a leg started from: a few batches."""
STALE_S = 5.0
"""After so long without a read, what is known of a leg is doubted: it may be well again, or not."""


class Pace:
    """The measured rate of a lane up, and the bytes that wait on it. One owner calls it."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """`bytes_per_s` is what the self-test of the medium read; None when there was none."""
        self._memory = PROBED_BYTES if bytes_per_s else UNPROBED_BYTES
        self._meter = Meter(bytes_per_s or UNPROBED_BYTES_PER_S, memory_bytes=self._memory)
        self._doubted = False
        self._running = 0
        self._at = 0.0  # the last start or end
        self._shared_s = 0.0  # the sum of seconds / batches that ran then
        self.queued_bytes = 0

    @property
    def bytes_per_s(self) -> float:
        """The rate of the lane as a whole, however many batches it reads at once."""
        return self._meter.bytes_per_s

    def submitted(self, nbytes: int) -> None:
        """A batch waits. It ends by `left`."""
        self.queued_bytes += nbytes

    def left(self, nbytes: int) -> None:
        """A batch has ended, however."""
        self.queued_bytes -= nbytes

    def began(self, now: float) -> float:
        """A batch runs now; what `ended` wants to be told."""
        self._doubted |= self.stale(now)
        self._pass(now)
        self._running += 1
        return self._shared_s

    def ended(self, began: float, nbytes: int, now: float) -> None:
        """A batch has brought `nbytes`.

        Seconds in which two batches run side by side count half for each, or the lane would look
        half as fast as it is whenever it is busy.
        """
        self._pass(now)
        self._running -= 1
        seconds = max(self._shared_s - began, 1e-9)
        if self._doubted and nbytes:
            # What was a hundred times too slow must not take a hundred reads to be forgiven.
            between = math.sqrt(self.bytes_per_s * nbytes / seconds)
            self._meter = Meter(between, memory_bytes=self._memory)
            self._doubted = False
        self._meter.note(nbytes, seconds)

    def stale(self, now: float) -> bool:
        """Whether nothing is being read, and nothing was for a while."""
        return not self._running and now - self._at >= STALE_S

    def _pass(self, now: float) -> None:
        if self._running:
            self._shared_s += (now - self._at) / self._running
        self._at = now

    def link(self, mine_bytes: int = 0) -> Link:
        """The leg for `decide`; `mine_bytes` of what waits are the asker's own."""
        return self._meter.link(max(0, self.queued_bytes - mine_bytes))
