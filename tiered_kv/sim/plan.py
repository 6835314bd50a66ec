"""Which tiers a node needs: simulate each configuration, price it, compare it with the targets."""

import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial

from tiered_kv.errors import BadInput
from tiered_kv.sim.description import Workload
from tiered_kv.sim.gpu import Rates
from tiered_kv.sim.machine import Setup
from tiered_kv.sim.models import ModelSpec
from tiered_kv.sim.plan_rows import Configuration, Row, row_of
from tiered_kv.sim.profiles import Profile
from tiered_kv.sim.simulate import simulate
from tiered_kv.sim.workload_sessions import Request
from tiered_kv.types import Medium

Progress = Callable[[str, int, int], None]
Requests = Callable[[], Iterable[Request]]
"""Opens a trace anew for each configuration."""


CONFIGURATIONS = (
    Configuration("HBM, no admission", admission=False),
    Configuration("HBM"),
    Configuration("HBM+DRAM", (Medium.DRAM,)),
    Configuration("HBM+DRAM+NVMe", (Medium.DRAM, Medium.NVME)),
    Configuration("HBM+DRAM+NVMe+remote", (Medium.DRAM, Medium.NVME), ("remote",)),
    Configuration("HBM+DRAM+NVMe+remote+S3", (Medium.DRAM, Medium.NVME), ("remote", "s3")),
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a configuration must reach; None where nothing is asked. Seconds, 99th percentiles."""

    sessions: int | None = None
    wake_s: float | None = None
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("sessions", "wake_s", "ttft_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadInput(f"target {name} = {value!r} must be positive")

    def missed(self, row: Row) -> list[str]:
        """The targets that a row does not reach. A percentile of nothing is not reached."""
        missed = ["no OOM"] if row.ooms else []
        if self.sessions is not None and row.held < self.sessions:
            missed.append("sessions")
        if self.wake_s is not None and row.wake_p99_s > self.wake_s:
            missed.append("wake")
        if self.ttft_s is not None and not row.ttft_p99_s <= self.ttft_s:
            missed.append("TTFT")
        return missed


def warm_up_s(profile: Profile, model: ModelSpec, workload: Workload) -> float:
    """Time for all sessions to arrive at a pace that the GPUs follow easily: three times what
    the prefill of their first prompts takes."""
    gpu = profile.gpu
    rates = Rates(model, gpu.count * gpu.flops, gpu.count * gpu.hbm_bytes_per_s, gpu.mfu, gpu.mbu)
    mean = (workload.start_tokens + workload.end_tokens) / 2
    return max(300.0, 3 * workload.sessions * rates.prefill_s(mean))


def plan(
    profile: Profile, model: ModelSpec, work: Workload | Requests, targets: Targets, *,
    configurations: Sequence[Configuration] = CONFIGURATIONS, nodes: Sequence[int] = (1,),
    block_tokens: int = 512, seed: int = 1, warm_s: float | None = None,
    window_s: float | None = None, choose: bool = True, jobs: int = 1,
    progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """A row a configuration. Sessions are dealt out to the nodes evenly and stay where they are.

    `jobs` configurations are simulated at a time, each in a process of its own; then `work` must
    be picklable. Raises `BadInput` where the model does not fit the profile or the workload its
    HBM.
    """
    if not nodes or any(type(n) is not int or n < 1 for n in nodes):
        raise BadInput(f"nodes = {list(nodes)} must be positive whole numbers")
    if not isinstance(work, Workload) and max(nodes) > 1:
        raise BadInput(f"nodes = {max(nodes)}: a trace is replayed on one node")
    wanted = [
        replace(configuration, nodes=n)
        for n in nodes for configuration in configurations if reaches(profile, configuration)
    ]  # fmt: skip
    simulated = partial(
        _simulated, profile=profile, model=model, work=work, block_tokens=block_tokens,
        seed=seed, warm_s=warm_s, window_s=window_s, choose=choose,
    )  # fmt: skip
    rows = _all(simulated, wanted, min(jobs, len(wanted)), progress or (lambda *_: None))
    return [replace(row, missed=tuple(targets.missed(row))) for row in rows]


def _all(
    simulated: Callable[[Configuration], Row], wanted: Sequence[Configuration], jobs: int,
    progress: Progress,
) -> list[Row]:  # fmt: skip
    """In the order of `wanted`. The last ones take longest, so these are begun first."""
    if jobs <= 1:
        rows = []
        for done, one in enumerate(wanted):
            progress(one.name, done, len(wanted))
            rows.append(simulated(one))
        return rows
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(simulated, one) for one in reversed(wanted)]
        try:
            progress("configurations done", 0, len(wanted))
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                progress("configurations done", done, len(wanted))
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in reversed(running)]


def _simulated(
    one: Configuration, profile: Profile, model: ModelSpec, work: Workload | Requests,
    block_tokens: int, seed: int, warm_s: float | None, window_s: float | None, choose: bool,
) -> Row:  # fmt: skip
    setup = Setup(profile, model, block_tokens, one.tiers, one.shelves, admission=one.admission)
    share: Workload | Iterable[Request]
    if isinstance(work, Workload):
        share = replace(work, sessions=-(-work.sessions // one.nodes))
        warm = warm_up_s(profile, model, share) if warm_s is None else warm_s
    else:
        share, warm = work(), warm_s or 0.0
    window = max(600.0, warm / 3) if window_s is None else window_s
    outcome = simulate(setup, share, seed=seed, warm_s=warm, window_s=window, choose=choose)
    return row_of(one, outcome, profile)


def reaches(profile: Profile, configuration: Configuration) -> bool:
    """Whether a profile has all media of a configuration."""
    media = (*configuration.tiers, *configuration.shelves)
    return all(getattr(profile, medium) is not None for medium in media)


def cheapest(rows: Iterable[Row]) -> Row | None:
    """Of the rows that meet all targets the one that costs least; None if there is none."""
    return min((r for r in rows if not r.missed), key=lambda r: r.usd_per_month, default=None)
