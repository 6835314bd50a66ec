"""Puts a node together: on a host, or in a GPU process above one."""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tiered_kv import liveness
from tiered_kv.arena import Arena, sweep_leftovers
from tiered_kv.config import Config
from tiered_kv.folder import Folder
from tiered_kv.hierarchy import TierSpec
from tiered_kv.node import Node
from tiered_kv.pages import Progress
from tiered_kv.parts import Parts
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU
from tiered_kv.slots import SlotPool, slab_bytes_for
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.hbm import HbmPool
from tiered_kv.tiers.host import HostTier
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import Medium
from tiered_kv.wire import Link


async def host(config: Config, progress: Progress | None = None) -> Node:
    """The node of a host: the DRAM arena, and NVMe below it unless `nvme.bytes` is 0.

    Blocks a thread, not the loop, while memory and files are prepared; `progress` hears bytes.
    Raises `DoesNotFit`, `FolderInUse`, `TierBroken`, `BadConfig`; nothing is left behind then.
    """
    return await _start(config, partial(host_parts, config, progress))


async def gpu(config: Config, link: Link, index: int = 0) -> Node:
    """The node of GPU `index` (or its CPU stand-in) above the host that `link` leads to."""
    return await _start(config, partial(gpu_parts, config, link, index))


async def _start(config: Config, prepare: Callable[[], Parts]) -> Node:
    """Prepare media in a thread and start a node on them. Whatever ends this, also giving up on
    it while the thread works, gives the media back."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="kv-prepare")
    prepared = thread.submit(prepare)
    thread.shutdown(wait=False)
    try:
        return Node(config, await asyncio.wrap_future(prepared))
    except BaseException:
        prepared.add_done_callback(_close)
        raise


def _close(prepared: "Future[Parts]") -> None:
    if not prepared.cancelled() and prepared.exception() is None:
        prepared.result().close()


def host_parts(config: Config, progress: Progress | None = None) -> Parts:
    """The media of a host. Blocks while memory is reserved and files are allocated."""
    sweep_leftovers(config.shm_folder)
    dram = _dram_spec(config)
    with ExitStack() as undo:
        folder = None
        node_id, incarnation = uuid.uuid4().hex, time.time_ns() // 1_000_000
        if config.nvme.bytes:
            folder = Folder.open(config.nvme_folder)
            undo.callback(folder.close)
            node_id, incarnation = folder.node_id, folder.incarnation
        arena = Arena.create(
            config.shm_folder, f"{node_id}-{incarnation}", dram.capacity_bytes,
            node_id=node_id, incarnation=incarnation, progress=progress,
        )  # fmt: skip
        undo.callback(arena.close)
        notes = [arena.pin()]
        if TailOptimisedLRU.name in (config.dram.policy, config.nvme.policy):
            notes.append(TailOptimisedLRU.price)
        specs, tiers, nvme = [dram], dict[Medium, Tier](), None
        rates: dict[Medium, float] = {}
        if folder is not None:
            spec = _nvme_spec(config)
            nvme = NvmeTier.open(
                folder, arena, capacity_bytes=spec.capacity_bytes, slab_bytes=spec.slab_bytes,
                free_floor_bytes=config.nvme.free_floor_bytes,
                paths=[Path(p) for p in config.nvme.devices],
                engine=config.nvme.engine, queue_depth=config.nvme.queue_depth, progress=progress,
            )  # fmt: skip
            undo.callback(nvme.close)
            rates[Medium.NVME] = nvme.probe().read_bytes_per_s
            notes += [nvme.describe(), f"former index: {nvme.opened}"]
            specs.append(spec)
            tiers[Medium.NVME] = nvme
        undo.pop_all()
    return Parts(
        node_id, incarnation, Medium.DRAM, arena, specs, tiers, nvme=nvme, folder=folder,
        notes=tuple(notes), rates=rates,
    )  # fmt: skip


def gpu_parts(config: Config, link: Link, index: int = 0) -> Parts:
    """The media of a GPU process. Blocks while memory is taken."""
    sweep_leftovers(config.shm_folder)
    incarnation = time.time_ns() // 1_000_000
    node_id = f"gpu{index}-{uuid.uuid4().hex[:12]}"
    slab = config.hbm.slab_bytes or slab_bytes_for(config.hbm.bytes)
    capacity = SlotPool(config.hbm.bytes, slab).capacity_bytes
    with ExitStack() as undo:
        alive = liveness.hold(config.shm_folder, node_id)
        undo.callback(alive.close)
        pool = HbmPool.create(
            config.shm_folder, f"{node_id}-{incarnation}", capacity,
            node_id=node_id, incarnation=incarnation, device=config.hbm.device,
        )  # fmt: skip
        undo.callback(pool.close)
        spec = TierSpec(
            Medium.HBM, capacity, slab, high=config.hbm.high, low=config.hbm.low,
            policy=config.hbm.policy,
        )  # fmt: skip
        tier = HostTier(link, pool, node_id, config.hbm.verify, config.service.call_timeout_s)
        undo.pop_all()
    return Parts(
        node_id, incarnation, Medium.HBM, pool, [spec], {Medium.HOST: tier}, below=link, host=tier,
        alive=alive, notes=(pool.describe(),),
    )  # fmt: skip


def _dram_spec(config: Config) -> TierSpec:
    slab = config.dram.slab_bytes or slab_bytes_for(config.dram.bytes)
    capacity = SlotPool(config.dram.bytes, slab).capacity_bytes
    return TierSpec(
        Medium.DRAM, capacity, slab, high=config.dram.high, low=config.dram.low,
        restore_floor=config.dram.restore_floor, policy=config.dram.policy,
    )  # fmt: skip


def _nvme_spec(config: Config) -> TierSpec:
    stripes = max(1, len(config.nvme.devices))
    slab = config.nvme.slab_bytes or slab_bytes_for(config.nvme.bytes, stripes)
    capacity = SlotPool(config.nvme.bytes, slab, stripes).capacity_bytes
    return TierSpec(
        Medium.NVME, capacity, slab, stripes, high=config.nvme.high, low=config.nvme.low,
        policy=config.nvme.policy, admission=config.nvme.admission,
    )  # fmt: skip
