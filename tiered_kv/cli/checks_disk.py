"""The findings of `doctor` about the NVMe tier's disks: space, O_DIRECT, and measured speed."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tiered_kv import liveness
from tiered_kv.bench.io_memory import SharedMemory
from tiered_kv.cli.checks import Row
from tiered_kv.cli.output import size
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.folder import Folder
from tiered_kv.machine import disk
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import Probe

TRIAL_BYTES = 4 << 20
"""Of the tier that is opened to measure: its files lie where the real ones would."""


def folders(config: Config) -> list[Path]:
    """Where the data files are or will be; none without an NVMe tier."""
    if not config.nvme.bytes:
        return []
    return [Path(path) for path in config.nvme.devices] or [config.nvme_folder]


def holder(config: Config) -> str | None:
    """Who runs this very service here, in words; None when nobody does."""
    if config.nvme.bytes:
        lock = config.nvme_folder / "LOCK"
        return lock.read_text().strip() if liveness.is_locked(lock) else None
    arenas = config.shm_folder.glob("*.arena")
    return next((f"arena {file.name}" for file in arenas if liveness.is_locked(file)), None)


def check(config: Config, held_by: str | None) -> list[Row]:
    """Space, way of access and speed. Writes a few MB beside the configured files for about a
    second, and removes them."""
    places = folders(config)
    share = int(config.nvme.bytes) // len(places)
    rows = [row for path in places for row in _disk(config, path, share, held_by)]
    if all(row.state != "problem" for row in rows):
        rows.append(_speed(config, places))
    return rows


def _disk(config: Config, path: Path, share: int, held_by: str | None) -> list[Row]:
    there = _nearest(path)
    if not os.access(there, os.W_OK | os.X_OK):
        return [Row("disk", "problem", f"nvme.folder: no right to write in {there}")]
    found, floor = disk(path), int(config.nvme.free_floor_bytes)
    name = f"{path} ({found.fstype} at {found.mount})"
    rows = []
    if found.direct_io != "works":
        rows.append(Row("disk", "note", f"{name}: {found.direct_io}; goes through the page cache"))
    if held_by is not None:
        return [*rows, Row("disk budget", "ok", f"{name}: in use, the service runs ({held_by})")]
    have = _allocated(path)
    numbers = f"{size(share)} for the tier, {size(have)} of it there, {size(found.free_bytes)} free"
    if share <= have or share - have + floor <= found.free_bytes:
        return [*rows, Row("disk budget", "ok", f"{name}: {numbers}")]
    says = f"{name}: {numbers}, {size(floor)} of which must stay free (nvme.free_floor_bytes)"
    return [*rows, Row("disk budget", "problem", says)]


def _speed(config: Config, places: list[Path]) -> Row:
    try:
        found = _measure(config, places)
    except TieredKVError as error:
        return Row("disk speed", "problem", f"the trial of the NVMe tier failed: {error}")
    return Row(
        "disk speed", "ok",
        f"{found.write_bytes_per_s / 1e9:.2f} GB/s written and "
        f"{found.read_bytes_per_s / 1e9:.2f} GB/s read, with engine {found.engine} at depth "
        f"{config.nvme.queue_depth}",
    )  # fmt: skip


def _measure(config: Config, places: list[Path]) -> Probe:
    """Open a small tier beside the real one and let it test itself."""
    with ExitStack() as stack:
        made = []
        for path in places:
            made.append(Path(tempfile.mkdtemp(prefix="tiered_kv-doctor-", dir=_nearest(path))))
            stack.callback(shutil.rmtree, made[-1], ignore_errors=True)
        memory = stack.enter_context(SharedMemory(TRIAL_BYTES))
        folder = Folder.open(made[0])
        stack.callback(folder.close)
        tier = NvmeTier.open(
            folder, memory, capacity_bytes=TRIAL_BYTES * len(made),
            slab_bytes=TRIAL_BYTES * len(made), free_floor_bytes=0, paths=made,
            engine=config.nvme.engine, queue_depth=config.nvme.queue_depth,
        )  # fmt: skip
        stack.callback(tier.close)
        return tier.probe()


def _nearest(path: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    there = path.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    return there


def _allocated(path: Path) -> int:
    try:
        return (path / "blocks.data").stat().st_size
    except OSError:
        return 0
