"""Requests of a trace in the format of Mooncake, read as a stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiered_kv.errors import BadInput
from tiered_kv.sim.workload_sessions import Request

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def requests(file: Path) -> Iterator[Request]:
    """One request a line, in constant memory. Times start at 0.

    Raises `BadInput` that names file and line, and `OSError`.
    """
    begin = last = -1.0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            at_ms, asked, answered, ids = _fields(where, line)
            if at_ms < last:
                raise BadInput(f"{where}: timestamp {at_ms} is before that of the line before")
            begin, last = (at_ms if begin < 0 else begin), at_ms
            yield Request((at_ms - begin) / 1e3, number, "trace", asked, answered, tuple(ids))


def _fields(where: str, line: str) -> tuple[float, int, int, list[int]]:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(found, dict) or any(field not in found for field in FIELDS):
        raise BadInput(f"{where}: a request has {', '.join(FIELDS)}")
    at_ms, asked, answered, ids = (found[field] for field in FIELDS)
    if type(at_ms) not in (int, float) or not 0 <= at_ms < 1e15:
        raise BadInput(f"{where}: timestamp {at_ms!r} is no time in milliseconds")
    for name, value in (("input_length", asked), ("output_length", answered)):
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise BadInput(f"{where}: {name} {value!r} is no number of tokens")
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 1 << 64 for i in ids):
        raise BadInput(f"{where}: hash_ids must be a list of whole numbers from 0 on")
    return float(at_ms), asked, answered, ids
