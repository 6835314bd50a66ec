"""`tiered-kv bench churn`: random sessions through a full hierarchy, looking for leaks.

Sessions of three times all tiers together are saved, extended, forked, woken, abandoned halfway
and forgotten, by several threads. Every byte that comes back is compared. Memory, descriptors,
slots, reservations and leases of every process are sampled, and must be flat.
"""

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tiered_kv.bench.report import Result
from tiered_kv.client import Client
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError, UnknownSession
from tiered_kv.layout import KVLayout
from tiered_kv.settings import load
from tiered_kv.sizes import Size

LAYOUT = KVLayout("churn", "bfloat16", layers=8, kv_heads=2, head_dim=64, block_tokens=64)
HBM_BLOCKS, DRAM_BLOCKS, NVME_BLOCKS = 128, 256, 1024
OVERLOAD = 3
LONGEST_BLOCKS = 24
THREADS = 2
GROWTH_BAR = 1.05
"""Private memory of the last third of the run against the second sixth: flat within noise."""

Progress = Callable[[str, int, int], None]


class Abandoned(Exception):
    """What a writer that gives up halfway raises."""


@dataclass
class Load:
    """The sessions that exist, and what was seen. Shared by all threads."""

    seed: int
    lengths: dict[str, int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: int = 0

    def name(self) -> str:
        """A session name that was not used yet."""
        with self.lock:
            self.numbers += 1
            return f"churn-{self.numbers}"


def budgets(folder: Path) -> Config:
    """Small tiers, so that a minute turns all of them over many times."""
    base, size = load(), LAYOUT.block_bytes
    slab = Size(16 * size)
    return replace(
        base,
        hbm=replace(base.hbm, bytes=Size(HBM_BLOCKS * size), slab_bytes=slab),
        dram=replace(base.dram, bytes=Size(DRAM_BLOCKS * size), slab_bytes=slab),
        nvme=replace(base.nvme, bytes=Size(NVME_BLOCKS * size), slab_bytes=slab, devices=(),
                     folder=str(folder)),
        service=replace(base.service, namespace="tiered_kv_churn"),
    )  # fmt: skip


def run(
    *, minutes: float, connect: Callable[[Config], Client], progress: Progress | None = None,
    seed: int = 1,
) -> list[Result]:  # fmt: skip
    """Churn for so long, then let everything come to rest and count what is left over."""
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-churn-"))
    try:
        with connect(budgets(folder)) as kv:
            work = Load(seed)
            samples = _churn(kv, work, minutes * 60, progress)
            return _results(work, samples, _rest(kv), minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _churn(
    kv: Client, work: Load, seconds: float, progress: Progress | None
) -> list[list[dict[str, Any]]]:
    stop = threading.Event()
    threads = [
        threading.Thread(target=_worker, args=(kv, work, stop, work.seed * 100 + i))
        for i in range(THREADS)
    ]
    began = time.monotonic()
    samples: list[list[dict[str, Any]]] = []
    for thread in threads:
        thread.start()
    try:
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(2.0, seconds / 60))
            samples.append(kv.nodes())
            if progress is not None:
                progress(f"{sum(work.events.values())} operations", int(passed), int(seconds))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return samples


def _worker(kv: Client, work: Load, stop: threading.Event, seed: int) -> None:
    rng = random.Random(seed)
    most = OVERLOAD * (HBM_BLOCKS + DRAM_BLOCKS + NVME_BLOCKS)
    while not stop.is_set():
        with work.lock:
            names = list(work.lengths)
            blocks = sum(work.lengths.values()) // LAYOUT.block_tokens
        roll = rng.random()
        try:
            if not names or (blocks < most and roll < 0.3):
                _save(kv, work, work.name(), rng.randint(1, LONGEST_BLOCKS * 64), rng)
            elif roll < 0.45:
                _extend(kv, work, rng.choice(names), rng)
            elif roll < 0.9:
                _wake(kv, work, rng.choice(names[-60:] if rng.random() < 0.7 else names))
            elif roll < 0.93:
                _fork(kv, work, rng.choice(names))
            else:
                _forget(kv, work, rng.choice(names))
        except UnknownSession:
            work.events["forgotten meanwhile"] += 1
        except TieredKVError as error:
            work.events[f"error: {type(error).__name__}"] += 1


def _tokens(name: str, n: int) -> list[int]:
    """Sessions of one family share their first block; a fork has its origin's tokens."""
    family = int(name.split("-")[1])
    head = [family % 7] * LAYOUT.block_tokens
    return (head + [family * 31 + i for i in range(n)])[:n]


def _save(kv: Client, work: Load, name: str, n: int, rng: random.Random) -> None:
    tokens = _tokens(name, n)
    give_up = rng.random() < 0.05

    def fill(index: int, _tokens: int, slot: torch.Tensor) -> None:
        if give_up and index:
            raise Abandoned
        slot.view(torch.int64).fill_(_mark(tokens, index))

    try:
        saved = kv.save(name, LAYOUT, tokens, fill, durable=rng.random() < 0.05)
    except Abandoned:
        work.events["abandoned"] += 1
        return
    work.events["save refused" if saved.why else "saved"] += 1
    if not saved.why:
        with work.lock:
            work.lengths[name] = n


def _extend(kv: Client, work: Load, name: str, rng: random.Random) -> None:
    n = work.lengths.get(name, 0)
    if n and n < LONGEST_BLOCKS * LAYOUT.block_tokens:
        _save(kv, work, name, n + rng.randint(1, 200), rng)


def _wake(kv: Client, work: Load, name: str) -> None:
    def copy(blocks: list[torch.Tensor], _n: int) -> list[torch.Tensor]:
        return [block.clone() for block in blocks]

    woken = kv.wake(name, LAYOUT, copy)
    tokens = woken.tokens.tolist()
    for index, block in enumerate(woken.value or ()):
        if not bool((block.view(torch.int64) == _mark(tokens, index)).all()):
            work.events["wrong bytes"] += 1
    work.events["woken whole" if not woken.missed else f"woken in part: {woken.why}"] += 1


def _fork(kv: Client, work: Load, name: str) -> None:
    new = f"{name}-{work.name()}"
    kv.fork(name, new)
    with work.lock:
        work.lengths[new] = work.lengths.get(name, 1)
    work.events["forked"] += 1


def _forget(kv: Client, work: Load, name: str) -> None:
    with work.lock:
        work.lengths.pop(name, None)
    kv.forget(name)
    work.events["forgotten"] += 1


def _mark(tokens: Sequence[int], index: int) -> int:
    """A number that stands for all tokens up to the end of a block."""
    end = min((index + 1) * LAYOUT.block_tokens, len(tokens))
    return hash(tuple(tokens[:end])) & 0x7FFF_FFFF_FFFF_FFFF


def _rest(kv: Client) -> list[dict[str, Any]]:
    """The status of every node once nothing moves any more."""
    for _ in range(200):
        nodes = kv.nodes()
        if not any(any(node["pending"].values()) for node in nodes):
            return nodes
        time.sleep(0.2)
    return nodes


def _results(
    work: Load, samples: list[list[dict[str, Any]]], rest: list[dict[str, Any]], minutes: float
) -> list[Result]:
    wrong = work.events["wrong bytes"]
    results = [
        Result("churn/operations", sum(work.events.values()) / minutes, "1/min"),
        Result("churn/wrong-bytes", wrong, "blocks", bar=0, holds=wrong == 0),
        *(Result(f"churn/event/{event}", n, "") for event, n in sorted(work.events.items())),
    ]
    for node in rest:
        name = str(node["tiers"][0]["medium"])
        mine = [n for nodes in samples for n in nodes if n["node_id"] == node["node_id"]]
        results += _flat(f"churn/{name}", mine)
        left = sum(node["pending"].values())
        results.append(Result(f"churn/{name}/pending-at-rest", left, "", bar=0, holds=left == 0))
        for tier in node["tiers"]:
            leaked = tier["leaked_slots"]
            results.append(
                Result(f"churn/{name}/leaked-slots/{tier['medium']}", leaked, "slots", bar=0,
                       holds=leaked == 0)
            )  # fmt: skip
    return results


def _flat(name: str, samples: list[dict[str, Any]]) -> list[Result]:
    out: list[Result] = []
    n = len(samples)
    for what, unit in (("private_bytes", "bytes"), ("fds", ""), ("threads", "")):
        values = [float(sample["process"][what]) for sample in samples]
        early, late = median(values[n // 6 : n // 3]), median(values[n * 2 // 3 :])
        ratio = late / early if early else 1.0
        out.append(
            Result(f"{name}/{what}", late, unit, "earlier in the run", early, ratio, GROWTH_BAR,
                   ratio <= GROWTH_BAR)
        )  # fmt: skip
    return out
