"""The configuration: four sections of plain fields, validated as a whole.

`settings.load` makes one from a file, the environment and overrides.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv.config_checks import check_hbm, check_memory, check_nvme, check_service, check_tier
from tiered_kv.sizes import Size


@dataclass(frozen=True)
class Hbm:
    """The tier in GPU memory, one a GPU. `bytes = 0` leaves it to engines with a pool of theirs."""

    bytes: Size = Size(512 << 20)
    high: float = 0.90
    low: float = 0.80
    policy: str = "adaptive"
    slab_bytes: Size = Size(0)  # 0: chosen from the capacity
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    verify: float = 0.02  # share of the copies to and from DRAM whose bytes are compared


@dataclass(frozen=True)
class Dram:
    """The tier in pinned host memory, one a node."""

    bytes: Size = Size(1 << 30)
    high: float = 0.85
    low: float = 0.75
    policy: str = "adaptive"
    restore_floor: float = 0.05  # share that only promotions may take
    slab_bytes: Size = Size(0)  # 0: chosen from the capacity
    folder: str = ""  # "": /dev/shm/tiered_kv-<uid>


@dataclass(frozen=True)
class Nvme:
    """The tier on local disks, one a node. `bytes = 0` leaves it out."""

    bytes: Size = Size(4 << 30)
    high: float = 0.90
    low: float = 0.85
    policy: str = "adaptive"
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
    session_ttl_s: float = 604_800.0  # a session unused for longer is forgotten; 0: never
    prefetch: str = "on_request"  # none, on_request, on_predicted_wake
    record: str = ""  # a file for a trace of all requests (no content); "": none
    gpu_fraction: float = 0.05  # num_gpus that a GPU actor asks of Ray


@dataclass(frozen=True)
class Config:
    """All fields of all sections; see each section. Immutable and validated."""

    hbm: Hbm = field(default_factory=Hbm)
    dram: Dram = field(default_factory=Dram)
    nvme: Nvme = field(default_factory=Nvme)
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        """Raises `BadConfig` naming the field and its value."""
        for name, stripes in (("hbm", 1), ("dram", 1), ("nvme", max(1, len(self.nvme.devices)))):
            check_tier(name, getattr(self, name), stripes)
        check_hbm(self.hbm)
        check_memory(self.dram)
        check_nvme(self.nvme)
        check_service(self.service)

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
