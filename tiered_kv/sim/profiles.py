"""Hardware profiles: TOML files in which every number stands beside its source.

A profile describes one node. `uses = ["nvme-gen5", ...]` takes sections from part files, so that
a drive or a network is written down once. All sizes are decimal bytes, all rates bytes a second.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from tiered_kv.errors import BadConfig, UnknownName

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuPart:
    """`count` equal GPUs; the other numbers are of one. `high` and `low` are watermarks as shares
    of the whole HBM, weights included. `restart_s`: from a crash to the first request."""

    count: int
    hbm_bytes: float
    hbm_bytes_per_s: float
    flops: float
    mfu: float
    mbu: float
    high: float
    low: float
    restart_s: float
    usd_per_month: float
    usd_per_gb: float


@dataclass(frozen=True, slots=True)
class LinkPart:
    """Host to GPUs: `links` of them are used side by side for one sequence."""

    links: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class StorePart:
    """A medium below HBM. Bought (`usd_per_gb`, spread over `MONTHS`) or rented
    (`usd_per_gb_month`); `endurance_bytes` may be written before the warranty ends, 0 where
    nothing wears."""

    bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    high: float
    low: float
    usd_per_gb: float
    usd_per_gb_month: float
    endurance_bytes: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One node and what it reaches. `sources` names where each number is from."""

    name: str
    title: str
    gpu: GpuPart
    link: LinkPart
    dram: StorePart
    nvme: StorePart | None
    remote: StorePart | None
    s3: StorePart | None
    sources: Mapping[str, str]

    @property
    def hbm_bytes(self) -> float:
        """HBM of the whole node."""
        return self.gpu.count * self.gpu.hbm_bytes


FOLDER = resources.files("tiered_kv.sim") / "profiles"
STORES = ("dram", "nvme", "remote", "s3")
MAY_BE_ZERO = {"latency_s", "usd_per_gb", "usd_per_gb_month", "usd_per_month", "endurance_bytes",
               "restart_s"}  # fmt: skip
SHARES = {"mfu", "mbu", "high", "low"}


def names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in FOLDER.iterdir()
        if entry.name.endswith(".toml") and not entry.name.startswith("part-")
    )  # fmt: skip


def load(name: str) -> Profile:
    """A profile by name, or a file by path (ending in `.toml`).

    Raises `UnknownName`, `BadConfig` that names field and value, and `OSError`.
    """
    file: Traversable = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise UnknownName(f"profile {name!r} is neither one of {', '.join(names())} nor a .toml")
    found = _parse(file, name)
    table: dict[str, Any] = {}
    for part in found.pop("uses", []):
        whole = FOLDER / f"part-{part}.toml"
        if not isinstance(part, str) or "/" in part or not whole.is_file():
            raise BadConfig(f"profile {name}: uses = {part!r} is no part that is known")
        table |= _parse(whole, f"part {part}")
    for key, value in found.items():
        both = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = table[key] | value if both else value
    return _Reader(name, table).profile()


def _parse(file: Traversable, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"profile {name}: {error}") from error


class _Reader:
    def __init__(self, name: str, table: dict[str, Any]) -> None:
        self._name = name
        self._table = table
        self._sources: dict[str, str] = {}

    def profile(self) -> Profile:
        known = {"title", "gpu", "link", *STORES}
        for key in self._table:
            if key not in known:
                raise self._bad(key, self._table[key], f"is not one of {', '.join(sorted(known))}")
        stores = {s: self._part(s, StorePart) if s in self._table else None for s in STORES}
        dram = stores.pop("dram")
        if dram is None:
            raise BadConfig(f"profile {self._name}: dram is missing")
        title = str(self._table.get("title", self._name))
        gpu, link = self._part("gpu", GpuPart), self._part("link", LinkPart)
        return Profile(
            self._name, title, gpu, link, dram, sources=dict(self._sources), **stores
        )  # fmt: skip

    def _part(self, section: str, kind: type[T]) -> T:
        table = self._table.get(section)
        if not isinstance(table, dict):
            raise BadConfig(f"profile {self._name}: section {section} is missing")
        wanted = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
        for key in table:
            if key not in wanted:
                raise self._bad(f"{section}.{key}", table[key], "is no field of a profile")
        values = {key: self._number(section, key, table, kind) for key, kind in wanted.items()}
        if "high" in values and values["low"] > values["high"]:
            raise self._bad(f"{section}.low", values["low"], f"is above high = {values['high']}")
        return kind(**values)

    def _number(self, section: str, key: str, table: Mapping[str, Any], kind: Any) -> float | int:
        name, entry = f"{section}.{key}", table.get(key)
        if entry is None and key in MAY_BE_ZERO:
            return 0.0
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            raise self._bad(name, entry, "must be { value = NUMBER, source = TEXT }")
        value, source = entry["value"], entry["source"]
        if not isinstance(source, str) or not source.strip():
            raise self._bad(f"{name}.source", source, "must say where the value is from")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._bad(name, value, "must be a number")
        if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
            raise self._bad(name, value, "must be positive")
        if key in SHARES and value > 1:
            raise self._bad(name, value, "must be a share, at most 1")
        if kind is int and value != int(value):
            raise self._bad(name, value, "must be a whole number")
        self._sources[name] = source
        return int(value) if kind is int else float(value)

    def _bad(self, field: str, value: object, why: str) -> BadConfig:
        return BadConfig(f"profile {self._name}: {field} = {value!r} {why}")
