"""One validated configuration, from a TOML file, the environment and keyword overrides.

Later sources win: defaults, then the file (`TIERED_KV_CONFIG` or an argument), then environment
variables named `TIERED_KV_<SECTION>_<FIELD>`, then overrides. Sizes are integers or strings like
"64MiB" or "1.5TiB". An unknown field, section or variable is an error that lists the known ones.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tiered_kv.errors import BadConfig
from tiered_kv.keys import MAX_SECRET_BYTES
from tiered_kv.policies import EVICTION

PREFIX = "TIERED_KV_"
NOT_FIELDS = {"TIERED_KV_CONFIG", "TIERED_KV_TRACES"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
MAX_BYTES = 1 << 50
"""1 PiB in one tier of one process: anything above is a typing mistake."""


class Size(int):
    """A number of bytes; parsed from "64MiB" and the like, printed the same way."""

    def __str__(self) -> str:
        for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if self >= factor and self % (factor // 16) == 0:
                return f"{self / factor:g}{unit}"
        return f"{int(self)}B"


def parse_size(value: object) -> Size:
    """Bytes from an integer or a string with a unit. Raises `BadConfig` naming the value."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = int(value)
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in UNITS:
            raise BadConfig(f"{value!r} is not a size like 1048576, '64MiB' or '1.5TiB'")
        size = round(float(match[1]) * UNITS[match[2].upper()])
    if not 0 <= size <= MAX_BYTES:
        raise BadConfig(f"size {value!r} is not between 0 and 1 PiB")
    return Size(size)


@dataclass(frozen=True)
class Hbm:
    """The tier in GPU memory, one a GPU."""

    bytes: Size = Size(512 << 20)
    high: float = 0.90
    low: float = 0.80
    policy: str = "lru"
    slab_bytes: Size = Size(0)  # 0: chosen from the capacity
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    verify: float = 0.02  # share of the copies to and from DRAM whose bytes are compared


@dataclass(frozen=True)
class Dram:
    """The tier in pinned host memory, one a node."""

    bytes: Size = Size(1 << 30)
    high: float = 0.85
    low: float = 0.75
    policy: str = "lru"
    restore_floor: float = 0.05  # share that only promotions may take
    slab_bytes: Size = Size(0)  # 0: chosen from the capacity
    folder: str = ""  # "": /dev/shm/tiered_kv-<uid>


@dataclass(frozen=True)
class Nvme:
    """The tier on local disks, one a node. `bytes = 0` leaves it out."""

    bytes: Size = Size(4 << 30)
    high: float = 0.90
    low: float = 0.85
    policy: str = "lru"
    folder: str = ""  # "": $XDG_CACHE_HOME/tiered_kv/nvme; holds identity, lock and index
    devices: tuple[str, ...] = ()  # more folders, one a drive, to stripe over
    slab_bytes: Size = Size(0)
    engine: str = "auto"  # auto, threads, io_uring
    queue_depth: int = 8
    free_floor_bytes: Size = Size(1 << 30)  # always left free on the file system


@dataclass(frozen=True)
class Service:
    """Everything that is not a tier."""

    namespace: str = "tiered_kv"  # Ray namespace of the actors
    tenant_secret: str = "public"
    lease_ttl_s: float = 30.0
    wake_deadline_s: float = 10.0
    store_deadline_s: float = 5.0
    move_deadline_s: float = 30.0
    call_timeout_s: float = 15.0
    recent_s: float = 60.0  # a session unused for longer is idle
    gpu_fraction: float = 0.05  # num_gpus that a GPU actor asks of Ray


@dataclass(frozen=True)
class Config:
    """All fields of all sections; see each section. Immutable and validated."""

    hbm: Hbm = field(default_factory=Hbm)
    dram: Dram = field(default_factory=Dram)
    nvme: Nvme = field(default_factory=Nvme)
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        for name in ("hbm", "dram", "nvme"):
            tier = getattr(self, name)
            _require(0 < tier.low <= tier.high <= 1, f"{name}: need 0 < low <= high <= 1, "
                     f"not low {tier.low} and high {tier.high}")  # fmt: skip
            _require(tier.policy in EVICTION, f"{name}.policy {tier.policy!r} is not one of "
                     f"{', '.join(sorted(EVICTION))}")  # fmt: skip
        _require(self.dram.bytes >= 1 << 20, f"dram.bytes {self.dram.bytes} is below 1MiB")
        _require(self.hbm.bytes >= 1 << 20, f"hbm.bytes {self.hbm.bytes} is below 1MiB")
        _require(self.nvme.bytes == 0 or self.nvme.bytes >= 1 << 20,
                 f"nvme.bytes {self.nvme.bytes} is neither 0 nor at least 1MiB")  # fmt: skip
        _require(0 <= self.dram.restore_floor < 1,
                 f"dram.restore_floor {self.dram.restore_floor} is not in [0, 1)")  # fmt: skip
        _require(0 <= self.hbm.verify <= 1, f"hbm.verify {self.hbm.verify} is not in [0, 1]")
        _require(self.nvme.engine in ("auto", "threads", "io_uring"),
                 f"nvme.engine {self.nvme.engine!r} is not one of auto, threads, io_uring")  # fmt: skip
        _require(1 <= self.nvme.queue_depth <= 1024,
                 f"nvme.queue_depth {self.nvme.queue_depth} is not in 1..1024")  # fmt: skip
        _require(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.hbm.device) is not None,
                 f"hbm.device {self.hbm.device!r} is not auto, cpu, cuda or cuda:N")  # fmt: skip
        secret = len(self.service.tenant_secret.encode())
        _require(1 <= secret <= MAX_SECRET_BYTES,
                 f"service.tenant_secret has {secret} bytes, not 1 to {MAX_SECRET_BYTES}")
        _require(0 < self.service.gpu_fraction <= 1,
                 f"service.gpu_fraction {self.service.gpu_fraction} is not in (0, 1]")  # fmt: skip
        for name in ("lease_ttl_s", "wake_deadline_s", "store_deadline_s", "move_deadline_s",
                     "call_timeout_s", "recent_s"):  # fmt: skip
            value = getattr(self.service, name)
            _require(0 < value < 86_400 * 365, f"service.{name} {value} is not a positive time")

    @property
    def shm_folder(self) -> Path:
        """Where arenas and proofs of life are."""
        return Path(self.dram.folder or f"/dev/shm/tiered_kv-{os.getuid()}")

    @property
    def nvme_folder(self) -> Path:
        """Where identity, lock, index and the first data file are."""
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(self.nvme.folder or f"{cache}/tiered_kv/nvme")

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values for printing, status and other processes; the secret is left out."""
        document = asdict(self)
        document["service"]["tenant_secret"] = "***"
        return document

    def describe(self) -> str:
        """A line a section, printed at start."""
        return "\n".join(
            f"  {section}: " + ", ".join(f"{k}={v!s}" for k, v in values.items() if v != "")
            for section, values in self.as_dict().items()
        )


def load(path: str | Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None,
         environ: Mapping[str, str] | None = None) -> Config:  # fmt: skip
    """The configuration from all sources. Raises `BadConfig` naming field, value and source."""
    environ = os.environ if environ is None else environ
    path = path or environ.get("TIERED_KV_CONFIG")
    config = Config()
    if path:
        config = _merge(config, _read(Path(path)), str(path))
    config = _merge(config, _from_environment(environ), "environment")
    return _merge(config, overrides or {}, "overrides")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in NOT_FIELDS:
            section, _, key = name[len(PREFIX) :].lower().partition("_")
            found.setdefault(section, {})[key] = value
    return found


def _merge(config: Config, document: Mapping[str, Any], source: str) -> Config:
    sections = {f.name for f in fields(Config)}
    changed: dict[str, Any] = {}
    for name, values in document.items():
        if name not in sections:
            known = ", ".join(sorted(sections))
            raise BadConfig(f"{source}: no section {name!r}; there are {known}")
        if not isinstance(values, Mapping):
            raise BadConfig(f"{source}: {name} must be a section, not {values!r}")
        section = getattr(config, name)
        assert is_dataclass(section) and not isinstance(section, type)
        hints = get_type_hints(type(section))
        for key in values:
            if key not in hints:
                raise BadConfig(f"{source}: no field {name}.{key}; there are {', '.join(hints)}")
        new = {k: _convert(hints[k], v, f"{source}: {name}.{k}") for k, v in values.items()}
        changed[name] = replace(section, **new)
    return replace(config, **changed)


def _convert(kind: Any, value: object, what: str) -> object:
    if kind is Size:
        try:
            return parse_size(value)
        except BadConfig as error:
            raise BadConfig(f"{what}: {error}") from None
    if get_args(kind):
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise BadConfig(f"{what}: {value!r} is not a list of folders")
        return tuple(i for i in items if i)
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and not isinstance(value, bool):
        try:
            return kind(value)
        except (TypeError, ValueError):
            pass
    raise BadConfig(f"{what}: {value!r} is not {kind.__name__}")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise BadConfig(sentence)
