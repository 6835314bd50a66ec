"""When a session comes back, if it does: learned online, per stop reason and per session.

Gaps between the end of a request and the session's next one are counted in a histogram per stop
reason (they differ by an order of magnitude and more: after a tool call half of the agents are
back within 9 s, after the end of a turn in 210 s, and 43 % take longer than five minutes), with
those that never came back beside them. A session that is faster or slower than others shifts its
reason's histogram. Old gaps fade. Pure; seconds; memory is bounded by `max_sessions`.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tiered_kv.errors import BadInput
from tiered_kv.types import SessionId

TOOL, END_TURN, OTHER = "tool_use", "end_turn", "other"
"""Stop reasons that are known from the start; more are learned, and `OTHER` takes the rest."""

PRIOR_S = {TOOL: (9.0, 71.0), END_TURN: (210.0, 2977.0), OTHER: (30.0, 600.0)}
"""p50 and p90 of the gap before anything was seen (Claude Code sessions of kv-cache-tester)."""

PRIOR_WEIGHT = 20.0
PRIOR_NEVER = 0.05
MAX_REASONS = 16
SHIFT_WEIGHT = 8.0
"""So many gaps of its own make a session count as much as all others together."""

LEAST_S = 0.125
STEPS = 4  # buckets for each doubling
BUCKETS = 24 * STEPS  # up to 24 days


class Gaps:
    """A histogram of gaps on a logarithmic scale, and how many never ended. 97 numbers.

    A new gap weighs `1 / memory` more than the one before it, so that about the last `memory`
    gaps count.
    """

    __slots__ = ("_counts", "_grow", "_never", "_weight")

    def __init__(self, p50_s: float, p90_s: float, memory: int = 2000) -> None:
        """Start as the log-normal distribution with these two percentiles."""
        if not 0 < p50_s < p90_s:
            raise BadInput(f"percentiles of gaps must grow from above 0, not {p50_s} and {p90_s}")
        sigma = math.log(p90_s / p50_s) / 1.2816
        inner = [_normal(math.log(_edge(i) / p50_s) / sigma) for i in range(1, BUCKETS)]
        below = [0.0, *inner, 1.0]
        sure = PRIOR_WEIGHT * (1 - PRIOR_NEVER)
        self._counts = [sure * (b - a) for a, b in pairwise(below)]
        self._never = PRIOR_WEIGHT * PRIOR_NEVER
        self._weight = 1.0
        self._grow = 1.0 + 1.0 / memory

    def add(self, gap_s: float | None) -> None:
        """One more gap; None for a session that will not come back. O(1)."""
        self._weight *= self._grow
        if gap_s is None:
            self._never += self._weight
        else:
            self._counts[_bucket(gap_s)] += self._weight
        if self._weight > 1e9:
            self._counts = [n / self._weight for n in self._counts]
            self._never /= self._weight
            self._weight = 1.0

    def beyond(self, gap_s: float) -> float:
        """The weight of longer gaps, the endless ones included. O(buckets), like what follows."""
        at = _bucket(gap_s)
        inside = (_edge(at + 1) - max(gap_s, _edge(at))) / (_edge(at + 1) - _edge(at))
        return self._never + sum(self._counts[at + 1 :]) + self._counts[at] * max(0.0, inside)

    def within(self, waited_s: float, more_s: float) -> float:
        """The chance that a gap that has lasted `waited_s` ends within `more_s`, in 0..1."""
        left = self.beyond(waited_s)
        return 1.0 - self.beyond(waited_s + more_s) / left if left > 0 else 0.0

    def quantile(self, waited_s: float, share: float) -> float:
        """How long a gap is that has lasted `waited_s`, from its start; infinite when fewer than
        `share` of them end."""
        left = self.beyond(waited_s)
        target = left * (1.0 - share)
        if left <= 0 or target < self._never:
            return math.inf
        for at in range(_bucket(waited_s), BUCKETS):
            low, high = max(waited_s, _edge(at)), _edge(at + 1)
            inside = self._counts[at] * (high - low) / (high - _edge(at))
            if left - inside <= target and inside > 0:
                return low + (high - low) * (left - target) / inside
            left -= inside
        return math.inf


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a session. `return_s` is the median time until it is back, infinite
    when it more likely never is; `wake_s` is when one in four would be back, from now on."""

    reason: str
    return_s: float
    wake_s: float
    soon: float
    """The chance that it is back within a minute, in 0..1."""


@dataclass(slots=True)
class _Known:
    """One session: when it stopped and why, and how its gaps differ (natural logarithm)."""

    stopped_s: float = 0.0
    reason: str = ""
    waiting: bool = False
    ended: bool = False
    gaps: int = 0
    shift: float = 0.0


class Retention:
    """Watches sessions stop and come back. Every call takes `now` in seconds."""

    SOON_S = 60.0

    def __init__(self, max_sessions: int = 100_000) -> None:
        """About 200 bytes for each of `max_sessions`; who was quiet longest is forgotten, and
        counts as one that did not come back."""
        if max_sessions < 1:
            raise BadInput(f"max_sessions must be 1 or more, not {max_sessions}")
        self._max = max_sessions
        self._gaps = {reason: Gaps(*prior) for reason, prior in PRIOR_S.items()}
        self._known: OrderedDict[SessionId, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[SessionId]:
        return iter(list(self._known))

    def arrived(self, sid: SessionId, now: float) -> None:
        """A request of the session is here: a gap that was open is over."""
        known = self._get(sid)
        if known.waiting:
            self._learn(known, max(0.0, now - known.stopped_s))
        known.waiting = known.ended = False

    def stopped(self, sid: SessionId, reason: str, now: float) -> None:
        """The session's request has been answered, for this reason."""
        known = self._get(sid)
        known.stopped_s, known.reason = now, self._reason(reason)
        known.waiting, known.ended = True, False

    def tool_running(self, sid: SessionId, now: float) -> None:
        """Hint: whatever the stop reason was, a tool works for this session now."""
        self.stopped(sid, TOOL, now)

    def ended(self, sid: SessionId) -> None:
        """Hint: this session will not come back. It may be wrong about it."""
        known = self._get(sid)
        if known.waiting:
            self._gaps[known.reason].add(None)
        known.waiting, known.ended = False, True

    def outlook(self, sid: SessionId, now: float) -> Outlook:
        """What is expected of a session that was quiet until now. Unknown ones never return."""
        known = self._known.get(sid)
        if known is None or known.ended:
            return Outlook(known.reason if known else "", math.inf, math.inf, 0.0)
        if not known.waiting:
            return Outlook("", 0.0, 0.0, 1.0)  # it is here
        gaps, scale = self._gaps[known.reason], math.exp(self._shift(known))
        waited = max(0.0, now - known.stopped_s) / scale
        return Outlook(
            known.reason,
            return_s=max(0.0, gaps.quantile(waited, 0.5) - waited) * scale,
            wake_s=max(0.0, gaps.quantile(waited, 0.25) - waited) * scale,
            soon=gaps.within(waited, self.SOON_S / scale),
        )

    def typical_s(self, reason: str, share: float = 0.5) -> float:
        """A percentile of the gap after a stop reason, for `status` and tests."""
        return self._gaps[reason if reason in self._gaps else OTHER].quantile(0.0, share)

    def _learn(self, known: _Known, gap_s: float) -> None:
        gaps = self._gaps[known.reason]
        middle = gaps.quantile(0.0, 0.5)
        if math.isfinite(middle):
            off = math.log(max(gap_s, LEAST_S) / middle)
            known.gaps = min(known.gaps + 1, 32)  # beyond that old gaps fade
            known.shift += (off - known.shift) / known.gaps
        gaps.add(gap_s)

    def _shift(self, known: _Known) -> float:
        return known.shift * known.gaps / (known.gaps + SHIFT_WEIGHT)

    def _reason(self, reason: str) -> str:
        if reason not in self._gaps:
            if len(self._gaps) >= MAX_REASONS:
                return OTHER
            self._gaps[reason] = Gaps(*PRIOR_S[OTHER])
        return reason

    def _get(self, sid: SessionId) -> _Known:
        known = self._known.get(sid)
        if known is None:
            known = self._known[sid] = _Known()
            if len(self._known) > self._max:
                _, oldest = self._known.popitem(last=False)
                if oldest.waiting:
                    self._gaps[oldest.reason].add(None)
        else:
            self._known.move_to_end(sid)
        return known


def _edge(bucket: int) -> float:
    return LEAST_S * 2.0 ** (bucket / STEPS) if bucket else 0.0


def _bucket(gap_s: float) -> int:
    if gap_s <= LEAST_S:
        return 0
    return min(BUCKETS - 1, int(math.log2(gap_s / LEAST_S) * STEPS))


def _normal(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))
