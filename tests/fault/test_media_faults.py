"""A disk that lies, fills up or vanishes under a whole node: counted misses, never a wrong byte."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import NBYTES, Engine, config_in, folders, until

from tiered_kv import assemble
from tiered_kv.config import Config
from tiered_kv.errors import FolderInUse, UnknownSession
from tiered_kv.runner import Runner
from tiered_kv.types import Medium

BLOCKS = 12


class Host:
    """A node in this process that can be started again on the same folders."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start()

    def start(self) -> None:
        self.runner = Runner(lambda: assemble.host(self.config))
        self.engine = Engine(self.runner)

    def stop(self) -> None:
        self.engine.close()
        self.runner.stop()

    def status(self) -> dict[str, Any]:
        return dict(self.runner.call("status", timeout_s=10))

    def cold(self, session: str) -> None:
        """Save a session and leave it on NVMe alone."""
        assert self.engine.save(session, BLOCKS, durable=True).durable == BLOCKS
        self.stop()
        self.start()
        assert self.status()["tiers"][0]["blocks"] == 0


@pytest.fixture
def host() -> Iterator[Host]:
    with folders() as (root, shm):
        one = Host(config_in(root, shm))
        yield one
        one.stop()


def data_file(config: Config) -> Path:
    return config.nvme_folder / "blocks.data"


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file, for real."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def slots_in_order(host: Host) -> list[int]:
    blocks = host.runner.node.hierarchy.book.blocks.values()
    return sorted(b.slots[1] for b in blocks)


def test_a_flipped_bit_costs_its_block_and_what_follows_and_is_counted(host: Host) -> None:
    host.cold("flipped")
    nth = 5
    run = next(r for r in host.runner.node.keeper.table if r.id == "flipped").run
    slot = host.runner.node.hierarchy.book.blocks[run[nth]].slots[1]
    flip(data_file(host.config), slot + NBYTES // 3)
    got = host.engine.wake("flipped")
    assert (got.blocks, got.missed) == (nth, BLOCKS - nth)
    status = host.status()
    assert status["misses"] == {"corrupt": BLOCKS - nth}
    assert status["counts"]["failed.corrupt"] == 1
    assert "corrupt" in status["errors"][-1]["text"]
    assert host.engine.save("flipped", BLOCKS).blocks == BLOCKS - nth  # computed again, stored
    assert host.engine.wake("flipped").blocks == BLOCKS


def test_a_truncated_data_file_is_a_miss_at_the_first_read(host: Host) -> None:
    host.cold("truncated")
    host.stop()
    os.truncate(data_file(host.config), 4096)
    host.start()
    got = host.engine.wake("truncated")
    assert (got.blocks, got.missed) == (0, BLOCKS)
    assert host.status()["misses"] == {"corrupt": BLOCKS}
    assert host.engine.save("truncated", BLOCKS, durable=True).durable == BLOCKS


@pytest.mark.parametrize("damage", ["truncated", "garbage", "deleted"])
def test_a_damaged_index_costs_warmth_and_never_correctness(host: Host, damage: str) -> None:
    host.cold("indexed")
    host.stop()
    index = max(host.config.nvme_folder.glob("index*"), key=lambda f: f.stat().st_size)
    for side in host.config.nvme_folder.glob("index*-wal"):
        side.unlink()
    if damage == "truncated":
        os.truncate(index, index.stat().st_size // 2)
    elif damage == "garbage":
        index.write_bytes(os.urandom(index.stat().st_size))
    else:
        index.unlink()
    host.start()
    with contextlib.suppress(UnknownSession):
        host.engine.wake("indexed")  # whatever comes, its bytes are compared
    assert any("former index" in note for note in host.status()["notes"])
    assert host.engine.save("after", BLOCKS, durable=True).durable == BLOCKS
    assert host.engine.wake("after").blocks == BLOCKS


def test_a_folder_that_vanishes_takes_the_tier_out_and_memory_serves_on(host: Host) -> None:
    host.engine.save("before", BLOCKS, durable=True)
    shutil.rmtree(host.config.nvme_folder)
    until(lambda: "nvme" in host.status()["offline"], "the tier is taken out")
    assert host.engine.wake("before").blocks == BLOCKS  # DRAM has it
    for i in range(40):  # more than DRAM: without a lower tier blocks are dropped, and counted
        host.engine.save(f"more-{i}", BLOCKS)
    status = host.status()
    assert status["counts"]["dropped.pressure"] > 0
    assert "removed or replaced" in status["offline"]["nvme"]
    assert host.engine.wake("more-39").blocks == BLOCKS


def test_a_second_service_on_the_same_folder_is_refused_and_the_first_goes_on(host: Host) -> None:
    host.engine.save("mine", BLOCKS, durable=True)
    with pytest.raises(FolderInUse, match=str(host.config.nvme_folder)):
        Runner(lambda: assemble.host(host.config))
    assert host.engine.wake("mine").blocks == BLOCKS


READ_ONLY = """
import sys
from pathlib import Path
import subprocess
from cluster_kit import *
from tiered_kv import assemble
from tiered_kv.runner import Runner
root, shm = Path(sys.argv[1]), Path(sys.argv[2])
disk = root / "disk"
disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", disk], check=True)
config = config_in(disk, shm)
runner = Runner(lambda: assemble.host(config))
engine = Engine(runner)
status = lambda: runner.call("status", timeout_s=10)
assert engine.save("before", 12, durable=True).durable == 12
{fault}
saved = engine.save("after", 12, durable=True)
print("durable", saved.durable, "blocks", saved.blocks)
print("woken", engine.wake("after").blocks, engine.wake("before").blocks)
print("failed", sum(n for k, n in status()["counts"].items() if k.startswith("failed.")) > 0)
print("says", bool(status()["errors"]))
{heal}
def back():
    engine.save("again", 12)
    return engine.save("again", 12, durable=True).durable == 12
until(back, "the disk is used again")
print("healed", engine.wake("again").blocks)
engine.close()
runner.stop()
"""


def in_mount_namespace(script: str) -> list[str]:
    """Run a script where it may mount: root of a mount namespace of its own."""
    command = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-Urm"]
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    with folders() as (root, shm):
        done = subprocess.run(
            [*command, sys.executable, "-c", script, root, shm],
            env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_disk_that_turns_read_only_is_a_counted_failure_and_heals() -> None:
    said = in_mount_namespace(
        READ_ONLY.format(
            fault='subprocess.run(["mount", "-o", "remount,ro", disk], check=False)\n'
            'ro = subprocess.run(["touch", disk / "x"], capture_output=True).returncode\n'
            "if ro == 0:  # files open for writing keep a file system writable: fill it instead\n"
            '    (disk / "ballast").write_bytes(b"")\n'
            '    subprocess.run(["dd", "if=/dev/zero", f"of={disk}/ballast", "bs=1M"],'
            " capture_output=True)",
            heal='subprocess.run(["mount", "-o", "remount,rw", disk], check=False)\n'
            '(disk / "ballast").unlink(missing_ok=True)',
        )
    )
    assert "durable 0 blocks 12" in said
    assert "woken 12 12" in said
    assert "failed True" in said
    assert "says True" in said
    assert "healed 12" in said


def test_a_disk_that_fills_up_is_a_counted_failure_and_heals() -> None:
    said = in_mount_namespace(
        READ_ONLY.format(
            fault='subprocess.run(["dd", "if=/dev/zero", f"of={disk}/ballast", "bs=64k"],'
            " capture_output=True)",
            heal='(disk / "ballast").unlink()',
        )
    )
    assert "woken 12 12" in said
    assert "healed 12" in said
    assert "durable 0 blocks 12" in said
    assert "failed True" in said


def test_found_on_nvme_after_a_restart_and_said_so(host: Host) -> None:
    host.cold("warm")
    got = host.engine.wake("warm")
    assert (got.blocks, set(got.found)) == (BLOCKS, {Medium.NVME})
