"""Where a new session goes: pure choices among nodes, by name.

A policy sees what nodes announced a beat or two ago, never the nodes themselves. It must answer
the same for the same arguments, so that processes that cannot ask each other agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Protocol

from tiered_kv.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as its last announcement described it; `sessions` counts those on their way too."""

    node_id: str
    capacity_bytes: int
    used_bytes: int
    sessions: int


class PlacementPolicy(Protocol):
    """Stateless. O(candidates)."""

    name: ClassVar[str]

    def choose(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, of which there is at least one, whatever their order."""
        ...


class LeastLoaded:
    """The emptiest node by tenths; among equals the one with the fewest sessions a byte.

    Tenths, because a cache at work is as full as its watermarks let it be: the last percent says
    nothing, and all new sessions would run after it.
    """

    name: ClassVar[str] = "least_loaded"

    def choose(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        """See `PlacementPolicy`."""
        return min(candidates, key=_load)


class Rendezvous:
    """Highest random weight (Thaler and Ravishankar 1996): a session's node depends on nothing
    but the set of nodes, and a node that leaves moves only its own sessions."""

    name: ClassVar[str] = "rendezvous"

    def choose(self, session: str, candidates: Sequence[Candidate]) -> Candidate:
        """See `PlacementPolicy`."""
        return max(candidates, key=lambda c: (_weight(session, c.node_id), c.node_id))


PLACEMENT: dict[str, type[PlacementPolicy]] = {
    policy.name: policy for policy in (LeastLoaded, Rendezvous)
}


def placement(name: str) -> PlacementPolicy:
    """A placement policy. Raises `UnknownName` with the list of known ones."""
    if name not in PLACEMENT:
        raise UnknownName(f"placement policy {name!r} is not one of {', '.join(sorted(PLACEMENT))}")
    return PLACEMENT[name]()


def _load(node: Candidate) -> tuple[int, float, str]:
    capacity = max(1, node.capacity_bytes)
    return 10 * node.used_bytes // capacity, node.sessions / capacity, node.node_id


def _weight(session: str, node_id: str) -> bytes:
    # The separator is in neither: session ids exclude it (sessions.ALLOWED).
    return blake2b(f"{session}/{node_id}".encode(), digest_size=8).digest()
