"""Numbers of bytes as people write them: 1048576, "64MiB", "1.5TiB"."""

import re

from tiered_kv.errors import BadConfig
from tiered_kv.inputs import short

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
MAX_BYTES = 1 << 50
"""1 PiB in one tier of one process: anything above is a typing mistake."""


class Size(int):
    """A number of bytes; parsed from "64MiB" and the like, printed the same way."""

    def __str__(self) -> str:
        for unit, factor in (
            ("TiB", 1 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("KiB", 1 << 10),
        ):
            if self >= factor and self % (factor // 16) == 0:
                return f"{self / factor:g}{unit}"
        return f"{int(self)}B"


def parse_size(value: object) -> Size:
    """Bytes from an integer or a string with a unit. Raises `BadConfig` naming the value."""
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in UNITS:
            raise BadConfig(f"{short(value)} is not a size like 1048576, '64MiB' or '1.5TiB'")
        size = float(match[1]) * UNITS[match[2].upper()]
    if not 0 <= size <= MAX_BYTES:
        raise BadConfig(f"size {short(value)} is not between 0 and 1 PiB")
    if size != round(size):
        raise BadConfig(f"{short(value)} is not a whole number of bytes")
    return Size(size)
