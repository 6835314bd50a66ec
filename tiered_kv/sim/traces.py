"""Request traces as runs of block keys, whatever the file looks like inside.

`mooncake` and `recorded` are read as streams, in constant memory. `claude-code` holds sessions one
after another that ran side by side: they are kept packed, and unpacked in the order of time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiered_kv import recorded
from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.sim import claude_code, mooncake
from tiered_kv.types import BlockKey, Run


class Request(NamedTuple):
    """One request: when it came, and its blocks in prefix order (complete blocks only); where the
    trace says so, whose it is, why its answer ended, and when."""

    at_s: float
    run: Run
    session: str = ""
    stop: str = ""
    answered_s: float = 0.0


def _mooncake(file: Path) -> Iterator[Request]:
    for request in mooncake.requests(file):
        yield Request(request.at_s, [BlockKey(i.to_bytes(16, "little")) for i in request.hash_ids])


def _claude_code(file: Path) -> Iterator[Request]:
    return (Request(*request) for request in claude_code.requests(file))


def _recorded(file: Path) -> Iterator[Request]:
    return (Request(*request) for request in recorded.requests(file))


READERS: dict[str, Callable[[Path], Iterator[Request]]] = {
    "mooncake": _mooncake,
    "claude-code": _claude_code,
    "recorded": _recorded,
}
HINTED = ("claude-code",)
"""Formats that say whose a request is and why its answer ended."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file; can be read again and again, and sent to another process."""

    file: Path
    format: str

    def __post_init__(self) -> None:
        if self.format not in READERS:
            known = ", ".join(READERS)
            raise UnknownName(f"trace format {self.format!r} is not one of {known}")

    def __iter__(self) -> Iterator[Request]:
        """All requests in order. Raises `BadInput` naming file and line, and `OSError`."""
        number = 0
        for number, request in enumerate(READERS[self.format](self.file), 1):
            if len(set(request.run)) != len(request.run):
                raise BadInput(f"{self.file}: request {number} names a block twice")
            yield request
        if not number:
            raise BadInput(f"{self.file}: no request in it")

    def runs(self) -> Iterator[Run]:
        """The blocks of each request. Raises as iterating does."""
        return (request.run for request in self)

    def hinted(self) -> Iterator[Request]:
        """All requests, if the format says whose they are and why answers ended. Raises `BadInput`
        at once if not, and as iterating does."""
        if self.format not in HINTED:
            raise BadInput(
                f"{self.file}: a {self.format} trace has no stop reasons; {', '.join(HINTED)} has"
            )
        return iter(self)

    @property
    def name(self) -> str:
        """The file's name without its suffixes: all that follows its first dot (a leading one
        apart), so that `sessions.jsonl.gz` and `sessions.jsonl` are both `sessions`."""
        name = self.file.name.lstrip(".")
        return name.partition(".")[0] or self.file.name

    def size(self) -> int:
        """How many requests there are, about (of a stream: its lines). Cheap."""
        if self.format == "claude-code":
            return claude_code.count(self.file)
        with self.file.open("rb") as lines:
            return sum(1 for _ in lines)
