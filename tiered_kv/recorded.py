"""Our own trace format: keys, sizes and times, no content.

JSON lines. The first says what it is, `{"trace": "tiered_kv", "version": 1}`; each other one is a
request, `{"t": seconds, "keys": "32 hex digits a block", "block_bytes": bytes}`, in order of time.
A node also writes the `"verb"`: what reads (`find`, `wake`) and what stores (`save`) are requests
of their own, so a turn of a chat is two of them.

Keys are keyed hashes, so that nothing can be read from them without the secret they were made
with; equal keys mean an equal whole prefix, as everywhere.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tiered_kv.errors import BadInput
from tiered_kv.types import BlockKey, Run

HEADER = {"trace": "tiered_kv", "version": 1}
KEY_BYTES = 16


class Recorder:
    """Writes a trace, a line a request. Buffered as the file is; the caller closes it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        file.write(json.dumps(HEADER) + "\n")

    def write(self, at_s: float, run: Run, block_bytes: int, verb: str = "") -> None:
        """One request. Raises `OSError`."""
        line = {"t": round(at_s, 6), "keys": b"".join(run).hex(), "block_bytes": block_bytes}
        if verb:
            line["verb"] = verb
        self._file.write(json.dumps(line) + "\n")


def requests(file: Path) -> Iterator[tuple[float, Run]]:
    """Time and keys of each request, in constant memory.

    Raises `BadInput` that names file and line, and `OSError`.
    """
    last = 0.0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            found = _parse(where, line)
            if number == 1:
                if found != HEADER:
                    raise BadInput(f"{where}: not a recorded trace of version {HEADER['version']}")
                continue
            at_s: Any = found.get("t")
            if type(at_s) not in (int, float) or not last <= at_s < 1e12:
                raise BadInput(f"{where}: t {at_s!r} is no time in seconds from {last:g} on")
            last = float(at_s)
            yield last, _keys(where, found.get("keys"))


def _parse(where: str, line: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}: a line is a JSON object")
    return found


def _keys(where: str, text: Any) -> Run:
    try:
        raw = bytes.fromhex(text)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: keys must be hex digits") from None
    if len(raw) % KEY_BYTES:
        raise BadInput(f"{where}: keys must have {2 * KEY_BYTES} hex digits a block")
    return [BlockKey(raw[i : i + KEY_BYTES]) for i in range(0, len(raw), KEY_BYTES)]
