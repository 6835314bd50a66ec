"""When to stop trusting a medium, and when to try it again. Pure."""

THRESHOLD = 3
"""Whole batches that fail in a row before a tier is taken out."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


class Breaker:
    """Open after `THRESHOLD` failures in a row; then a probe is due after a wait that doubles."""

    def __init__(self) -> None:
        self.open = False
        self.why = ""
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._retry_at = 0.0

    def ok(self) -> None:
        """A batch went well. Only `probed` closes an open breaker."""
        self._failures = 0

    def failed(self, why: str, now: float) -> bool:
        """A whole batch failed; True when the tier is to be taken out now."""
        self._failures += 1
        self.why = why
        if self.open or self._failures < THRESHOLD:
            return False
        self.open = True
        self._wait_s = FIRST_WAIT_S
        self._retry_at = now + self._wait_s
        return True

    def failed_now(self, why: str, now: float) -> bool:
        """The medium is beyond doubt; True when it is to be taken out now."""
        self._failures = THRESHOLD
        return self.failed(why, now)

    def probe_due(self, now: float) -> bool:
        """Whether the tier should be probed now. Answers yes once a wait."""
        if not self.open or now < self._retry_at:
            return False
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._retry_at = now + self._wait_s
        return True

    def probed(self) -> None:
        """A probe went well: the tier is taken in again."""
        self.open = False
        self.why = ""
        self._failures = 0
