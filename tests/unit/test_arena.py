import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from other_process import Child, shm_folder

from tiered_kv import arena_file, liveness, memory, pages
from tiered_kv.arena import Arena, arena_name, sweep_leftovers
from tiered_kv.errors import BadInput, DoesNotFit, StaleHandle
from tiered_kv.types import ALIGNMENT

MIB = 1 << 20

OWNER = """
import sys
from pathlib import Path
from tiered_kv.arena import Arena
from tiered_kv.liveness import hold
folder, name = Path(sys.argv[1]), sys.argv[2]
arena = Arena.create(folder, name, 1 << 20, node_id="n", incarnation=1)
alive = hold(folder, name)
arena.view(4096, 5)[:] = b"hello"
arena.generations.open([4096])
arena.generations.publish([4096])
print("created", flush=True)
while sys.stdin.readline():
    arena.generations.open([4096])
    print("reused", flush=True)
"""

SLOW_OWNER = """
import sys
from pathlib import Path
from tiered_kv.arena import Arena
def progress(done, total):
    print("half", flush=True)
    sys.stdin.readline()
Arena.create(Path(sys.argv[1]), "a", 1 << 20, node_id="n", incarnation=1, progress=progress)
"""

IN_A_SMALL_SHM = """
import os, sys
from pathlib import Path
from tiered_kv import arena, pages
arena.check_fits = lambda *_: None  # as if others took the memory just after the check
folder = Path(sys.argv[1])
def unknown_advice(address, nbytes):
    raise OSError(22, "an old kernel")
for prefault, populate in ((True, pages.populate), (False, None), (True, unknown_advice)):
    pages.populate = populate
    try:
        arena.Arena.create(folder, "a", 64 << 20, node_id="n", incarnation=1, prefault=prefault)
    except arena.DoesNotFit as error:
        left = os.statvfs(folder)
        print(os.listdir(folder), left.f_blocks - left.f_bfree, error)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


def make(folder: Path, name: str = "a", nbytes: int = MIB, **options) -> Arena:
    return Arena.create(folder, name, nbytes, node_id="node", incarnation=7, **options)


def test_a_new_arena_is_zero_and_writable_through_views_and_tensor(folder):
    arena = make(folder)
    assert bytes(arena.view(0, MIB)) == bytes(MIB)
    arena.view(4096, 3)[:] = b"abc"
    assert arena.tensor[4096:4099].tolist() == list(b"abc")
    arena.tensor[-1] = 9
    assert arena.view(MIB - 1, 1)[0] == 9
    assert (arena.tensor.dtype, arena.tensor.shape) == (torch.uint8, (MIB,))
    assert arena.tensor is arena.tensor
    assert arena.tensor.data_ptr() == arena.address
    arena.close()


def test_the_data_lies_on_a_huge_page_of_the_file_and_not_on_the_generations(folder):
    arena = make(folder, nbytes=4 * ALIGNMENT)
    every = [i * ALIGNMENT for i in range(4)]
    arena.generations.open(every)
    assert bytes(arena.view(0, 4 * ALIGNMENT)) == bytes(4 * ALIGNMENT)
    arena.tensor.fill_(255)
    assert arena.generations.read(every) == (1, 1, 1, 1)
    raw = (folder / "a.arena").read_bytes()
    assert raw[2 * MIB :] == b"\xff" * (4 * ALIGNMENT)
    assert arena.address % ALIGNMENT == 0
    arena.close()


def test_an_attached_arena_shows_the_same_bytes_and_generations(folder):
    arena = make(folder)
    arena.view(8192, 4)[:] = b"data"
    arena.generations.open([8192])
    for prefault in (False, True):
        other = Arena.attach(folder, "a", prefault=prefault)
        assert bytes(other.view(8192, 4)) == b"data"
        assert other.generations.read([8192]) == (1,)
        assert (other.node_id, other.incarnation, other.capacity_bytes) == ("node", 7, MIB)
        other.tensor[8192] = ord("D")
        assert bytes(arena.view(8192, 4)) == b"Data"
        other.close()
        other.close()
        arena.view(8192, 1)[:] = b"d"
    assert (folder / "a.arena").exists()
    arena.close()
    assert not (folder / "a.arena").exists()


@pytest.mark.parametrize(("slot", "nbytes"), [(-1, 1), (0, MIB + 1), (MIB, 1), (0, -1)])
def test_a_view_outside_is_refused(folder, slot, nbytes):
    arena = make(folder)
    with pytest.raises(BadInput, match=f"slot {slot} with {nbytes} bytes"):
        arena.view(slot, nbytes)
    arena.close()


def test_views_and_tensors_survive_close(folder):
    arena = make(folder)
    arena.view(0, 1)[0] = 42
    view, tensor = arena.view(0, 4096), arena.tensor
    arena.close()
    arena.close()
    assert view[0] == 42
    assert tensor[0] == 42
    assert tensor.sum() == 42  # every page is still mapped
    assert list(folder.iterdir()) == []
    for use in (lambda: arena.view(0, 1), lambda: arena.tensor, lambda: arena.generations):
        with pytest.raises(StaleHandle, match="arena 'a' is closed"):
            use()


def test_a_tensor_alone_keeps_the_memory(folder):
    arena = make(folder)
    tensor = arena.tensor
    arena.close()
    assert tensor.fill_(1).sum() == MIB


def test_a_view_that_outlives_its_arena_does_not_look_alive(folder):
    arena = make(folder)
    kept = folder / "kept.arena"
    os.link(folder / "a.arena", kept)
    view = arena.view(0, 1)
    arena.close()
    assert not liveness.is_locked(kept)
    assert view[0] == 0


def test_progress_is_in_bytes_and_ends_at_all(folder):
    seen: list[tuple[int, int]] = []
    arena = make(folder, nbytes=130 * MIB, progress=lambda *p: seen.append(p))
    total = 132 * MIB  # the header and the generations take a huge page
    assert [t for _, t in seen] == [total] * 3
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1] == (total, total)
    arena.close()


@pytest.mark.parametrize("prefault", [True, False])
def test_all_memory_is_taken_at_creation(folder, prefault):
    arena = make(folder, nbytes=4 * MIB, prefault=prefault)
    assert (folder / "a.arena").stat().st_blocks * 512 >= 6 * MIB
    arena.close()


def test_a_kernel_that_cannot_populate_gets_its_pages_touched(folder, monkeypatch):
    def unknown_advice(address, nbytes):
        raise OSError(errno.EINVAL, "unknown advice")

    monkeypatch.setattr(pages, "populate", unknown_advice)
    seen: list[tuple[int, int]] = []
    arena = make(folder, nbytes=4 * MIB, progress=lambda *p: seen.append(p))
    assert (folder / "a.arena").stat().st_blocks * 512 >= 6 * MIB
    assert seen == [(6 * MIB, 6 * MIB)]
    arena.close()


def test_an_arena_larger_than_the_mount_is_refused_before_anything_is_taken(folder, monkeypatch):
    monkeypatch.setattr("tiered_kv.arena.allocate", lambda *_, **__: pytest.fail("allocates"))
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize // ALIGNMENT * ALIGNMENT
    with pytest.raises(DoesNotFit, match=rf"{size} bytes needs \d+ bytes, but .* free of"):
        make(folder, nbytes=size)
    assert list(folder.iterdir()) == []


def test_an_arena_larger_than_available_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 300 * MIB)
    with pytest.raises(DoesNotFit, match=f"only {300 * MIB} of"):
        make(folder, nbytes=64 * MIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 * MIB)
    make(folder, nbytes=64 * MIB).close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.ENOMEM, "Cannot allocate memory"),
        (errno.EFAULT, "no page left"),
    ],
)
def test_memory_that_goes_away_during_creation_is_does_not_fit_and_leaves_nothing(
    folder, monkeypatch, code, reason
):
    def refused(address, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pages, "populate", refused)
    with pytest.raises(DoesNotFit, match=f"{6 * MIB} bytes .*{reason}"):
        make(folder, nbytes=4 * MIB)
    assert list(folder.iterdir()) == []


def test_a_full_mount_is_an_error_and_never_a_signal():
    command = 'mount -t tmpfs -o size=16m,mode=0700 tmpfs /mnt && exec "$@"'
    ask = ["unshare", "-m", "sh", "-c", command, "sh"]
    if subprocess.run([*ask, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a tmpfs of its own")
    root = str(Path(liveness.__file__).parents[1])
    run = subprocess.run(
        [*ask, sys.executable, "-c", IN_A_SMALL_SHM, "/mnt"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert [line.startswith("[] 0 ") for line in lines] == [True] * 3, lines


def test_a_process_killed_while_it_creates_leaves_nothing(folder):
    with Child(SLOW_OWNER, folder) as child:
        assert child.word() == "half"
        assert list(folder.iterdir()) == []  # nor is anything visible before it is complete
        child.kill()
    assert list(folder.iterdir()) == []


def test_an_interrupted_creation_leaves_nothing(folder):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(folder, nbytes=200 * MIB, progress=interrupt)
    assert list(folder.iterdir()) == []
    make(folder).close()


@pytest.mark.parametrize("nbytes", [0, -4096, 4095, 4096.0])
def test_a_capacity_that_is_not_whole_pages_is_refused(folder, nbytes):
    with pytest.raises(BadInput, match="capacity_bytes must be a positive multiple of 4096"):
        make(folder, nbytes=nbytes)


@pytest.mark.parametrize("name", ["", "../a", "a/b"])
def test_a_name_with_a_path_in_it_is_refused(folder, name):
    with pytest.raises(BadInput, match="is not a name"):
        make(folder, name)
    with pytest.raises(BadInput, match="is not a name"):
        Arena.attach(folder, name)


def test_the_name_of_a_live_arena_is_refused_and_that_arena_is_untouched(folder):
    arena = make(folder)
    arena.view(0, 1)[0] = 1
    with pytest.raises(BadInput, match="live process"):
        make(folder)
    assert Arena.attach(folder, "a").view(0, 1)[0] == 1
    arena.close()


def test_arena_names_tell_node_incarnation_and_role():
    assert arena_name("ab12", 3) == "ab12-3"
    assert arena_name("ab12", 3, "gpu0") == "ab12-3-gpu0"
    with pytest.raises(BadInput, match="is not a name"):
        arena_name("../x", 3)


def test_a_gone_arena_is_a_stale_handle(folder):
    with pytest.raises(StaleHandle, match="arena 'a' cannot be opened: No such file"):
        Arena.attach(folder, "a")


def damaged(folder: Path, offset: int, data: bytes) -> Path:
    arena = make(folder)
    raw = bytearray((folder / "a.arena").read_bytes())
    arena.close()
    raw[offset : offset + len(data)] = data
    (folder / "a.arena").write_bytes(raw)
    return folder / "a.arena"


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "is not an arena file"),
        (8, struct.pack("<I", 99), "has version 99; this release reads 1"),
        (12, b"\xff", "damaged header"),
        (12, bytes(64), "damaged header: node_id"),
        (84, struct.pack("<Q", 2 * MIB), "means 4194304"),
        (84, struct.pack("<Q", 17), "damaged header: capacity_bytes"),
        (100, struct.pack("<Q", 4096), "data at 4096"),
    ],
)
def test_a_damaged_header_is_refused_with_what_is_wrong(folder, offset, data, message):
    damaged(folder, offset, data)
    with pytest.raises(BadInput, match=message):
        Arena.attach(folder, "a")


def test_a_truncated_file_is_refused(folder):
    path = damaged(folder, 0, b"T")
    os.truncate(path, path.stat().st_size - ALIGNMENT)
    with pytest.raises(BadInput, match="has 3141632 bytes"):
        Arena.attach(folder, "a")
    os.truncate(path, 10)
    with pytest.raises(BadInput, match="is not an arena file"):
        Arena.attach(folder, "a")


def test_another_process_maps_the_same_bytes_and_its_reuse_of_a_slot_is_seen(folder):
    with Child(OWNER, folder, "a") as child:
        assert child.word() == "created"
        arena = Arena.attach(folder, "a")
        lease = arena.generations.read([4096])
        child.stop()
        assert bytes(arena.view(4096, 5)) == b"hello"
        assert arena.generations.unchanged([4096], lease)
        child.resume()
        child.say("reuse")
        assert child.word() == "reused"
        assert not arena.generations.unchanged([4096], lease)
        arena.close()


def test_the_memory_of_a_killed_owner_stays_for_those_who_map_it_and_for_nobody_else(folder):
    with Child(OWNER, folder, "a") as child:
        assert child.word() == "created"
        arena = Arena.attach(folder, "a")
        child.kill()
    with pytest.raises(StaleHandle, match="left over by a process that is dead"):
        Arena.attach(folder, "a")
    assert sorted(sweep_leftovers(folder)) == ["a.alive", "a.arena"]
    assert bytes(arena.view(4096, 5)) == b"hello"
    arena.close()


def test_sweeping_takes_what_the_dead_left_and_nothing_of_the_living(folder):
    mine = make(folder, "mine")
    (folder / "notes.txt").touch()
    with Child(OWNER, folder, "stopped") as stopped, Child(OWNER, folder, "killed") as killed:
        assert stopped.word() == killed.word() == "created"
        stopped.stop()
        killed.kill()
        assert sweep_leftovers(folder) == ["killed.alive", "killed.arena"]
        assert sweep_leftovers(folder) == []
        assert sorted(p.name for p in folder.iterdir()) == [
            "mine.arena",
            "notes.txt",
            "stopped.alive",
            "stopped.arena",
        ]
    mine.close()


def test_sweeping_a_folder_that_is_not_there_finds_nothing(folder):
    assert sweep_leftovers(folder / "none") == []
    assert not (folder / "none").exists()


def test_a_leftover_of_the_same_name_is_replaced(folder):
    damaged(folder, 0, b"X")
    arena = make(folder)
    assert Arena.attach(folder, "a").capacity_bytes == MIB
    arena.close()


def test_a_numa_node_that_exists_is_used_and_another_is_refused(folder):
    make(folder, numa_node=0).close()
    with pytest.raises(BadInput, match="numa_node 999"):
        make(folder, numa_node=999)
    assert list(folder.iterdir()) == []


def test_generations_can_cover_memory_elsewhere(folder):
    arena = make(folder, nbytes=ALIGNMENT, covers_bytes=8 * MIB)
    last = 8 * MIB - ALIGNMENT
    assert arena.generations.open([last]) == (1,)
    other = Arena.attach(folder, "a")
    assert other.generations.read([last]) == (1,)
    assert arena.capacity_bytes == ALIGNMENT
    arena.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_pinning_says_so(folder):
    arena = make(folder)
    assert "no CUDA" in arena.pin()
    assert arena.describe().startswith("shared memory")
    arena.close()


class FakeCudart:
    """Counts registrations; refuses from the `fails_at`-th on."""

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self.registered: list[tuple[int, int]] = []
        self.fails_at = fails_at

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if len(self.registered) >= self.fails_at:
            return 2
        self.registered.append((address, nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered = [r for r in self.registered if r[0] != address]
        return 0


def with_cuda(monkeypatch, cudart: FakeCudart) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    monkeypatch.setattr("tiered_kv.arena.PIN_CHUNK_BYTES", 4 * ALIGNMENT)


def test_pinning_covers_the_data_in_chunks_once_and_close_undoes_it(folder, monkeypatch):
    cudart = FakeCudart()
    with_cuda(monkeypatch, cudart)
    arena = make(folder, nbytes=10 * ALIGNMENT)
    assert arena.pin() == arena.pin() == f"pinned {10 * ALIGNMENT} bytes in 3 registrations"
    starts = [arena.address + i * 4 * ALIGNMENT for i in range(3)]
    sizes = [4 * ALIGNMENT, 4 * ALIGNMENT, 2 * ALIGNMENT]
    assert cudart.registered == list(zip(starts, sizes, strict=True))
    assert arena.describe().startswith("pinned")
    arena.close()
    assert cudart.registered == []


def test_a_refused_pin_undoes_what_was_pinned_and_has_the_numbers(folder, monkeypatch):
    cudart = FakeCudart(fails_at=2)
    with_cuda(monkeypatch, cudart)
    arena = make(folder, nbytes=10 * ALIGNMENT)
    with pytest.raises(DoesNotFit, match=r"8192 bytes at 32768 of 40960 \(cudaError 2\)"):
        arena.pin()
    assert cudart.registered == []
    assert arena.view(0, 1)[0] == 0
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")
def test_a_pinned_arena_is_pinned_for_torch(folder):
    arena = make(folder, nbytes=64 * MIB)
    assert arena.pin().startswith("pinned")
    assert arena.tensor.is_pinned()
    there = arena.tensor.to("cuda")
    assert torch.equal(there.cpu(), arena.tensor)
    arena.close()


def test_the_header_reads_back(folder):
    header = arena_file.Header("n" * 64, 2**64 - 1, ALIGNMENT, 3 * ALIGNMENT)
    arena = Arena.create(
        folder,
        "a",
        ALIGNMENT,
        node_id="n" * 64,
        incarnation=2**64 - 1,
        covers_bytes=3 * ALIGNMENT,
    )
    fd = os.open(folder / "a.arena", os.O_RDONLY)
    assert arena_file.Header.load(folder / "a.arena", fd) == header
    os.close(fd)
    arena.close()


def test_numpy_views_of_a_slot_are_the_slot(folder):
    arena = make(folder)
    block = np.frombuffer(arena.view(4096, 4096), np.uint8)
    block[:] = 7
    assert int(arena.tensor.sum()) == 7 * 4096
    arena.close()
