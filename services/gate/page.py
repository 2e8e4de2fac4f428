"""The report as one HTML file that loads nothing: table, intervals and heat map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from services.gate.cases import GateVerdict
from services.gate.report import UNITS, told
from services.gate.run import Comparison
from services.gate.verdict import Cell, LayerResult

_COLOURS = {GateVerdict.WORSE: "#b3261e", GateVerdict.NOT_WORSE: "#1b6e3a", GateVerdict.NOT_ENOUGH: "#8a6100"}
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .4rem .6rem; text-align: left; vertical-align: top; }}
td.number {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
pre {{ white-space: pre-wrap; margin: 0; }} .note {{ color: #8a6100; }}
</style></head><body>
"""
_BAR, _CELL = 240, 56


def to_html(comparison: Comparison) -> str:
    """The whole page. What models wrote is text in it, never markup."""
    suite = comparison.suite
    parts = [_HEAD.format(title=escape(f"Gate: {suite.name}"))]
    parts.append(f'<h1 style="color:{_COLOURS[comparison.verdict]}">{comparison.verdict.capitalize()}</h1>')
    for role, side in (("Baseline", comparison.baseline), ("Candidate", comparison.candidate)):
        parts.append(f"<p>{role}: {escape(side.named)}</p>")
    parts.append(
        f"<p>Suite {escape(suite.name)} ({comparison.suite_digest}). Identical deployments are called worse "
        f"with probability {suite.false_alarm:g} at most, in all layers together and however often somebody "
        f"looks; “not worse by more than δ” is wrong of a layer with probability {suite.miss:g} at most.</p>"
    )
    parts.append(
        "<table><tr><th>layer<th>verdict<th>baseline<th>candidate<th>difference and its bounds"
        "<th>95 % bootstrap<th>p<th>McNemar p<th>questions</tr>"
    )
    parts += map(_row, comparison.layers)
    parts.append("</table>")
    for each in comparison.layers:
        if each.note:
            parts.append(f'<p class="note">{each.layer}: {escape(each.note)}</p>')
        if each.cells:
            parts.append(f"<h2>Needles found by the candidate</h2>{''.join(_heat_map(each.cells))}")
    parts += _lost(comparison.layers)
    return "\n".join([*parts, "</body></html>\n"])


def _row(each: LayerResult) -> str:
    name = each.layer if each.decides else f"{each.layer} (told only)"
    unit = UNITS.get(each.layer, "score")
    mcnemar = "" if each.mcnemar_p is None else f"{each.mcnemar_p:.2g}"
    return (
        f'<tr><td>{name}<td style="color:{_COLOURS[each.verdict]}">{escape(told(each))}'
        f'<td class="number">{each.baseline:.3f}<td class="number">{each.candidate:.3f}'
        f"<td>{_bar(each)}<br>{each.difference:+.4f} {unit}, {each.lower:+.3f} … {each.upper:+.3f}"
        f'<td class="number">{each.bootstrap_lower:+.4f} … {each.bootstrap_upper:+.4f}'
        f'<td class="number">{each.p_value:.2g}<td class="number">{mcnemar}'
        f'<td class="number">{each.num_questions}</tr>'
    )


def _bar(each: LayerResult) -> str:
    """Bounds on a line from -4 to 4 times delta, on which 0 and delta are marked."""
    span = 4 * each.delta

    def at(value: float) -> float:
        return round((max(-span, min(span, value)) + span) / (2 * span) * _BAR, 1)

    colour = _COLOURS[each.verdict]
    return (
        f'<svg width="{_BAR}" height="22" role="img" aria-label="difference {each.difference:+.4f}">'
        f'<line x1="{at(0)}" x2="{at(0)}" y1="0" y2="22" stroke="#888"/>'
        f'<line x1="{at(each.delta)}" x2="{at(each.delta)}" y1="0" y2="22" stroke="#888" '
        f'stroke-dasharray="2 2"/><line x1="{at(each.lower)}" x2="{at(each.upper)}" y1="11" y2="11" '
        f'stroke="{colour}" stroke-width="3"/>'
        f'<circle cx="{at(each.difference)}" cy="11" r="5" fill="{colour}"/></svg>'
    )


def _heat_map(cells: Sequence[Cell]) -> Iterator[str]:
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    width, height = 90 + _CELL * 2 * len(lengths), 30 + _CELL * len(depths)
    yield f'<svg width="{width}" height="{height}" font-size="13" role="img" aria-label="needles found">'
    for column, length in enumerate(lengths):
        yield f'<text x="{90 + _CELL * (2 * column + 1)}" y="18" text-anchor="middle">{length} tokens</text>'
    for row, depth in enumerate(depths):
        yield f'<text x="80" y="{30 + _CELL * (row + 0.6)}" text-anchor="end">{depth:.0%} deep</text>'
    for cell in cells:
        x, y = 90 + _CELL * 2 * lengths.index(cell.length), 30 + _CELL * depths.index(cell.depth)
        fill = f"hsl({round(120 * cell.candidate)} 60% 42%)"
        yield f'<rect x="{x}" y="{y}" width="{_CELL * 2 - 3}" height="{_CELL - 3}" fill="{fill}">'
        yield f"<title>baseline {cell.baseline:.0%}, {cell.num_cases} cases</title></rect>"
        yield f'<text x="{x + _CELL}" y="{y + _CELL * 0.6}" fill="#fff" text-anchor="middle">'
        yield f"{cell.candidate:.0%}</text>"
    yield "</svg>"


def _lost(layers: Sequence[LayerResult]) -> Iterator[str]:
    for layer in layers:
        if not layer.lost:
            continue
        yield f"<h2>{layer.layer}: what lost most</h2>"
        yield "<table><tr><th>case<th>baseline<th>candidate<th>it said</tr>"
        for each in layer.lost:
            yield (
                f'<tr><td>{escape(each.case.id)}<td class="number">{each.baseline:.3f}'
                f'<td class="number">{each.candidate:.3f}<td><pre>{escape(each.candidate_text)}</pre></tr>'
            )
        yield "</table>"
