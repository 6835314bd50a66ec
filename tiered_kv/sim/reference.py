"""The published table of the hardware that this was designed for, beside what the simulator gives.

Nothing of the table goes into the simulation but the hardware, its watermarks and its prices.
What it does not say had to be derived, and docs/reference.md says how: the KV is bf16, as the
2.68 GB of an 8K sequence are; a session grows from 8K to 32K tokens, so that it has 20K on
average, or 6.7 GB, the only size with which the watermarks give both 64 and 256 sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiered_kv.bench.report import Result, compared
from tiered_kv.sim import models, profiles
from tiered_kv.sim.description import Workload
from tiered_kv.sim.machine import Setup
from tiered_kv.sim.plan import CONFIGURATIONS, Progress, Targets, plan
from tiered_kv.sim.plan_rows import Row
from tiered_kv.sim.simulate import idle_wake_s
from tiered_kv.types import Medium

PROFILE, MODEL = "designed-for", "llama-3.1-70b"
WORKLOAD = Workload(sessions=1024, tool_share=0.7)
WAKE_TOKENS = 8192
AGREES = 0.03
"""Relative difference within which a number counts as reproduced."""


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the published table. Milliseconds; `saved` is a share of the cost."""

    name: str
    sessions: int
    ooms: int
    tokens_per_s: float
    wake_ms: float | None = None
    saved: float | None = None


TABLE = (
    Published("HBM, no admission", 64, 18, 1120),
    Published("HBM+DRAM", 256, 0, 2340, 42.0, 0.40),
    Published("HBM+DRAM+NVMe", 1024, 0, 2850, 98.0, 0.75),
)
IDLE_WAKE_MS = {Medium.DRAM: 41.8, Medium.NVME: 95.7}


def rows(
    *, sessions: int = 1024, block_tokens: int = 256, warm_s: float | None = None,
    window_s: float | None = None, seed: int = 1, names: Sequence[str] | None = None,
    jobs: int = 1, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """The configurations of the table, simulated. KV is always loaded, as in the table.

    With more sessions than the table has their pauses are longer in proportion, so that the
    node has as many requests to answer: more sessions asleep, not more work.
    """
    wanted = {row.name for row in TABLE} if names is None else set(names)
    work = replace(WORKLOAD, sessions=sessions).slower(max(1.0, sessions / WORKLOAD.sessions))
    return plan(
        profiles.load(PROFILE), models.model(MODEL), work, Targets(sessions=sessions),
        configurations=[one for one in CONFIGURATIONS if one.name in wanted], choose=False,
        block_tokens=block_tokens, warm_s=warm_s, window_s=window_s, seed=seed,
        jobs=jobs, progress=progress,
    )  # fmt: skip


def idle_wakes_ms() -> dict[Medium, float]:
    """Wake of an 8K sequence from each tier when nothing else moves."""
    setup = Setup(profiles.load(PROFILE), models.model(MODEL))
    return {medium: 1e3 * idle_wake_s(setup, WAKE_TOKENS, medium) for medium in IDLE_WAKE_MS}


def results(found: Sequence[Row]) -> list[Result]:
    """Each number beside the published one. Held sessions, OOMs with tiers and idle wakes have
    to agree; the others are shown."""
    by_name = {row.name: row for row in found}
    base = by_name.get(TABLE[0].name)
    made: list[Result] = []
    for published in TABLE:
        row = by_name.get(published.name)
        if row is None:
            continue
        name = f"reference/{row.name}"
        made.append(_near(f"{name}/sessions", row.held, "sessions", published.sessions))
        tiered = published.ooms == 0
        made.append(Result(f"{name}/ooms", row.ooms, "", "published", published.ooms,
                           holds=row.ooms == 0 if tiered else None))  # fmt: skip
        made.append(compared(f"{name}/tokens", row.tokens_per_s, "1/s", "published",
                             published.tokens_per_s))  # fmt: skip
        if published.wake_ms is not None and row.outcome.wakes:
            made.append(compared(f"{name}/wake/p50", 1e3 * row.wake_p50_s, "ms", "published",
                                 published.wake_ms))  # fmt: skip
        if published.saved is not None and base is not None:
            saved = 100 * (1 - row.usd_per_session / base.usd_per_session)
            made.append(compared(f"{name}/saved a session", saved, "%", "published",
                                 100 * published.saved))  # fmt: skip
    for medium, ms in idle_wakes_ms().items():
        made.append(_near(f"reference/8K from {medium}", ms, "ms", IDLE_WAKE_MS[medium]))
    return made


def _near(name: str, value: float, unit: str, published: float) -> Result:
    ratio = value / published
    return Result(name, value, unit, "published", published, ratio, 1.0,
                  abs(ratio - 1) <= AGREES)  # fmt: skip
