"""How fast this engine computes and copies, measured while it works. Pure."""

from collections.abc import Iterable

from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import Prefill

LEAST_TOKENS = 64
"""Steps with fewer prompt tokens tell about decoding."""
MEMORY = 64.0
"""About so many steps are remembered."""
KNOWN_AFTER = 2
COPY_MEMORY_BYTES = float(1 << 30)
LEAST_COPY_BYTES = 4 << 20
"""Smaller copies tell about the interpreter's locks."""


class PrefillRate:
    """Least squares over steps: `seconds = linear * tokens + quadratic * (b**2 - a**2)`, both
    not negative, old steps fading."""

    def __init__(self) -> None:
        self._steps = 0
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0

    def note(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step took `seconds` and computed these tokens, each chunk from position a to b."""
        tokens = squares = 0.0
        for start, end in chunks:
            tokens += end - start
            squares += float(end) * end - float(start) * start
        if tokens < LEAST_TOKENS or not seconds > 0:
            return
        keep = 1.0 - 1.0 / MEMORY
        self._steps += 1
        # weighted by 1 / tokens, so that a long step does not decide alone
        weight = 1.0 / tokens
        self._xx = keep * self._xx + weight * tokens * tokens
        self._xy = keep * self._xy + weight * tokens * squares
        self._yy = keep * self._yy + weight * squares * squares
        self._xt = keep * self._xt + weight * tokens * seconds
        self._yt = keep * self._yt + weight * squares * seconds

    def prefill(self, queued_s: float = 0.0) -> Prefill | None:
        """What was measured; None until something was."""
        if self._steps < KNOWN_AFTER:
            return None
        det = self._xx * self._yy - self._xy * self._xy
        linear, quadratic = self._xt / self._xx, 0.0
        if det > 1e-9 * self._xx * self._yy:
            a = (self._xt * self._yy - self._yt * self._xy) / det
            b = (self._yt * self._xx - self._xt * self._xy) / det
            if a >= 0 and b >= 0:
                linear, quadratic = a, b
            elif a < 0:
                linear, quadratic = 0.0, self._yt / self._yy
        return Prefill(linear, quadratic, queued_s)


class CopyRate:
    """Bytes a second of the last leg, from the pool into the engine's pages."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Copies that took `seconds` together."""
        if nbytes >= LEAST_COPY_BYTES and seconds > 0:
            keep = max(0.0, 1.0 - nbytes / COPY_MEMORY_BYTES)
            self._bytes = keep * self._bytes + nbytes
            self._seconds = keep * self._seconds + seconds

    def link(self, ranks: int = 1) -> Link | None:
        """What was measured, for all ranks side by side; None until something was."""
        return Link(ranks * self._bytes / self._seconds) if self._bytes else None
