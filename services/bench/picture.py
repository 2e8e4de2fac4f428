"""A sweep as one SVG that loads nothing: latency over throughput, with the targets as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from services.bench.sweep import SweepPoint
from services.bench.sweep_report import Sweep

_KEPT, _MISSED, _LINE, _TEXT = "#1b6e3a", "#b3261e", "#8a8a8a", "#1a1a1a"
# In pixels: one panel's plot, and the room around it.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 660, 240, 72, 46, 52
_PANEL = _TOP + _HEIGHT + _BELOW
_MIDDLE, _END = 'text-anchor="middle"', 'text-anchor="end"'


def to_svg(sweep: Sweep) -> str:
    """The picture. What servers and users named is text in it, never markup."""
    panels = [
        ("TTFT p99, ms", [point.ttft_p99_ms for point in sweep.points], sweep.wanted.ttft_p99_ms),
        ("gap between pieces p99, ms", [point.gap_p99_ms for point in sweep.points], sweep.wanted.gap_p99_ms),
    ]
    shown = [panel for panel in panels if any(value is not None for value in panel[1])]
    width, height = _LEFT + _WIDTH + 24, 64 + _PANEL * max(1, len(shown))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(sweep.found)}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(16, 26, f"{sweep.label}: {sweep.model}", 'font-size="16"'),
        _text(16, 48, sweep.found),
    ]
    for index, (title, values, wanted) in enumerate(shown):
        parts.append(f'<g transform="translate({_LEFT} {64 + _PANEL * index + _TOP})">')
        parts += _panel(title, sweep.points, values, wanted)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    title: str, points: Sequence[SweepPoint], values: Sequence[float | None], wanted: float | None
) -> Iterator[str]:
    known = [
        (point, point.summary.output_tokens_per_s, value)
        for point, value in zip(points, values, strict=True)
        if value is not None
    ]
    across = _ticks(max(x for _, x, _ in known))
    up = _ticks(max(*(y for _, _, y in known), wanted or 0.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return round(x / across[-1] * _WIDTH, 1), round(_HEIGHT - y / up[-1] * _HEIGHT, 1)

    yield _text(0, -14, title)
    for tick in up:
        y = at(0, tick)[1]
        yield f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#e3e3e3"/>'
        yield _text(-8, y + 4, f"{tick:,g}", _END)
    for tick in across:
        yield _text(at(tick, 0)[0], _HEIGHT + 18, f"{tick:,g}", _MIDDLE)
    yield _text(_WIDTH, _HEIGHT + 38, "output tokens/s", _END)
    if wanted is not None:
        y = at(0, wanted)[1]
        yield f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="{_MISSED}" stroke-dasharray="5 4"/>'
        yield _text(_WIDTH, y - 5, f"target {wanted:,g}", _END)
    line = " ".join(f"{x},{y}" for x, y in (at(x, y) for _, x, y in known))
    yield f'<polyline points="{line}" fill="none" stroke="{_LINE}"/>'
    for point, tokens, value in known:
        x, y = at(tokens, value)
        told = f"{point.rate:g} requests/s: {value:,g} ms, " + (
            ", ".join(point.missed) + " missed" if point.missed else "kept"
        )
        # Not by colour alone.
        shape = (
            f'<circle cx="{x}" cy="{y}" r="5" fill="{_KEPT}">'
            if point.is_kept
            else f'<path d="M{x - 5} {y - 5} l10 10 m0 -10 l-10 10" stroke="{_MISSED}" stroke-width="2.5">'
        )
        yield f"{shape}<title>{told}</title>{'</circle>' if point.is_kept else '</path>'}"
        yield _text(x, y - 9, f"{point.rate:.3g}/s", _MIDDLE)


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{_TEXT}" {attributes}>{escape(words)}</text>'


def _ticks(highest: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first that is not below `highest`."""
    if not highest > 0:
        return [0.0, 1.0]
    raw = highest / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * each for each in (1, 2, 2.5, 5, 10) if unit * each >= raw * (1 - 1e-9))
    return [round(step * index, 10) for index in range(math.ceil(highest / step - 1e-9) + 1)]
