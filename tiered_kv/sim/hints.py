"""What an engine would tell of its sessions while a trace is replayed, no earlier than it knows it.

When an answer has ended, its stop reason is known, and from that and the session's own past
`policies.retention` expects when it is back. A session whose next request is here already is not
told of: it is not away.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import count

from tiered_kv.hierarchy import Hierarchy
from tiered_kv.policies.retention import Retention
from tiered_kv.sim.traces import Request
from tiered_kv.types import Run, SessionId


class Hints:
    """Watches the requests of a trace and tells the hierarchy. Memory: the requests that are being
    answered, and about 200 bytes a session."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._retention = Retention()
        self._answers: list[tuple[float, int, Request]] = []
        self._newest: dict[str, int] = {}
        self._numbers = count()

    def before(self, request: Request) -> None:
        """Tell what has become known until this request, which is about to begin."""
        while self._answers and self._answers[0][0] <= request.at_s:
            now, number, ended = heapq.heappop(self._answers)
            if self._newest.get(ended.session) == number:
                del self._newest[ended.session]
                sid = SessionId(ended.session)
                self._retention.stopped(sid, ended.stop, now)
                self._hierarchy.expect(ended.run, self._retention.outlook(sid, now).return_s)
        if request.session:
            number = self._newest[request.session] = next(self._numbers)
            self._retention.arrived(SessionId(request.session), request.at_s)
            heapq.heappush(self._answers, (request.answered_s, number, request))


def told(requests: Iterable[Request], hints: Hints) -> Iterator[Run]:
    """The blocks of each request, once everything was told that was known before it."""
    for request in requests:
        hints.before(request)
        yield request.run
