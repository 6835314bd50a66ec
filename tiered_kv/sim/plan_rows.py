"""One configuration of a plan: what was simulated, what it costs, what binds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiered_kv.bench.report import Result
from tiered_kv.sim.profiles import Profile
from tiered_kv.sim.simulate import Outcome, percentile
from tiered_kv.types import Medium

MONTHS = 36
"""Over which what is bought is paid off."""
DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
SATURATED = 0.85
"""A device that is busy for this share of the time binds, when requests wait."""
QUEUE = 0.01
"""Requests wait, when on average this share of the sessions does."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a node has beside its GPUs, and how many such nodes share the sessions."""

    name: str
    tiers: tuple[Medium, ...] = ()
    shelves: tuple[str, ...] = ()
    admission: bool = True
    nodes: int = 1


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


def row_of(one: Configuration, outcome: Outcome, profile: Profile) -> Row:
    """What a simulation of one node came to, for all nodes of the configuration."""
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
