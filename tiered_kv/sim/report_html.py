"""The plan as one HTML file: tables and inline SVG, nothing to download, no script."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from tiered_kv.sim.plan import cheapest
from tiered_kv.sim.plan_rows import Row

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 70, 34
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd}
td{text-align:right}td:first-child,td:last-child,th{text-align:left}.best{background:#e8f5e9}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}figure{margin:1.5rem 0}
"""

Point = tuple[float, float]


def page(title: str, facts: Mapping[str, str], rows: Sequence[Row],
         sources: Mapping[str, str]) -> str:  # fmt: skip
    """The whole report. `facts` are shown above the table, `sources` below everything."""
    best = cheapest(rows)
    chosen = f"Cheapest that meets the targets: <b>{escape(best.name)}</b>, " \
             f"${best.usd_per_month:,.0f} a month; what binds: {escape(best.binds)}." \
        if best else "No configuration meets the targets."  # fmt: skip
    bars = [(row.name, float(row.held)) for row in rows]
    ttft = {row.name: distribution(row.outcome.ttft_s) for row in rows if row.outcome.ttft_s}
    wake = {row.name: distribution(row.outcome.wake_s) for row in rows if row.outcome.wakes}
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>",
        _pairs(facts), f"<p>{chosen}</p>", _table(rows, best),
        _figure("Sessions held", bar_chart(bars)),
    ]  # fmt: skip
    if ttft:
        parts.append(_figure("Time to first token, seconds: share of requests that are no slower",
                             line_chart(ttft, log_x=True)))  # fmt: skip
    if wake:
        parts.append(_figure("Wake, seconds: share that is no slower",
                             line_chart(wake, log_x=True)))  # fmt: skip
    for row in rows:
        names = sorted({name for s in row.outcome.samples for name in s.used_bytes})
        series = {
            name: [(s.at_s, s.used_bytes.get(name, 0.0) / 1e9) for s in row.outcome.samples]
            for name in names
        }
        parts.append(_figure(f"GB in each tier over seconds: {row.name}", line_chart(series)))
    parts.append("<h2>Where the profile's numbers are from</h2>" + _pairs(sources) + "</html>")
    return "\n".join(parts)


def distribution(values: Sequence[float], points: int = 200) -> list[Point]:
    """The cumulative distribution in at most so many points."""
    ordered = sorted(values)
    step = max(1, len(ordered) // points)
    at = [*range(0, len(ordered), step), len(ordered) - 1]
    return [(ordered[i], (i + 1) / len(ordered)) for i in at]


def line_chart(series: Mapping[str, Sequence[Point]], log_x: bool = False) -> str:
    """An SVG of lines with a legend. Logarithmic x leaves values at or below 0 out."""
    shown = {
        name: [(math.log10(x) if log_x else x, y) for x, y in line if x > 0 or not log_x]
        for name, line in series.items()
    }
    points = [point for line in shown.values() for point in line]
    if not points:
        return "<svg viewBox='0 0 10 10'></svg>"
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    wide = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + (x - low) / wide * (WIDTH - LEFT - 10)
        return f"{across:.1f},{(HEIGHT - BOTTOM) * (1 - y / top) + 8:.1f}"

    body = [_axes(low, high, top, log_x)]
    for i, (name, line) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in _thinned(line))
        body.append(f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{path}'/>")
        y = HEIGHT + 14 + 16 * i
        body.append(f"<rect x='{LEFT}' y='{y}' width='12' height='8' fill='{colour}'/>"
                    f"<text x='{LEFT + 18}' y='{y + 8}'>{escape(name)}</text>")  # fmt: skip
    return _svg(HEIGHT + 24 + 16 * len(shown), body)


def bar_chart(bars: Sequence[tuple[str, float]]) -> str:
    """An SVG of horizontal bars with their values."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    body = []
    for i, (name, value) in enumerate(bars):
        y, size = 26 * i + 4, value / most * (WIDTH - 290)
        body.append(
            f"<text x='0' y='{y + 14}'>{escape(name)}</text><rect x='210' y='{y}' "
            f"width='{size:.1f}' height='20' fill='{COLOURS[i % len(COLOURS)]}'/>"
            f"<text x='{216 + size:.1f}' y='{y + 14}'>{value:,.0f}</text>"
        )
    return _svg(26 * len(bars) + 8, body)


def _axes(low: float, high: float, top: float, log_x: bool) -> str:
    base = HEIGHT - BOTTOM + 8
    marks = [f"<path d='M{LEFT} 8V{base}H{WIDTH - 10}' fill='none' stroke='#888'/>"]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = LEFT + share * (WIDTH - LEFT - 10), base - share * (HEIGHT - BOTTOM)
        at = low + share * (high - low)
        marks.append(f"<text x='{x:.0f}' y='{base + 16}' text-anchor='middle'>"
                     f"{10**at if log_x else at:.3g}</text>"
                     f"<text x='{LEFT - 6}' y='{y + 4:.0f}' text-anchor='end'>{share * top:.3g}"
                     "</text>")  # fmt: skip
    return "".join(marks)


def _thinned(line: Sequence[Point], points: int = 400) -> Sequence[Point]:
    return line[:: max(1, len(line) // points)]


def _svg(height: int, body: Sequence[str]) -> str:
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' "
            f"width='{WIDTH}'>{''.join(body)}</svg>")  # fmt: skip


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption><b>{escape(caption)}</b></figcaption>{svg}</figure>"


def _pairs(values: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in values.items())
    return f"<table>{cells}</table>"


def _table(rows: Sequence[Row], best: Row | None) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADINGS)
    lines = []
    for row in rows:
        mark = " class='best'" if row is best else ""
        tds = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        lines.append(f"<tr{mark}>{tds}</tr>")
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>"


HEADINGS = ("configuration", "held", "OOMs", "tokens/s", "wake p50 / p99", "TTFT p50 / p99",
            "NVMe TB/day", "drive years", "$/month", "$/session", "misses",
            "what binds")  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row for people, in the order of `HEADINGS`."""
    return [
        row.name, f"{row.held:,}", str(row.ooms), f"{row.tokens_per_s:,.0f}",
        f"{seconds(row.wake_p50_s)} / {seconds(row.wake_p99_s)}",
        f"{seconds(row.ttft_p50_s)} / {seconds(row.ttft_p99_s)}",
        f"{row.nvme_written_per_day / 1e12:,.0f}",
        f"{row.drive_years:.1f}" if math.isfinite(row.drive_years) else "-",
        f"{row.usd_per_month:,.0f}",
        f"{row.usd_per_session:,.2f}" if math.isfinite(row.usd_per_session) else "-",
        ", ".join(row.missed) or "-", row.binds,
    ]  # fmt: skip


def seconds(value: float) -> str:
    """A time for people; `-` where there was none."""
    if math.isnan(value) or value == 0:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"
