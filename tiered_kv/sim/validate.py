"""The real node against the simulator: the same sessions, sizes and order, on this machine.

The real one is a host's node (DRAM above NVMe) with small tiers in this process. The simulated
one has the same tiers; its rates are the median of what this machine does for one session at a
time, measured here before. What is compared came after that: the same sessions in another order,
and by several threads at once, so that restores and demotions compete.
"""

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from tiered_kv.bench.report import Result, compared
from tiered_kv.client import Client
from tiered_kv.config import Config
from tiered_kv.layout import KVLayout
from tiered_kv.local import local
from tiered_kv.settings import load
from tiered_kv.sim.clock import Clock, Process
from tiered_kv.sim.machine import LEASE_S, Machine, Setup
from tiered_kv.sim.models import ModelSpec
from tiered_kv.sim.profiles import GpuPart, LinkPart, Profile, StorePart
from tiered_kv.sizes import Size
from tiered_kv.types import BlockKey, Medium, Reservation

LAYOUT = KVLayout("validate", "bfloat16", layers=16, kv_heads=8, head_dim=64, block_tokens=32)
SESSIONS, BLOCKS = 40, 16
DRAM_BLOCKS = SESSIONS * BLOCKS // 4
THREADS = 3
AGREES = 0.5
"""A machine that others use moves by as much from run to run."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What this machine does for one session at a time. Seconds and bytes a second."""

    call_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Wakes:
    """Sessions that were woken from below: how long each took, and all of them."""

    each_s: tuple[float, ...]
    nbytes: int
    all_s: float


def run(*, rounds: int = 3, progress: Progress | None = None) -> list[Result]:
    """Measure, predict, compare; median of the rounds. About 10 s, 1 GiB of disk."""
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-validate-"))
    pairs: dict[str, list[tuple[float, float]]] = {}
    try:
        with local(_budgets(folder), gpu=False) as kv:
            saving_s = _save_all(kv)
            written = (SESSIONS * BLOCKS - DRAM_BLOCKS) * LAYOUT.block_bytes
            for number in range(rounds):
                if progress is not None:
                    progress("waking sessions", number, rounds)
                machine = _calibrate(kv, written / saving_s, random.Random(number))
                for threads in (1, THREADS):
                    order = random.Random(f"{number}/{threads}").sample(range(SESSIONS), SESSIONS)
                    real = _wake_all(kv, order, threads)
                    told = _predict(machine, order, threads)
                    for name, value in _values(real, threads).items():
                        pairs.setdefault(name, []).append((value, _values(told, threads)[name]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [_compared(name, values) for name, values in pairs.items()]


def _values(wakes: Wakes, threads: int) -> dict[str, float]:
    name = f"simulator/{threads} at a time"
    return {
        f"{name}/wake": 1e3 * median(wakes.each_s),
        f"{name}/throughput": wakes.nbytes / wakes.all_s / 1e9,
    }


def _compared(name: str, pairs: Sequence[tuple[float, float]]) -> Result:
    ratio = median(predicted / real for real, predicted in pairs)
    real, predicted = (median(column) for column in zip(*pairs, strict=True))
    unit = "ms" if name.endswith("wake") else "GB/s"
    made = compared(name, predicted, unit, "measured", real, ratio=ratio)
    return replace(made, bar=1.0, holds=abs(ratio - 1) <= AGREES)


def _budgets(folder: Path) -> Config:
    base, size = load(), LAYOUT.block_bytes
    slab = Size(BLOCKS * size)
    return replace(
        base,
        dram=replace(base.dram, bytes=Size(DRAM_BLOCKS * size), slab_bytes=slab),
        nvme=replace(base.nvme, bytes=Size(2 * SESSIONS * BLOCKS * size), slab_bytes=slab,
                     devices=(), folder=str(folder)),
        service=replace(base.service, namespace="tiered_kv_validate"),
    )  # fmt: skip


def _name(number: int) -> str:
    return f"validate-{number}"


def _save_all(kv: Client) -> float:
    """Save every session so that NVMe has it; seconds for all."""
    began = time.monotonic()
    for number in range(SESSIONS):
        tokens = [number + 1] * (BLOCKS * LAYOUT.block_tokens)

        def fill(index: int, _tokens: int, slot: torch.Tensor, number: int = number) -> None:
            slot.fill_((number + index) % 251)

        kv.save(_name(number), LAYOUT, tokens, fill, durable=True)
    return time.monotonic() - began


def _wake(kv: Client, number: int) -> tuple[float, int]:
    """Seconds, and how many blocks came from NVMe."""
    began = time.monotonic()
    woken = kv.wake(_name(number), LAYOUT, lambda _blocks, n: n)
    return time.monotonic() - began, sum(medium is Medium.NVME for medium in woken.found)


def _calibrate(kv: Client, write_bytes_per_s: float, rng: random.Random) -> Measured:
    """A call that moves nothing, and restores one after the other."""
    found = [_wake(kv, n) for n in rng.sample(range(SESSIONS), SESSIONS)]
    again = [_wake(kv, 0)[0] for _ in range(8)][1:]
    call_s = median(again)
    rates = [n * LAYOUT.block_bytes / max(1e-6, s - call_s) for s, n in found if n == BLOCKS]
    return Measured(call_s, median(rates), write_bytes_per_s)


def _wake_all(kv: Client, order: Sequence[int], threads: int) -> Wakes:
    queue, each, blocks = list(order), list[float](), list[int]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not queue:
                    return
                number = queue.pop(0)
            seconds, n = _wake(kv, number)
            with lock:
                blocks.append(n)
                if n == BLOCKS:
                    each.append(seconds)

    began = time.monotonic()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return Wakes(tuple(each), sum(blocks) * LAYOUT.block_bytes, time.monotonic() - began)


def setup_of(measured: Measured) -> Setup:
    """The node above as the simulator sees it: its pool in the place of HBM."""
    size, config = LAYOUT.block_bytes, load()
    gpu = GpuPart(1, DRAM_BLOCKS * size, 1e12, 1e12, 1.0, 1.0, config.dram.high, config.dram.low,
                  0.0, 0.0, 0.0)  # fmt: skip
    nvme = StorePart(2 * SESSIONS * BLOCKS * size, measured.read_bytes_per_s,
                     measured.write_bytes_per_s, measured.call_s, config.nvme.high,
                     config.nvme.low, 0.0, 0.0, 0.0)  # fmt: skip
    link = LinkPart(1, 1e15, 0.0)
    profile = Profile("this machine", "measured", gpu, link, nvme, nvme, None, None, {})
    model = ModelSpec("validate", 1.0, 1.0, 16, 1, size // LAYOUT.block_tokens, 0.0)
    return Setup(profile, model, LAYOUT.block_tokens, (Medium.NVME,))


def _predict(measured: Measured, order: Sequence[int], threads: int) -> Wakes:
    clock = Clock()
    machine = Machine(clock, setup_of(measured))
    runs = {n: [BlockKey(n.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(BLOCKS)]
            for n in range(SESSIONS)}  # fmt: skip
    each: list[float] = []
    moved = [0]

    def save() -> Process:
        for run in runs.values():
            reserved: list[Reservation] = []
            yield from machine.store(run, reserved)
            machine.hierarchy.commit(reserved[0].id)
            machine.hierarchy.persist(run)
            machine.kick()
            yield 1.0

    def wake(queue: list[int]) -> Process:
        while queue:
            run = runs[queue.pop(0)]
            began, below = clock.now, machine.where(run).count(Medium.NVME)
            yield from machine.wake(run)
            lease = machine.hierarchy.lease(run, LEASE_S, clock.now)
            machine.hierarchy.release(lease.id)
            machine.kick()
            if not below:
                yield measured.call_s
            moved[0] += below
            if below == BLOCKS:
                each.append(clock.now - began)

    clock.spawn(save())
    clock.run()
    clock.spawn(wake(list(runs)))  # as the real one was left by its calibration
    clock.run()
    each.clear()
    moved[0] = 0
    began, queue = clock.now, list(order)
    for _ in range(threads):
        clock.spawn(wake(queue))
    clock.run()
    return Wakes(tuple(each), moved[0] * LAYOUT.block_bytes, clock.now - began)
