"""The findings of `doctor` about memory, GPUs and Ray. Reads, and changes nothing."""

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tiered_kv.cli.output import size
from tiered_kv.config import Config
from tiered_kv.errors import BadInput
from tiered_kv.gpus import Gpu
from tiered_kv.machine import Machine
from tiered_kv.memory import HEADROOM_BYTES
from tiered_kv.ray_address import answers, last_started

REMOUNT = "mount -o remount,huge=advise /dev/shm"


@dataclass(frozen=True)
class Row:
    """One finding. With a `problem` the configured service cannot start; a `note` costs speed, or
    is good to know."""

    what: str
    state: Literal["ok", "note", "problem"]
    says: str


def machine(config: Config, found: Machine) -> list[Row]:
    """What is here, whatever the budgets."""
    cpu, memory = found.cpu, found.memory
    limit = memory.cgroup_limit_bytes
    return [
        Row("processor", "ok", f"{cpu.cores} cores, {cpu.model}, kernel {found.kernel}"),
        Row("memory", "ok", f"{size(memory.available_bytes)} available of "
            f"{size(memory.total_bytes)}{'' if limit is None else ' (limit of the cgroup)'}"),
        *_shm(found),
        _memlock(config, found),
        _io_uring(config, found),
        *_gpus(found),
    ]  # fmt: skip


def budgets(config: Config, found: Machine, holder: str | None) -> list[Row]:
    """Whether the tiers in memory fit, each with its numbers."""
    stand_in, gpu_rows = _hbm(config, found)
    needs = {"DRAM tier": int(config.dram.bytes)}
    if stand_in:
        needs["HBM stand-in"] = int(config.hbm.bytes)
    total = sum(needs.values())
    what = " + ".join(f"{name} {size(n)}" for name, n in needs.items())
    if holder is not None:
        says = f"{what}: taken, the service runs ({holder})"
        return [*gpu_rows, Row("memory budget", "ok", says)]
    free = _free(config.shm_folder)
    rows = [
        _fits("shared memory budget", what, total, free, f"free in {config.shm_folder.parent}"),
        _fits("memory budget", f"{what} + {size(HEADROOM_BYTES)} for the rest",
              total + HEADROOM_BYTES, found.memory.available_bytes, "of memory available"),
    ]  # fmt: skip
    return [*gpu_rows, *rows]


def ray() -> Row:
    """Which Ray, and whether a cluster answers. None is needed: one can be started."""
    release = f"Ray {version('ray')}"
    where = os.environ.get("RAY_ADDRESS") or last_started()
    if where is None:
        return Row("Ray", "note", f"{release}; no cluster was started here (`ray start --head`)")
    try:
        there = answers(where)
    except BadInput:
        return Row("Ray", "note", f"{release}; address {where!r} was not tried")
    if there:
        return Row("Ray", "ok", f"{release}; a cluster answers at {where}")
    return Row("Ray", "note", f"{release}; nothing answers at {where} (`ray start --head`)")


def _shm(found: Machine) -> list[Row]:
    shm = found.shm
    if shm is None:
        return [Row("shared memory", "note", "there is no /dev/shm; set dram.folder to a tmpfs")]
    rows = [
        Row("shared memory", "ok", f"{size(shm.free_bytes)} free of {size(shm.size_bytes)}"),
    ]
    if shm.huge in ("advise", "within_size", "always"):
        rows.append(Row("huge pages", "ok", f"/dev/shm has huge={shm.huge}"))
    else:
        rows.append(Row("huge pages", "note", f"/dev/shm has huge={shm.huge}: arenas get small "
                        f"pages and start slower; as root: {REMOUNT}"))  # fmt: skip
    return rows


def _memlock(config: Config, found: Machine) -> Row:
    limit, needs = found.memory.memlock_bytes, int(config.dram.bytes)
    if found.memory.may_lock_any or limit is None:
        return Row("locked memory", "ok", "no limit")
    if limit >= needs:
        return Row("locked memory", "ok", f"limit {size(limit)}, {size(needs)} wanted")
    says = f"limit {size(limit)}, {size(needs)} wanted: "
    if found.gpus:
        return Row("locked memory", "note", f"{says}CUDA may refuse to pin (ulimit -l unlimited)")
    return Row("locked memory", "note", f"{says}io_uring works without fixed buffers")


def _io_uring(config: Config, found: Machine) -> Row:
    if found.io_uring == "works":
        return Row("io_uring", "ok", "works")
    if config.nvme.bytes and config.nvme.engine == "io_uring":
        return Row("io_uring", "problem", f"nvme.engine is io_uring, but it is {found.io_uring}")
    return Row("io_uring", "note", f"{found.io_uring}; threads are used instead")


def _gpus(found: Machine) -> list[Row]:
    if not found.gpus:
        return [Row("GPU", "note", f"{found.gpus_note}; shared memory stands in for HBM")]
    return [Row(f"GPU {gpu.index}", "ok", _describe(gpu)) for gpu in found.gpus]


def _describe(gpu: Gpu) -> str:
    memory = f"{size(gpu.free_bytes or 0)} free of {size(gpu.total_bytes or 0)}"
    if gpu.pcie_bytes_per_s is None:
        return f"{gpu.name}, {memory}"
    return f"{gpu.name}, {memory}, link of {gpu.pcie_bytes_per_s / 1e9:.0f} GB/s each way"


def _hbm(config: Config, found: Machine) -> tuple[bool, list[Row]]:
    """Whether shared memory stands in for HBM, and what the GPUs have room for."""
    device, needs = config.hbm.device, int(config.hbm.bytes)
    if device == "cpu" or not found.gpus:
        return True, []
    chosen = [gpu for gpu in found.gpus if device in ("auto", "cuda", f"cuda:{gpu.index}")]
    if not chosen:
        says = f"hbm.device is {device}, but there are {len(found.gpus)} GPUs"
        return False, [Row("HBM budget", "problem", says)]
    return False, [
        _fits("HBM budget", size(needs), needs, gpu.free_bytes, f"free on GPU {gpu.index}")
        for gpu in chosen
        if gpu.free_bytes is not None
    ]


def _fits(what: str, needs_what: str, needs: int, free: int, where: str) -> Row:
    if needs <= free:
        return Row(what, "ok", f"{needs_what}: fits into {size(free)} {where}")
    return Row(what, "problem", f"{what}: {needs_what} needs {size(needs)}, but {size(free)} are "
               f"{where}")  # fmt: skip


def _free(folder: Path) -> int:
    there = folder
    while not there.is_dir():
        there = there.parent
    disk = os.statvfs(there)
    return disk.f_bavail * disk.f_frsize
