"""Request traces as runs of block keys, whatever the file looks like inside.

`mooncake` and `recorded` are read as streams, in constant memory. `claude-code` holds sessions one
after another that ran side by side: they are kept packed, and unpacked in the order of time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.sim import claude_code, mooncake, recorded
from tiered_kv.types import BlockKey, Run


class Request(NamedTuple):
    """One request: when it came, and its blocks in prefix order (complete blocks only)."""

    at_s: float
    run: Run


def _mooncake(file: Path) -> Iterator[tuple[float, Run]]:
    for request in mooncake.requests(file):
        yield request.at_s, [BlockKey(i.to_bytes(16, "little")) for i in request.hash_ids]


READERS: dict[str, Callable[[Path], Iterator[tuple[float, Run]]]] = {
    "mooncake": _mooncake,
    "claude-code": claude_code.requests,
    "recorded": recorded.requests,
}


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
        for number, (at_s, run) in enumerate(READERS[self.format](self.file), 1):
            if len(set(run)) != len(run):
                raise BadInput(f"{self.file}: request {number} names a block twice")
            yield Request(at_s, run)
        if not number:
            raise BadInput(f"{self.file}: no request in it")

    def runs(self) -> Iterator[Run]:
        """The blocks of each request. Raises as iterating does."""
        return (request.run for request in self)

    @property
    def name(self) -> str:
        """The file's name without what follows its first dot."""
        return self.file.name.partition(".")[0]

    def size(self) -> int:
        """How many requests there are, about (of a stream: its lines). Cheap."""
        if self.format == "claude-code":
            return claude_code.count(self.file)
        with self.file.open("rb") as lines:
            return sum(1 for _ in lines)
