"""One validated configuration, from a TOML file, the environment and keyword overrides.

Later sources win: defaults, then the file (`TIERED_KV_CONFIG` or an argument), then environment
variables named `TIERED_KV_<SECTION>_<FIELD>`, then overrides. Sizes are integers or strings like
"64MiB" or "1.5TiB". An unknown field, section or variable is an error that lists the known ones.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tiered_kv.errors import BadConfig
from tiered_kv.inputs import LONGEST_S, short
from tiered_kv.keys import MAX_SECRET_BYTES
from tiered_kv.policies import EVICTION
from tiered_kv.policies.admission import ADMISSION
from tiered_kv.types import ALIGNMENT

PREFIX = "TIERED_KV_"
NOT_FIELDS = {"TIERED_KV_CONFIG", "TIERED_KV_TRACES"}
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
    admission: str = "on_demotion"  # what is written: on_demotion, write_behind, second_use
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
    tenant_secret: str = field(default="public", repr=False)
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
            stripes = max(1, len(self.nvme.devices)) if name == "nvme" else 1
            _check_slab(name, tier.slab_bytes, tier.bytes, stripes)
            _require(tier.policy in EVICTION, f"{name}.policy {tier.policy!r} is not one of "
                     f"{', '.join(sorted(EVICTION))}")  # fmt: skip
        for name in ("dram.folder", "nvme.folder"):
            section, key = name.split(".")
            _require("\0" not in getattr(getattr(self, section), key), f"{name} has a NUL in it")
        _require(len(set(self.nvme.devices)) == len(self.nvme.devices),
                 f"nvme.devices {list(self.nvme.devices)} names a folder twice")  # fmt: skip
        _require(self.dram.bytes >= 1 << 20, f"dram.bytes {self.dram.bytes} is below 1MiB")
        _require(self.hbm.bytes >= 1 << 20, f"hbm.bytes {self.hbm.bytes} is below 1MiB")
        _require(self.nvme.bytes == 0 or self.nvme.bytes >= 1 << 20,
                 f"nvme.bytes {self.nvme.bytes} is neither 0 nor at least 1MiB")  # fmt: skip
        _require(0 <= self.dram.restore_floor < 1,
                 f"dram.restore_floor {self.dram.restore_floor} is not in [0, 1)")  # fmt: skip
        _require(0 <= self.hbm.verify <= 1, f"hbm.verify {self.hbm.verify} is not in [0, 1]")
        _require(self.nvme.admission in ADMISSION,
                 f"nvme.admission {self.nvme.admission!r} is not one of "
                 f"{', '.join(sorted(ADMISSION))}")  # fmt: skip
        _require(self.nvme.engine in ("auto", "threads", "io_uring"), f"nvme.engine "
                 f"{self.nvme.engine!r} is not one of auto, threads, io_uring")  # fmt: skip
        _require(1 <= self.nvme.queue_depth <= 1024,
                 f"nvme.queue_depth {self.nvme.queue_depth} is not in 1..1024")  # fmt: skip
        _require(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.hbm.device) is not None,
                 f"hbm.device {self.hbm.device!r} is not auto, cpu, cuda or cuda:N")  # fmt: skip
        _require(self.service.namespace != "", "service.namespace '' is empty")
        try:
            secret = len(self.service.tenant_secret.encode())
        except UnicodeEncodeError:
            raise BadConfig("service.tenant_secret is not text in UTF-8") from None
        _require(
            1 <= secret <= MAX_SECRET_BYTES,
            f"service.tenant_secret has {secret} bytes, not 1 to {MAX_SECRET_BYTES}",
        )
        _require(0 < self.service.gpu_fraction <= 1,
                 f"service.gpu_fraction {self.service.gpu_fraction} is not in (0, 1]")  # fmt: skip
        for name in ("lease_ttl_s", "wake_deadline_s", "store_deadline_s", "move_deadline_s",
                     "call_timeout_s", "recent_s"):  # fmt: skip
            value = getattr(self.service, name)
            _require(0 < value <= LONGEST_S, f"service.{name} {value} is not above 0 and at most "
                     f"{LONGEST_S:g} s")  # fmt: skip
        for name in ("wake_deadline_s", "store_deadline_s"):
            value, call_s = getattr(self.service, name), self.service.call_timeout_s
            _require(value < call_s, f"service.{name} {value} must be shorter than "
                     f"service.call_timeout_s {call_s}")  # fmt: skip

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


SECTIONS: dict[str, type[Any]] = {"hbm": Hbm, "dram": Dram, "nvme": Nvme, "service": Service}
SECRET = "service.tenant_secret"
"""The field whose value is in no message."""


def load(path: str | Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None,
         environ: Mapping[str, str] | None = None) -> Config:  # fmt: skip
    """The configuration from all sources. Raises `BadConfig` naming field, value and source."""
    environ = os.environ if environ is None else environ
    path = path or environ.get("TIERED_KV_CONFIG")
    values: dict[str, dict[str, Any]] = {}
    if path:
        _merge(values, _read(Path(path)), str(path))
    _merge(values, _from_environment(environ), "environment")
    _merge(values, overrides or {}, "overrides")
    return Config(**{name: SECTIONS[name](**fields) for name, fields in values.items()})


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
            if not key:
                raise BadConfig(f"environment: {name} names no field; they are {PREFIX}<SECTION>_"
                                "<FIELD>, like TIERED_KV_DRAM_BYTES")  # fmt: skip
            found.setdefault(section, {})[key] = value
    return found


def _merge(values: dict[str, dict[str, Any]], document: Mapping[str, Any], source: str) -> None:
    """Add what a source says to `values`; it wins over what is there."""
    for name, section in document.items():
        if name not in SECTIONS:
            known = ", ".join(sorted(SECTIONS))
            raise BadConfig(f"{source}: no section {short(name)}; there are {known}")
        if not isinstance(section, Mapping):
            raise BadConfig(f"{source}: {name} must be a section, not {short(section)}")
        hints = get_type_hints(SECTIONS[name])
        for key in section:
            if key not in hints:
                raise BadConfig(f"{source}: no field {name}.{key}; there are {', '.join(hints)}")
        new = {k: _convert(hints[k], v, f"{source}: {name}.{k}") for k, v in section.items()}
        values.setdefault(name, {}).update(new)


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
    numeric = isinstance(value, int | float | str) and not isinstance(value, bool)
    if kind in (int, float) and numeric:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            number = None
        if number is not None and (isinstance(value, str) or number == value or kind is float):
            return number
    shown = "what was given" if what.endswith(SECRET) else short(value)
    raise BadConfig(f"{what}: {shown} is not {kind.__name__}")


def _check_slab(name: str, slab: int, capacity: int, stripes: int) -> None:
    if slab:
        _require(slab <= capacity, f"{name}.slab_bytes {slab} is more than {name}.bytes {capacity}")
        _require(slab % (stripes * ALIGNMENT) == 0, f"{name}.slab_bytes {slab} is no multiple of "
                 f"{stripes} x {ALIGNMENT}")  # fmt: skip


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise BadConfig(sentence)
