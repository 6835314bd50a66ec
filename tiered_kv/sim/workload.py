"""Generated workloads: seeded, streaming, in the format of Mooncake's traces.

Memory is that of the sessions that are open at a time, whatever the number of sessions in all.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TextIO

from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.sim.workload_sessions import Request, World, agent, chat, rag
from tiered_kv.sim.workload_shapes import AGENT, CHAT, MIX, MIX_PER_S, RAG

Session = Callable[[World, Random, float], Iterator[Request]]
SESSIONS: dict[str, Session] = {"chat": chat, "agent": agent, "rag": rag}
PER_S = {"chat": CHAT.per_s, "agent": AGENT.per_s, "rag": RAG.per_s, "mix": MIX_PER_S}

KINDS = tuple(PER_S)


def generate(
    kind: str, sessions: int, seed: int = 0, per_s: float | None = None
) -> Iterator[Request]:
    """The requests of so many sessions, in order of time from 0 s on.

    Sessions arrive at random, `per_s` a second (as in the trace that the kind is fitted to); the
    same arguments give the same requests. Raises `UnknownName` and `BadInput`, at once.
    """
    if kind not in PER_S:
        raise UnknownName(f"workload {kind!r} is not one of {', '.join(KINDS)}")
    if sessions < 0:
        raise BadInput(f"sessions must be 0 or more, not {sessions}")
    rate = PER_S[kind] if per_s is None else per_s
    if not 0 < rate < float("inf"):
        raise BadInput(f"sessions must arrive at a positive rate, not {rate}")
    return _merged(kind, sessions, seed, rate)


def write_mooncake(requests: Iterable[Request], out: TextIO) -> int:
    """One JSON object a line: timestamp (ms), input_length, output_length, hash_ids; how many."""
    written = 0
    for request in requests:
        line = {
            "timestamp": round(request.at_s * 1000),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        out.write(json.dumps(line) + "\n")
        written += 1
    return written


def _merged(kind: str, sessions: int, seed: int, rate: float) -> Iterator[Request]:
    """Open sessions wait in a heap with their next request."""
    rng = Random(f"{seed}/{kind}")  # of arrivals; each session has its own
    world = World()
    heap: list[tuple[float, int, Request, Iterator[Request]]] = []
    arrives = 0.0
    for number in range(sessions):
        arrives += rng.expovariate(rate) if number else 0.0
        yield from _until(arrives, heap)
        made = _open(kind, rng)(world, Random(f"{seed}/{kind}/{number}"), arrives)
        first = next(made)
        heapq.heappush(heap, (first.at_s, number, first, made))
    yield from _until(float("inf"), heap)


def _until(
    end_s: float, heap: list[tuple[float, int, Request, Iterator[Request]]]
) -> Iterator[Request]:
    while heap and heap[0][0] <= end_s:
        _, number, request, session = heap[0]
        yield request
        following = next(session, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.at_s, number, following, session))


def _open(kind: str, rng: Random) -> Session:
    if kind != "mix":
        return SESSIONS[kind]
    return SESSIONS[rng.choices(list(MIX), list(MIX.values()))[0]]
