"""What is known of a way for bytes: its bandwidth, its latency, and what is queued on it."""

from dataclasses import dataclass

from tiered_kv.errors import BadInput


@dataclass(frozen=True, slots=True)
class Link:
    """A tier as measured: `queued_bytes` are ahead of us on it."""

    bytes_per_s: float
    latency_s: float = 0.0
    queued_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s >= 0 and self.latency_s >= 0 and self.queued_bytes >= 0):
            raise BadInput(f"a link has no negative measures, and {self} has")

    def wait_s(self) -> float:
        """Until the first of our bytes moves; infinite below a byte a second."""
        if self.bytes_per_s < 1:
            return float("inf")
        return self.latency_s + self.queued_bytes / self.bytes_per_s


class Meter:
    """Measured bandwidth and latency of one tier, as a moving average over bytes.

    Feed it with every batch that was read, prefetches and probes too: a tier that is no longer
    loaded from would otherwise never be found to have recovered.
    """

    __slots__ = ("_bytes", "_memory", "_seconds", "latency_s")

    def __init__(
        self, bytes_per_s: float, latency_s: float = 0.0, memory_bytes: float = 1 << 30
    ) -> None:
        """Start from what the tier's self-test measured. About `memory_bytes` are remembered."""
        if not (bytes_per_s > 0 and memory_bytes > 0):
            raise BadInput(f"a meter starts from a positive rate, not {bytes_per_s}")
        self._memory = memory_bytes
        self._bytes = memory_bytes
        self._seconds = memory_bytes / bytes_per_s
        self.latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """The rate of about the last `memory_bytes`."""
        return self._bytes / self._seconds

    def note(self, nbytes: int, seconds: float) -> None:
        """A batch of `nbytes` took `seconds` from its start to its end, latency included."""
        if nbytes <= 0 or seconds <= 0:
            return
        keep = max(0.0, 1.0 - nbytes / self._memory)
        self._bytes = keep * self._bytes + nbytes
        self._seconds = keep * self._seconds + max(seconds - self.latency_s, 1e-9)

    def link(self, queued_bytes: float) -> Link:
        """What `decide` asks for, with so many bytes ahead in the tier's queue."""
        return Link(self.bytes_per_s, self.latency_s, queued_bytes)
