"""Traces of coding agents: a packed session a line, as of github.com/callanjfox/kv-cache-tester.

A line is a session: `id`, `start_s`, `bs` tokens a block, `tool` and `sys` tokens of the prompt
that sessions share, `reqs`. A request is `[s since the session's start, input tokens, output
tokens, think s, API s, stop reason, model, runs]`, a run `[first id, count]` of blocks whose ids
are the session's own. A dict among them is a sub-agent: `t`, `tool`, `sys`, `reqs`, its times
relative to its `t`, otherwise a session of its own.

Blocks are put together to 512 tokens and named by everything before them, so that equal keys mean
an equal whole prefix; what lies in the shared prompt is the same in all sessions of a model.
"""

import gzip
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tiered_kv.errors import BadInput
from tiered_kv.types import BlockKey, Run

BLOCK_TOKENS = 512
MOST_BLOCKS = 1 << 24
"""Blocks of a request. More is no request, but would fill the memory."""


class _Session:
    """A session or sub-agent, and the last request that was unpacked."""

    __slots__ = ("ids", "keys", "model", "name", "shared", "together", "waiting")

    def __init__(self, name: str, shared: tuple[int, int], bs: int) -> None:
        self.name = name
        self.shared = shared
        self.together = BLOCK_TOKENS // bs
        self.waiting = 0
        self.forget()

    def forget(self) -> None:
        self.model = ""
        self.ids: list[int] = []
        self.keys: list[BlockKey] = []

    def unpack(self, model: str, runs: list[list[int]]) -> Run:
        """The keys of a request. What it begins with like the last one costs nothing."""
        ids = [i for first, n in runs for i in range(first, first + n)]
        before, m = self.ids if model == self.model else [], self.together
        longest = range(1, min(len(ids), len(before)) + 1)
        same = bisect_left(longest, True, key=lambda n: ids[:n] != before[:n])
        keys = self.keys[: same // m] if before else []
        shared = sum(self.shared) * m // BLOCK_TOKENS
        parent = keys[-1] if keys else b""
        for j in range(len(keys) * m, len(ids) - m + 1, m):
            name = (
                ("S", *self.shared, j, model) if j + m <= shared else (self.name, *ids[j : j + m])
            )
            parent = BlockKey(blake2b(parent + repr(name).encode(), digest_size=16).digest())
            keys.append(parent)
        self.model, self.ids, self.keys = model, ids, keys
        self.waiting -= 1
        if not self.waiting:
            self.forget()
        return tuple(keys)


class Request(NamedTuple):
    """One request: when it came, whose it is, its blocks, why and when its answer ended."""

    at_s: float
    run: Run
    session: str
    stop: str
    answered_s: float


class _Packed:
    __slots__ = ("answered_s", "at_s", "model", "runs", "session", "stop")

    def __init__(
        self, at_s: float, session: _Session, model: str, runs: list[list[int]], stop: str,
        answered_s: float,
    ) -> None:  # fmt: skip
        self.at_s, self.session, self.model, self.runs = at_s, session, model, runs
        self.stop, self.answered_s = stop, answered_s
        session.waiting += 1


def requests(file: Path) -> Iterator[Request]:
    """All requests in order of time.

    Raises `BadInput` that names file and line, and `OSError`. Memory: all sessions, packed.
    """
    for one in _ordered(file):
        run = one.session.unpack(one.model, one.runs)
        yield Request(one.at_s, run, one.session.name, one.stop, one.answered_s)


def count(file: Path) -> int:
    """How many requests there are. Raises like `requests`."""
    return len(_ordered(file))


def _ordered(file: Path) -> list[_Packed]:
    found: list[_Packed] = []
    number = 0
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            for line in gzip.GzipFile(fileobj=raw) if packed else raw:
                number += 1
                if line.strip():
                    found += _line(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{file}:{number + 1}: the file is damaged: {error}") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{file}:{number}: not JSON: {error.msg}") from None
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise BadInput(f"{file}:{number}: not a session: {_why(error)}") from None
    found.sort(key=attrgetter("at_s"))
    return found


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _line(line: bytes) -> Iterator[_Packed]:
    found: Any = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError("a line is a JSON object")
    bs = _whole("bs", found["bs"])
    if not bs or BLOCK_TOKENS % bs:
        raise ValueError(f"bs {bs} does not divide {BLOCK_TOKENS}")
    yield from _session(str(found["id"]), _seconds("start_s", found["start_s"]), found, bs)


def _session(name: str, start_s: float, found: dict[str, Any], bs: int) -> Iterator[_Packed]:
    shared = (_whole("tool", found["tool"]), _whole("sys", found["sys"]))
    session = _Session(name, shared, bs)
    for number, one in enumerate(found["reqs"]):
        if isinstance(one, dict):
            at_s = start_s + _seconds("t", one["t"])
            yield from _session(f"{name}/{number}", at_s, one, bs)
        else:
            at_s = start_s + _seconds("the time of a request", one[0])
            took_s = 0.0 if one[4] is None else _seconds("the API time of a request", one[4])
            yield _Packed(
                at_s, session, str(one[6]), _runs(one[7]), str(one[5] or ""), at_s + took_s
            )


def _runs(found: Any) -> list[list[int]]:
    runs = [[_whole("an id", first), _whole("a count", n)] for first, n in found]
    if sum(n for _, n in runs) > MOST_BLOCKS:
        raise ValueError(f"a request of more than {MOST_BLOCKS} blocks")
    return runs


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0 on")
    return value


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ValueError(f"{name} is {value!r}, not a time in seconds from 0 on")
    return float(value)
