"""A trace as a tree, and what its spans say about the request: the TTFT parts and the causes of delay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from observability.analysis.decode import StoredSpan
from observability.emit import names
from observability.emit.names import Cause, TtftPart


@dataclass(frozen=True)
class SpanNode:
    """A span with its children by start time."""

    span: StoredSpan
    children: list[SpanNode] = field(default_factory=list)


def build_tree(spans: Sequence[StoredSpan]) -> list[SpanNode]:
    """Roots by start time. A span whose parent is not there (lost, or not ours) is a root."""
    nodes = {span.span_id: SpanNode(span) for span in spans}
    roots: list[SpanNode] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        parent = nodes.get(span.parent_id)
        if parent is None or span.parent_id == span.span_id:
            roots.append(nodes[span.span_id])
        else:
            parent.children.append(nodes[span.span_id])
    return roots


def walk(roots: Sequence[SpanNode], depth: int = 0) -> Iterator[tuple[int, StoredSpan]]:
    """(depth, span) of every span, parents before children."""
    for node in roots:
        yield depth, node.span
        yield from walk(node.children, depth + 1)


@dataclass(frozen=True)
class TtftBreakdown:
    """The parts of a request's time to the first token, in milliseconds."""

    total_ms: float
    parts_ms: Mapping[TtftPart, float]

    @property
    def unexplained_ms(self) -> float:
        """What the parts leave of the total; next to nothing when the services measure truly."""
        return self.total_ms - sum(self.parts_ms.values())


def ttft_of(spans: Sequence[StoredSpan]) -> TtftBreakdown | None:
    """From the gateway's request span; None when no token came, or the span is not there."""
    for span in spans:
        if span.name == names.GATEWAY_REQUEST and names.TTFT_MS in span.attributes:
            return TtftBreakdown(
                float(span.attributes[names.TTFT_MS]),
                {
                    part: float(span.attributes[key])
                    for part, key in names.TTFT_PARTS.items()
                    # Only answers that are chosen among samples have it.
                    if key in span.attributes and (part is not TtftPart.DELIBERATION or span.attributes[key])
                },
            )
    return None


def delays_of(spans: Sequence[StoredSpan]) -> dict[Cause, float]:
    """Cause to milliseconds lost, the most expensive first.

    Several spans of a request may report the same cause; the gateway repeats what the engine found, so the
    largest report counts.
    """
    found: dict[Cause, float] = {}
    for span in spans:
        for cause, key in names.DELAYED_BY_MS.items():
            if key in span.attributes:
                found[cause] = max(found.get(cause, 0.0), float(span.attributes[key]))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def request_span(spans: Sequence[StoredSpan]) -> StoredSpan | None:
    """The gateway's span of the whole request."""
    return next((span for span in spans if span.name == names.GATEWAY_REQUEST), None)
