import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from other_process import Child, shm_folder

from tiered_kv.arena import Arena, sweep_leftovers
from tiered_kv.errors import BadInput, DoesNotFit, StaleHandle
from tiered_kv.pool import PoolHandle
from tiered_kv.tiers import hbm
from tiered_kv.tiers.hbm import HbmPool, attach_pool
from tiered_kv.types import ALIGNMENT

MIB = 1 << 20
HAS_CUDA = torch.cuda.is_available()

ENGINE = """
import pickle, sys
from tiered_kv.tiers.hbm import attach_pool
pool = attach_pool(pickle.loads(bytes.fromhex(sys.argv[1])))
assert pool.generations.unchanged([4096], (2,))
assert pool.tensor[4096:4101].tolist() == list(b"hello"), pool.tensor[4096:4101]
pool.tensor[8192:8197] = pool.tensor[4096:4101]
if pool.tensor.is_cuda:
    import torch
    torch.cuda.synchronize()
print("copied", flush=True)
pool.close()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


def make(folder: Path, nbytes: int = MIB, device: str = "cpu") -> HbmPool:
    return HbmPool.create(folder, "p", nbytes, node_id="node", incarnation=1, device=device)


def check_that_an_engine_process_can_use(pool: HbmPool) -> None:
    pool.tensor[4096:4101] = torch.tensor(list(b"hello"), dtype=torch.uint8)
    if pool.tensor.is_cuda:
        torch.cuda.synchronize()
    pool.generations.open([4096])
    pool.generations.publish([4096])
    with Child(ENGINE, pickle.dumps(pool.handle()).hex()) as engine:
        assert engine.word() == "copied"
    assert pool.tensor[8192:8197].tolist() == list(b"hello")


def test_an_engine_process_reads_and_writes_the_stand_in(folder):
    pool = make(folder)
    check_that_an_engine_process_can_use(pool)
    pool.close()


def test_the_stand_in_says_that_it_is_one(folder):
    pool = make(folder)
    assert pool.describe().startswith("CPU stand-in for HBM (no GPU is used)")
    assert (pool.capacity_bytes, pool.device) == (MIB, "cpu")
    assert pool.tensor.numel() == MIB
    pool.close()


@pytest.mark.skipif(HAS_CUDA, reason="there is CUDA")
def test_without_cuda_auto_is_the_stand_in_and_cuda_is_refused(folder):
    pool = make(folder, device="auto")
    assert pool.device == "cpu"
    pool.close()
    with pytest.raises(BadInput, match=r"device 'cuda:0' is not one of auto, cpu$"):
        make(folder, device="cuda:0")


@pytest.mark.parametrize("device", ["", "cuda:-1", "cuda:99", "tpu", "meta"])
def test_a_device_that_is_not_here_is_refused(folder, device):
    with pytest.raises(BadInput, match=f"device '{device}' is not one of auto, cpu"):
        make(folder, device=device)
    assert list(folder.iterdir()) == []


def test_closing_is_idempotent_and_what_was_handed_out_stays_valid(folder):
    pool = make(folder)
    tensor = pool.tensor
    pool.close()
    pool.close()
    assert tensor.sum() == 0
    assert list(folder.iterdir()) == []
    with pytest.raises(StaleHandle, match="pool 'p' is closed"):
        _ = pool.tensor


def test_a_handle_of_an_arena_attaches_too(folder):
    arena = Arena.create(folder, "a", MIB, node_id="node", incarnation=1)
    view = attach_pool(arena.handle())
    arena.view(0, 1)[0] = 5
    assert view.tensor[0] == 5
    assert view.handle() == arena.handle()
    view.close()
    assert (folder / "a.arena").exists()
    arena.close()


def test_a_handle_whose_pool_has_gone_is_stale(folder):
    pool = make(folder)
    handle = pool.handle()
    pool.close()
    with pytest.raises(StaleHandle, match="arena 'p' cannot be opened"):
        attach_pool(handle)


def test_a_handle_of_another_size_is_stale(folder):
    pool = make(folder)
    handle = PoolHandle("shm", str(folder), "p", 2 * MIB)
    with pytest.raises(StaleHandle, match=f"pool 'p' has {MIB} bytes, not the {2 * MIB}"):
        attach_pool(handle)
    pool.close()


def test_a_cuda_handle_without_ipc_arguments_is_refused(folder):
    pool = make(folder)
    with pytest.raises(BadInput, match="'p' has no IPC arguments"):
        attach_pool(PoolHandle("cuda", str(folder), "p", MIB, "cuda:0"))
    pool.close()


def fake_cuda(monkeypatch, free: int, taken=None) -> None:
    """Device memory of `free` bytes, made of host memory: all but the copies and the IPC."""
    monkeypatch.setattr(hbm, "_device", lambda wanted: "cuda:0")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(hbm, "_take", taken or (lambda d, n: torch.zeros(n, dtype=torch.uint8)))


def test_a_pool_larger_than_the_free_device_memory_is_refused_with_both_numbers(
    folder, monkeypatch
):
    fake_cuda(monkeypatch, free=MIB)
    with pytest.raises(DoesNotFit, match=f"{2 * MIB} bytes, but cuda:0 has {MIB} free of"):
        make(folder, nbytes=2 * MIB, device="cuda:0")
    assert list(folder.iterdir()) == []


def test_device_memory_that_is_refused_after_all_leaves_nothing(folder, monkeypatch):
    def refused(device, nbytes):
        raise DoesNotFit("refused by cuda:0")

    fake_cuda(monkeypatch, free=80 << 30, taken=refused)
    with pytest.raises(DoesNotFit, match="refused by cuda:0"):
        make(folder, device="cuda:0")
    assert list(folder.iterdir()) == []


def test_a_device_pool_shares_generations_for_all_of_it_through_a_small_file(folder, monkeypatch):
    fake_cuda(monkeypatch, free=80 << 30)
    pool = make(folder, nbytes=64 * MIB, device="cuda:0")
    last = 64 * MIB - ALIGNMENT
    pool.generations.open([last])
    table = Arena.attach(folder, "p")
    assert table.generations.read([last]) == (1,)
    assert (folder / "p.arena").stat().st_size < 3 * MIB
    assert pool.capacity_bytes == 64 * MIB
    assert sweep_leftovers(folder) == []
    pool.close()
    assert list(folder.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA")
def test_an_engine_process_reads_and_writes_device_memory(folder):
    pool = make(folder, device="auto")
    assert pool.tensor.is_cuda
    assert pool.describe().startswith("HBM of cuda:0")
    check_that_an_engine_process_can_use(pool)
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA")
def test_more_than_the_device_has_is_refused(folder):
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(DoesNotFit, match="free of"):
        make(folder, nbytes=total // ALIGNMENT * ALIGNMENT, device="cuda")
    assert list(folder.iterdir()) == []
