import json
import os
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from other_process import shm_folder

from tiered_kv import gpus, machine, memory
from tiered_kv.errors import DoesNotFit

GIB = 1 << 30


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


class FakeRoot:
    """A made-up machine: files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nX: 3\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, point: str, fstype: str, options: str = "rw", root: str = "/") -> None:
        self.mounts.append(f"30 25 0:27 {root} {point} rw,relatime - {fstype} none {options}")
        self.write("proc/self/mountinfo", "\n".join(self.mounts))


@pytest.fixture
def fake(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


def test_facts_of_this_machine_are_plain_json_without_its_name(folder):
    found = machine.facts([folder])
    text = json.dumps(found.as_dict())
    assert json.loads(text)["kernel"] == platform.release()
    assert socket.gethostname() not in re.findall(r'"([^"]*)"', text)
    assert found.cpu.cores == len(os.sched_getaffinity(0))
    assert 0 < found.memory.available_bytes <= found.memory.total_bytes
    assert found.shm is not None
    assert found.shm.size_bytes >= found.shm.free_bytes > 0
    assert found.io_uring
    assert found.gpus_note


def test_a_machine_where_nothing_can_be_read_has_facts_all_the_same(tmp_path):
    found = machine.facts([], root=tmp_path)
    assert found.cpu.model == "unknown"
    assert found.memory.total_bytes == found.memory.available_bytes == 0
    assert found.memory.cgroup_limit_bytes is None
    assert not found.memory.may_lock_any
    assert found.shm is None
    assert found.numa == ()
    json.dumps(found.as_dict())


def test_without_a_cgroup_limit_memory_is_the_machines(fake):
    assert memory.total_bytes(fake.root) == 16 * GIB
    assert memory.available_bytes(fake.root) == 8 * GIB
    assert memory.cgroup_limit(fake.root) is None


def limit_v2(fake: FakeRoot, folder: str, limit: str, used: int, cache: int = 0) -> None:
    fake.write(f"{folder}/memory.max", limit)
    fake.write(f"{folder}/memory.current", str(used))
    fake.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\n")


def test_a_cgroup_v2_limit_bounds_memory_and_page_cache_counts_as_room(fake):
    fake.mount("/sys/fs/cgroup", "cgroup2")
    fake.write("proc/self/cgroup", "0::/pod/app\n")
    limit_v2(fake, "sys/fs/cgroup/pod/app", str(4 * GIB), 3 * GIB, cache=GIB)
    assert memory.total_bytes(fake.root) == 4 * GIB
    assert memory.available_bytes(fake.root) == 2 * GIB


def test_the_tightest_limit_of_all_parents_holds(fake):
    fake.mount("/sys/fs/cgroup", "cgroup2")
    fake.write("proc/self/cgroup", "0::/pod/app\n")
    limit_v2(fake, "sys/fs/cgroup/pod/app", "max", GIB)
    limit_v2(fake, "sys/fs/cgroup/pod", str(3 * GIB), 2 * GIB)
    assert memory.cgroup_limit(fake.root) == memory.CgroupLimit(3 * GIB, GIB)


def test_a_container_that_sees_its_own_cgroup_as_the_root_is_understood(fake):
    for root, path in (("/", "/"), ("/docker/abc", "/docker/abc"), ("/", "/../../other")):
        fake.mounts = []
        fake.mount("/sys/fs/cgroup", "cgroup2", root=root)
        fake.write("proc/self/cgroup", f"0::{path}\n")
        limit_v2(fake, "sys/fs/cgroup", str(2 * GIB), GIB)
        assert memory.cgroup_limit(fake.root) == memory.CgroupLimit(2 * GIB, GIB), (root, path)


def test_a_cgroup_v1_limit_bounds_memory_too(fake):
    fake.mount("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu")
    fake.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
    fake.write("proc/self/cgroup", "4:memory:/app\n1:cpu:/app\n0::/\n")
    for folder, limit in (("app", 2 * GIB), (".", 9223372036854771712)):
        fake.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", f"{limit}\n")
        fake.write(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", f"{GIB}\n")
    assert memory.cgroup_limit(fake.root) == memory.CgroupLimit(2 * GIB, GIB)


def test_more_used_than_the_limit_leaves_no_room(fake):
    fake.mount("/sys/fs/cgroup", "cgroup2")
    fake.write("proc/self/cgroup", "0::/\n")
    limit_v2(fake, "sys/fs/cgroup", str(GIB), 2 * GIB)
    assert memory.available_bytes(fake.root) == 0


@pytest.mark.parametrize(
    ("effective", "may"),
    [("000001ffffffffff", True), ("0000000000004000", True), ("0000000000003fff", False)],
)
def test_the_capability_to_lock_memory_is_bit_14(fake, effective, may):
    fake.write("proc/self/status", f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t0\n")
    assert memory.may_lock_any(fake.root) is may


def test_the_deepest_and_latest_mount_is_the_one_of_a_path(fake):
    fake.mount("/", "ext4")
    fake.mount("/data", "xfs")
    fake.mount("/data", "btrfs")
    fake.mount("/data/my\\040disk", "tmpfs")
    kinds = [memory.mount_of(Path(p), fake.root) for p in ("/x", "/data/y", "/database")]
    assert [m.fstype for m in kinds if m] == ["ext4", "btrfs", "ext4"]
    mount = memory.mount_of(Path("/data/my disk/z"), fake.root)
    assert mount is not None
    assert (mount.point, mount.fstype) == ("/data/my disk", "tmpfs")


def test_huge_pages_of_shared_memory_are_read_from_mount_and_kernel(fake):
    (fake.root / "dev/shm").mkdir(parents=True)
    fake.mount("/dev/shm", "tmpfs", "rw,size=1g,huge=advise")
    fake.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    fake.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never] force\n")
    found = machine.shm(fake.root)
    assert found is not None
    assert (found.huge, found.thp_enabled, found.thp_shmem_enabled) == (
        "advise",
        "madvise",
        "never",
    )


def test_numa_nodes_come_in_order_with_their_memory(fake):
    for n in (10, 2):
        fake.write(f"sys/devices/system/node/node{n}/cpulist", f"{n}-{n + 1}\n")
        fake.write(
            f"sys/devices/system/node/node{n}/meminfo",
            f"Node {n} MemTotal:  1024 kB\nNode {n} MemFree:  {n} kB\n",
        )
    assert machine.numa(fake.root) == (
        machine.NumaNode(2, "2-3", 1 << 20, 2 << 10),
        machine.NumaNode(10, "10-11", 1 << 20, 10 << 10),
    )


def test_a_disk_is_found_for_a_path_that_does_not_exist_yet(folder):
    found = machine.disk(folder / "not" / "yet")
    assert (found.mount, found.fstype) == ("/dev/shm", "tmpfs")
    assert found.size_bytes >= found.free_bytes > 0
    assert found.direct_io
    assert list(folder.iterdir()) == []


def test_a_disk_without_direct_io_says_why(folder, monkeypatch):
    def refused(*args):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refused)
    assert machine.disk(folder).direct_io.endswith("Invalid argument")


def test_what_does_not_fit_is_told_with_numbers(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "total_bytes", lambda: 2000)
    with pytest.raises(DoesNotFit, match=r"the thing needs 500 bytes .* 1000 of 2000 bytes"):
        memory.check_fits(folder, 500, "the thing")


def nvml_error(*args):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def with_nvml(monkeypatch, **functions) -> None:
    known = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetHandleByIndex": lambda n: n,
        "nvmlDeviceGetName": lambda device: "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": lambda device: type("M", (), {"total": 80, "free": 70}),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda device: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda device: 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda device: 1,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda device: 16,
    }
    for name, function in (known | functions).items():
        monkeypatch.setattr(pynvml, name, function)


def test_a_machine_without_a_driver_has_no_gpus_and_says_why(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    found, note = gpus.gpus()
    assert found == ()
    assert note.startswith("no GPU is visible: ")


def test_a_failing_driver_is_a_sentence(monkeypatch):
    with_nvml(monkeypatch, nvmlDeviceGetHandleByIndex=nvml_error)
    found, note = gpus.gpus()
    assert found == ()
    assert note.startswith("the NVIDIA driver failed: ")


def test_a_gpu_has_its_memory_and_the_speed_of_its_link_under_load(monkeypatch):
    with_nvml(monkeypatch)
    (gpu,), note = gpus.gpus()
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes) == ("NVIDIA H100", 80, 70)
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width_max) == (1, 5, 16)
    assert gpu.pcie_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert note == "1 GPUs, NVIDIA driver 570.1"


def test_a_gpu_whose_driver_tells_neither_link_nor_memory_is_listed(monkeypatch):
    with_nvml(
        monkeypatch,
        nvmlDeviceGetMemoryInfo=nvml_error,
        nvmlDeviceGetMaxPcieLinkGeneration=nvml_error,
        nvmlDeviceGetMaxPcieLinkWidth=nvml_error,
    )
    (gpu,), _ = gpus.gpus()
    assert (gpu.total_bytes, gpu.free_bytes, gpu.pcie_bytes_per_s) == (None, None, None)


@pytest.mark.parametrize(("generation", "width"), [(None, 16), (4, None), (99, 16), (0, 0)])
def test_an_unknown_link_has_no_speed(generation, width):
    assert gpus.link_bytes_per_s(generation, width) is None
