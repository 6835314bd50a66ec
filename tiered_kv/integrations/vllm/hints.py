"""What a request says about itself in `kv_transfer_params["tiered_kv"]`.

    {"session": "chat-17", "ended": false, "pause_s": 120, "priority": 0, "store": true}

All of it is optional. What makes no sense is ignored and counted: a hint must not fail a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered_kv.errors import BadSession
from tiered_kv.inputs import LONGEST_S
from tiered_kv.outlooks import MOST_PRIORITY
from tiered_kv.sessions import session_id
from tiered_kv.types import SessionId

FIELD = "tiered_kv"
KNOWN = ("session", "ended", "pause_s", "priority", "store")
LONGEST_PAUSE_S = 30 * LONGEST_S
"""Longer ones are mistakes. A node is told of a day at most: it plans no further."""


@dataclass(frozen=True, slots=True)
class Hints:
    """`bad` counts values that were ignored."""

    session: SessionId | None = None
    ended: bool = False
    pause_s: float | None = None
    priority: int | None = None
    store: bool = True
    bad: int = 0


def hints(params: Mapping[str, Any] | None) -> Hints:
    """Hints of a request. Raises nothing."""
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if given is None:
        return Hints()
    if not isinstance(given, Mapping):
        return Hints(bad=1)
    bad = sum(name not in KNOWN for name in given)
    session: SessionId | None = None
    if given.get("session") is not None:
        try:
            session = session_id(given["session"])
        except BadSession:
            bad += 1
    ended, store = given.get("ended", False), given.get("store", True)
    bad += sum(not isinstance(flag, bool) for flag in (ended, store))
    pause_s, priority = given.get("pause_s"), given.get("priority")
    if pause_s is not None and not (_number(pause_s) and 0 <= pause_s <= LONGEST_PAUSE_S):
        pause_s, bad = None, bad + 1
    if pause_s is not None:
        pause_s = min(float(pause_s), LONGEST_S)
    if priority is not None and not (type(priority) is int and abs(priority) <= MOST_PRIORITY):
        priority, bad = None, bad + 1
    return Hints(session, ended is True, pause_s, priority, store is not False, bad)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
