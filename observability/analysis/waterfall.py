"""`millrace trace <request id, trace id or last>`: one trace in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from observability.analysis.decode import StoredSpan
from observability.analysis.terminal import console_width, run, takes_a_request
from observability.analysis.tree import build_tree, delays_of, request_span, ttft_of, walk
from observability.emit import genai, names, rollouts

_SERVICE_STYLE: Mapping[str, str] = {
    names.ENVOY: "magenta",
    names.GATEWAY: "cyan",
    names.TOKENIZER: "green",
    names.ENGINE: "yellow",
    rollouts.ROLLOUT: "cyan",
}
# Shown beside a span, with short labels; the store has the rest.
_SHOWN: Mapping[str, str] = {
    names.HTTP_STATUS: "status",
    names.OUTCOME: "outcome",
    names.TENANT: "tenant",
    names.TIER: "tier",
    genai.REQUEST_MODEL: "model",
    names.ENGINE_ID: "engine",
    names.ROUTE_REASON: "route",
    genai.INPUT_TOKENS: "prompt",
    names.PROMPT_TOKENS: "prompt",
    names.CACHED_TOKENS: "cached",
    names.CHUNK_TOKENS: "tokens",
    genai.OUTPUT_TOKENS: "output",
    names.OUTPUT_TOKENS: "output",
    names.NUM_STEPS: "steps",
    names.NUM_PREEMPTIONS: "preemptions",
    names.GRAMMAR_CACHE: "grammar",
    names.DELAYED_BY: "delayed by",
    rollouts.ACTION: "decision",
    rollouts.SHARE_AFTER: "share",
    rollouts.VERDICT: "verdict",
    rollouts.REASON: "because",
}
# Attributes that say the same on every span are shown on this one only.
_ONCE: Mapping[str, str] = {names.TENANT: names.GATEWAY_REQUEST, names.TIER: names.GATEWAY_REQUEST}

# Below this width there is no space for a bar that says anything.
_MIN_BAR = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def render(spans: Sequence[StoredSpan], width: int) -> RenderableType:
    """The waterfall for `width` columns, then the sum of the time to the first token and what delayed it."""
    start_ns = min(span.start_ns for span in spans)
    total_ns = max(1, max(span.end_ns for span in spans) - start_ns)
    rows = list(walk(build_tree(spans)))
    label_width = min(max(2 * depth + len(_label(span)) for depth, span in rows), max(12, width // 3))
    detail_width = 0 if width < 100 else width // 3
    # Two time columns, and the gaps between columns.
    bar_width = width - label_width - detail_width - 2 * 10 - 8
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold", width=width)
    table.add_column("span", width=label_width, no_wrap=True, overflow="ellipsis")
    table.add_column("start ms", justify="right", width=10, no_wrap=True)
    table.add_column("ms", justify="right", width=10, no_wrap=True)
    if bar_width >= _MIN_BAR:
        table.add_column("", width=bar_width, no_wrap=True)
    if detail_width:
        table.add_column("", width=detail_width, no_wrap=True, overflow="ellipsis", style="dim")
    for depth, span in rows:
        style = "bold red" if span.error else _SERVICE_STYLE.get(span.service, "")
        cells: list[RenderableType] = [
            Text(" " * (2 * depth) + _label(span), style=style),
            f"{(span.start_ns - start_ns) / 1e6:.2f}",
            f"{span.duration_ms:.2f}",
        ]
        if bar_width >= _MIN_BAR:
            bar = _bar((span.start_ns - start_ns) / total_ns, (span.end_ns - start_ns) / total_ns, bar_width)
            cells.append(Text(bar, style=style))
        if detail_width:
            cells.append(Text(_details(span)))
        table.add_row(*cells)
    return Group(_heading(spans, total_ns), table, *_ttft_lines(spans))


def _heading(spans: Sequence[StoredSpan], total_ns: int) -> RenderableType:
    whose, name = "request", next((span.request_id for span in spans if span.request_id), "unknown")
    if _is_rollout(spans):
        whose, name = "rollout", str(spans[0].attributes.get(rollouts.ALIAS, "unknown"))
    failed = next((span.error for span in spans if span.error), "")
    services = len({span.service for span in spans})
    line = Text.assemble(
        (f"{whose} ", "bold"),
        name,
        ("  trace ", "bold"),
        spans[0].trace_id,
        f"  {total_ns / 1e6:.2f} ms, {len(spans)} spans, {services} services",
    )
    if failed:
        line.append(f"\nfailed: {failed}", style="bold red")
    return line


def _is_rollout(spans: Sequence[StoredSpan]) -> bool:
    """A rollout's trace has its decisions alone, and no request."""
    return any(span.name == rollouts.DECISION for span in spans)


def _label(span: StoredSpan) -> str:
    return span.name if span.name.startswith(f"{span.service}.") else f"{span.service} {span.name}"


def _bar(start: float, end: float, width: int) -> str:
    """A bar over [start, end] of `width` columns, exact to an eighth of a column at its end."""
    first = min(int(start * width), width - 1)
    eighths = max(1, round((end - first / width) * width * 8))
    full, rest = divmod(min(eighths, (width - first) * 8), 8)
    return " " * first + "█" * full + (_EIGHTHS[rest] if rest else "")


def _details(span: StoredSpan) -> str:
    parts = [span.error] if span.error else []
    for key, label in _SHOWN.items():
        value = span.attributes.get(key)
        if value is None or value in ("", []) or _ONCE.get(key, span.name) != span.name:
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{label} {text}")
    return " · ".join(parts)


def _ttft_lines(spans: Sequence[StoredSpan]) -> list[RenderableType]:
    ttft = ttft_of(spans)
    if _is_rollout(spans):
        return []
    if ttft is None:
        why = "no token was produced" if request_span(spans) else "the gateway's span is not (yet) here"
        return [Text(f"\nTTFT: {why}", style="dim")]
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(justify="right")
    table.add_column()
    for part, milliseconds in ttft.parts_ms.items():
        share = milliseconds / ttft.total_ms if ttft.total_ms else 0.0
        table.add_row(f"{milliseconds:.2f} ms", f"{share:.0%}", f"{part}  [dim]{escape(part.meaning)}[/dim]")
    if abs(ttft.unexplained_ms) > 0.01:
        table.add_row(f"{ttft.unexplained_ms:.2f} ms", "", "not explained by the parts")
    table.add_row(f"[bold]{ttft.total_ms:.2f} ms[/bold]", "", "[bold]time to the first token[/bold]")
    lines: list[RenderableType] = [Text("\nTTFT is the sum of", style="bold"), table]
    delays = delays_of(spans)
    if delays:
        lines.append(Text("\ndelayed by", style="bold"))
        lines += [
            Text(f"  {milliseconds:.1f} ms  {cause}: {cause.meaning}")
            for cause, milliseconds in delays.items()
        ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 with one clear line when there is nothing to show."""
    parser = argparse.ArgumentParser(prog="millrace trace", description=__doc__)
    takes_a_request(parser)
    return run(parser, lambda reader, parsed: render(reader.find(parsed.what), console_width()), arguments)


if __name__ == "__main__":
    sys.exit(main())
