"""`millrace why <request id, trace id or last>`: the largest cause in words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from observability.analysis.causes import Explanation, explain, find_neighbours
from observability.analysis.decode import StoredSpan
from observability.analysis.source import SpanSource
from observability.analysis.terminal import run, takes_a_request
from observability.analysis.tree import request_span
from observability.emit import names

_MAX_NEIGHBOURS = 3


def explain_stored(reader: SpanSource, what: str) -> tuple[Explanation, list[StoredSpan]]:
    """Explains a request of the store; raises StoreError when it is not there."""
    spans = reader.find(what)
    return explain(spans, find_neighbours(reader, spans)[:_MAX_NEIGHBOURS]), spans


def render(explanation: Explanation, spans: Sequence[StoredSpan]) -> RenderableType:
    """The verdict, what was promised, and where all the time went."""
    lines: list[RenderableType] = [
        Text(f"request {explanation.request_id}", style="bold"),
        Text(explanation.verdict, style="bold yellow"),
        Text(_promise(explanation, spans), style="dim"),
    ]
    if explanation.findings:
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for finding in explanation.findings:
            share = finding.milliseconds / explanation.total_ms if explanation.total_ms else 0.0
            own = "waiting" if finding.is_wait else "own work"
            cause = Text(finding.cause or own, style="red" if finding.cause else "green")
            table.add_row(f"{finding.milliseconds:.1f} ms", f"{share:.0%}", cause, finding.text)
        lines += [Text(""), table]
    if explanation.neighbours:
        lines.append(Text("\nprompts computed on the same engine meanwhile", style="bold"))
        lines += [
            Text(f"  {each.overlap_ms:.1f} ms  {each.num_tokens} tokens  request {each.request_id}")
            for each in explanation.neighbours
        ]
    return Group(*lines)


def _promise(explanation: Explanation, spans: Sequence[StoredSpan]) -> str:
    request = request_span(spans)
    attributes = request.attributes if request else {}
    parts = [f"{explanation.total_ms:.0f} ms in all"]
    if explanation.ttft_ms is not None:
        target = attributes.get(names.TTFT_TARGET_MS)
        parts.append(
            f"first token after {explanation.ttft_ms:.0f} ms" + (f" (target {target} ms)" if target else "")
        )
    parts += [f"{label} {attributes[key]}" for key, label in _CONTEXT.items() if attributes.get(key)]
    return " · ".join(parts)


_CONTEXT = {names.TENANT: "tenant", names.TIER: "tier", names.ENGINE_ID: "engine", names.OUTCOME: "outcome"}


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 with one clear line when there is nothing to explain."""
    parser = argparse.ArgumentParser(prog="millrace why", description=__doc__)
    takes_a_request(parser)
    return run(parser, lambda reader, parsed: render(*explain_stored(reader, parsed.what)), arguments)


if __name__ == "__main__":
    sys.exit(main())
