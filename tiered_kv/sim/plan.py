"""Which tiers a node needs: simulate each configuration, price it, compare it with the targets."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tiered_kv.bench.report import Result
from tiered_kv.errors import BadInput
from tiered_kv.sim.description import Workload
from tiered_kv.sim.gpu import Rates
from tiered_kv.sim.machine import Setup
from tiered_kv.sim.models import ModelSpec
from tiered_kv.sim.profiles import Profile
from tiered_kv.sim.simulate import Outcome, percentile, simulate
from tiered_kv.sim.workload_sessions import Request
from tiered_kv.types import Medium

MONTHS = 36
"""Over which what is bought is paid off."""
DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
SATURATED = 0.85
"""A device that is busy for this share of the time binds, when requests wait."""
QUEUE = 0.01
"""Requests wait, when on average this share of the sessions does."""

Progress = Callable[[str, int, int], None]
Requests = Callable[[], Iterable[Request]]
"""Opens a trace anew for each configuration."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a node has beside its GPUs, and how many such nodes share the sessions."""

    name: str
    tiers: tuple[Medium, ...] = ()
    shelves: tuple[str, ...] = ()
    admission: bool = True
    nodes: int = 1


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

    def missed(self, row: "Row") -> list[str]:
        """The targets that a row does not reach. A percentile of nothing is not reached."""
        missed = ["no OOM"] if row.ooms else []
        if self.sessions is not None and row.held < self.sessions:
            missed.append("sessions")
        if self.wake_s is not None and row.wake_p99_s > self.wake_s:
            missed.append("wake")
        if self.ttft_s is not None and not row.ttft_p99_s <= self.ttft_s:
            missed.append("TTFT")
        return missed


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: all nodes together, times as one of them sees them."""

    configuration: Configuration
    outcome: Outcome
    held: int
    ooms: int
    tokens_per_s: float
    wake_p50_s: float
    wake_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    nvme_written_per_day: float
    drive_years: float
    usd_per_month: float
    binds: str
    missed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The configuration, and of how many nodes."""
        nodes = self.configuration.nodes
        return self.configuration.name + (f" x {nodes}" if nodes > 1 else "")

    @property
    def usd_per_session(self) -> float:
        """Dollars a month for each session that is held."""
        return self.usd_per_month / self.held if self.held else math.inf


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
    window_s: float | None = None, choose: bool = True, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """A row a configuration. Sessions are dealt out to the nodes evenly and stay where they are.

    Raises `BadInput` where the model does not fit the profile or the workload its HBM.
    """
    if not nodes or any(type(n) is not int or n < 1 for n in nodes):
        raise BadInput(f"nodes = {list(nodes)} must be positive whole numbers")
    wanted = [
        replace(configuration, nodes=n)
        for n in nodes for configuration in configurations if reaches(profile, configuration)
    ]  # fmt: skip
    rows = []
    for done, one in enumerate(wanted):
        if progress is not None:
            progress(one.name, done, len(wanted))
        setup = Setup(
            profile, model, block_tokens, one.tiers, one.shelves, admission=one.admission
        )  # fmt: skip
        share: Workload | Iterable[Request]
        if isinstance(work, Workload):
            share = replace(work, sessions=-(-work.sessions // one.nodes))
            warm = warm_up_s(profile, model, share) if warm_s is None else warm_s
        else:
            if one.nodes > 1:
                raise BadInput(f"nodes = {one.nodes}: a trace is replayed on one node")
            share, warm = work(), warm_s or 0.0
        window = max(600.0, warm / 3) if window_s is None else window_s
        outcome = simulate(setup, share, seed=seed, warm_s=warm, window_s=window, choose=choose)
        row = _row(one, outcome, profile)
        rows.append(replace(row, missed=tuple(targets.missed(row))))
    return rows


def reaches(profile: Profile, configuration: Configuration) -> bool:
    """Whether a profile has all media of a configuration."""
    media = (*configuration.tiers, *configuration.shelves)
    return all(getattr(profile, medium) is not None for medium in media)


def cheapest(rows: Iterable[Row]) -> Row | None:
    """Of the rows that meet all targets the one that costs least; None if there is none."""
    return min((r for r in rows if not r.missed), key=lambda r: r.usd_per_month, default=None)


def _row(one: Configuration, outcome: Outcome, profile: Profile) -> Row:
    written = outcome.written_bytes_per_s.get("nvme", 0.0)
    endurance = profile.nvme.endurance_bytes if profile.nvme else 0.0
    held = min(outcome.held * one.nodes, max(outcome.sessions * one.nodes, outcome.held))
    return Row(
        configuration=one,
        outcome=outcome,
        held=held,
        ooms=outcome.ooms * one.nodes,
        tokens_per_s=outcome.tokens_per_s * one.nodes,
        wake_p50_s=_or_zero(percentile(outcome.wake_s, 0.50)),
        wake_p99_s=_or_zero(percentile(outcome.wake_s, 0.99)),
        ttft_p50_s=percentile(outcome.ttft_s, 0.50),
        ttft_p99_s=percentile(outcome.ttft_s, 0.99),
        nvme_written_per_day=written * DAY_S,
        drive_years=endurance / (written * YEAR_S) if written else math.inf,
        usd_per_month=one.nodes * node_usd_per_month(profile, one, outcome),
        binds=binds(one, outcome),
    )


def node_usd_per_month(profile: Profile, one: Configuration, outcome: Outcome) -> float:
    """GPUs, what was bought over `MONTHS`, and what is rented by the byte that is used."""
    gpu = profile.gpu
    total = gpu.count * gpu.usd_per_month + profile.hbm_bytes / 1e9 * gpu.usd_per_gb / MONTHS
    for name in (*one.tiers, *one.shelves):
        part = getattr(profile, name)
        used = max((s.used_bytes.get(str(name), 0.0) for s in outcome.samples), default=0.0)
        total += part.bytes / 1e9 * part.usd_per_gb / MONTHS
        total += used / 1e9 * part.usd_per_gb_month
    return float(total)


def binds(one: Configuration, outcome: Outcome) -> str:
    """What would have to grow for more sessions or less waiting."""
    if outcome.ooms:
        return "HBM capacity: nothing may leave it"
    full = outcome.held < 0.98 * outcome.sessions
    if full and not one.shelves:
        return f"capacity of {('HBM', *one.tiers)[-1].upper()}"
    if outcome.queued_mean < max(1.0, QUEUE * outcome.sessions):
        return "nothing: the demand is met"
    busy = {name: share for name, share in outcome.busy.items() if name != "gpu"}
    name = max(busy, key=lambda n: busy[n], default="")
    if busy.get(name, 0.0) >= SATURATED:
        return f"bandwidth of {name.upper()}"
    return "GPU: prefill, decode and room in HBM"


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values; None for what is infinite or unknown."""
    found = []
    for row in rows:
        outcome = row.outcome
        values = {
            "configuration": asdict(row.configuration), "name": row.name, "held": row.held,
            "ooms": row.ooms, "tokens_per_s": row.tokens_per_s, "wake_p50_s": row.wake_p50_s,
            "wake_p99_s": row.wake_p99_s, "ttft_p50_s": row.ttft_p50_s,
            "ttft_p99_s": row.ttft_p99_s, "hit_share": outcome.hit_share,
            "held_mean": outcome.held_mean, "recomputed_tokens_per_s":
            outcome.recomputed_tokens_per_s, "nvme_written_bytes_per_day":
            row.nvme_written_per_day, "drive_years": row.drive_years,
            "usd_per_month": row.usd_per_month, "usd_per_session": row.usd_per_session,
            "busy": dict(outcome.busy), "binds": row.binds, "missed": list(row.missed),
        }  # fmt: skip
        found.append({key: _plain(value) for key, value in values.items()})
    return found


def results(rows: Sequence[Row]) -> list[Result]:
    """The rows in the form of all reports: `plan/<configuration>/<what>`."""
    found = []
    for row in rows:
        for what, value, unit in (
            ("held", float(row.held), "sessions"), ("ooms", float(row.ooms), ""),
            ("tokens", row.tokens_per_s, "1/s"), ("wake/p99", row.wake_p99_s, "s"),
            ("ttft/p99", row.ttft_p99_s, "s"), ("cost", row.usd_per_month, "$/month"),
        ):  # fmt: skip
            if math.isfinite(value):
                found.append(Result(f"plan/{row.name}/{what}", value, unit))
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_zero(value: float) -> float:
    """Where nothing had to be woken, waking takes no time."""
    return 0.0 if math.isnan(value) else value
