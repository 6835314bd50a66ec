"""What `replay --plot` draws: hit-ratio curves, and what two tiers hold in the course of a trace.

Needs matplotlib (the extra `plot`); opens no window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered_kv.sizes import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tiered_kv.sim.replay import Replayed
    from tiered_kv.sim.two_tier import Fill

INCHES, DPI = (7.0, 4.5), 150
GB = 1e9
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


@dataclass(frozen=True, slots=True)
class Tiers:
    """The second panel: DRAM of `dram_blocks` above NVMe of `nvme_blocks`, and what they held."""

    policy: str
    dram_blocks: int
    nvme_blocks: int
    block_bytes: Size
    fills: Sequence["Fill"]


def draw(to: str, title: str, found: Sequence["Replayed"], tiers: Tiers | None) -> None:
    """Write the figure; the name's suffix says how (.png, .svg, .pdf). Raises `OSError`, and
    `ValueError` for a suffix that matplotlib does not know."""
    from matplotlib.figure import Figure

    panels = 1 if tiers is None else 2
    figure = Figure(figsize=(INCHES[0], INCHES[1] * panels), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _curves(axes[0], found)
    if tiers is not None:
        _held(axes[1], tiers)
    figure.savefig(to, dpi=DPI)


def _curves(axes: "Axes", found: Sequence["Replayed"]) -> None:
    for policy in dict.fromkeys(one.policy for one in found):
        points = sorted((one.blocks, one.hit_percent) for one in found if one.policy == policy)
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    sizes = sorted({one.blocks for one in found})
    axes.set(xscale="log", xlabel="blocks", ylabel="block hits, %")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _held(axes: "Axes", tiers: Tiers) -> None:
    last_s = tiers.fills[-1].at_s
    unit, unit_s = next((u, s) for u, s in UNITS if last_s >= 3 * s or s == 1.0)
    times = [fill.at_s / unit_s for fill in tiers.fills]
    for name, blocks, most in (
        ("DRAM", [fill.dram_blocks for fill in tiers.fills], tiers.dram_blocks),
        ("NVMe", [fill.nvme_blocks for fill in tiers.fills], tiers.nvme_blocks),
    ):
        held = [n * tiers.block_bytes / GB for n in blocks]
        axes.plot(times, held, label=f"{name}, {most:,} blocks")
    axes.set(
        xlabel=f"{unit} of the trace", ylabel="GB held",
        title=f"two tiers, {tiers.policy}, blocks of {tiers.block_bytes}",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
