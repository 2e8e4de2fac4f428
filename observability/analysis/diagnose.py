"""`millrace diagnose`: which slice of an hour explains its slow requests, what held the slowest of them back,
and whom limits refused.

The tail is the slowest share of all requests. A slice (one value of one dimension) explains the tail when it
is a much larger part of the tail than of all requests, by more than chance; slices are ranked by that excess.
What happened to a request stands in all services' spans, so the slowest are explained by their whole traces.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from observability.analysis.causes import REFUSED_BY_LIMITS, explain
from observability.analysis.decode import StoredSpan
from observability.analysis.source import SpanSource, StoreError
from observability.analysis.terminal import run, table
from observability.emit import genai, names
from observability.emit.names import Attribute, Cause, length_bucket

METRICS: Mapping[str, Attribute] = {"ttft": names.TTFT_MS, "tpot": names.TPOT_MS, "e2e": names.E2E_MS}

# Fewer requests say nothing about a tail.
MIN_REQUESTS = 20
# A slice must have this many requests in the tail to be named.
_MIN_IN_TAIL = 3
_MIN_EXCESS = 0.15
# Standard deviations of a binomial draw. Many slices are looked at, so a rare accident must not be named.
_MIN_DEVIATIONS = 3.0
# Most answers are shorter than the first bound of the labels, and an answer's length is most of its time.
_SHORT_BOUNDS = (8, 32)
# Each of them is looked up by itself.
_MAX_EXPLAINED = 10
# Tenants and reasons that are named with their refusals.
_MAX_REFUSALS = 3
# Spans in which a refusal by limits may be: the edge refuses before the gateway's request begins.
_MAY_REFUSE = (names.GATEWAY_REQUEST, names.GATEWAY_RATE_LIMIT)

Value = Callable[[StoredSpan], str]


def _text(key: str, missing: str = "none") -> Value:
    return lambda span: str(span.attributes.get(key, "") or missing)


def _bucket(key: str) -> Value:
    """Buckets of the metrics' labels, and finer ones below: here they cost no time series."""
    return lambda span: _length(int(span.attributes.get(key, 0)))


def _length(num_tokens: int) -> str:
    finer = next((bound for bound in _SHORT_BOUNDS if num_tokens <= bound), None)
    return f"<={finer}" if finer is not None else length_bucket(num_tokens)


def _cause(span: StoredSpan) -> str:
    causes = span.attributes.get(names.DELAYED_BY) or ()
    first = causes.split(",")[0] if isinstance(causes, str) else next(iter(causes), "")
    return first or "nothing"


DIMENSIONS: Mapping[str, Value] = {
    "tenant": _text(names.TENANT),
    "tier": _text(names.TIER),
    "model": _text(genai.REQUEST_MODEL),
    "revision": _text(names.REVISION),
    "face": _text(names.FACE),
    "streaming": _text(names.STREAMING),
    "engine": _text(names.ENGINE_ID),
    "pool": _text(names.POOL),
    "adapter": _text(names.ADAPTER),
    "prompt length": _bucket(genai.INPUT_TOKENS),
    "output length": _bucket(genai.OUTPUT_TOKENS),
    "prefix cache": lambda span: "hit" if span.attributes.get(names.CACHED_TOKENS) else "miss",
    "guided": _text(names.GUIDED),
    "speculative": _text(names.SPECULATIVE),
    "delayed by": _cause,
    "outcome": _text(names.OUTCOME),
}


@dataclass(frozen=True)
class Slice:
    """One value of one dimension, and how it relates to the tail. Shares are 0 to 1."""

    dimension: str
    value: str
    num_requests: int
    share_of_all: float
    share_of_tail: float
    p95_ms: float
    # The same of the requests outside the slice.
    p95_elsewhere_ms: float

    @property
    def excess(self) -> float:
        """How much more of the tail than of everything it is."""
        return self.share_of_tail - self.share_of_all


@dataclass(frozen=True)
class Diagnosis:
    """What explains the tail; `slices` may be empty when nothing stands out."""

    metric: str
    num_requests: int
    p50_ms: float
    p95_ms: float
    slices: Sequence[Slice]
    # Traces of the tail, the slowest first.
    slowest: Sequence[str]

    @property
    def verdict(self) -> str:
        """The one sentence."""
        if not self.slices:
            return "no slice stands out: the slow requests are spread like all others"
        first = self.slices[0]
        return (
            f"{first.dimension} {first.value}: {first.share_of_all:.0%} of all requests, but "
            f"{first.share_of_tail:.0%} of the slowest; p95 {first.p95_ms:.0f} ms against "
            f"{first.p95_elsewhere_ms:.0f} ms elsewhere"
        )


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def diagnose(spans: Sequence[StoredSpan], metric: str = "ttft", tail_share: float = 0.05) -> Diagnosis:
    """Slices the requests (gateway.request spans) that have the metric; raises StoreError for too few."""
    key = METRICS[metric]
    requests = [(span, float(span.attributes[key])) for span in spans if key in span.attributes]
    if len(requests) < MIN_REQUESTS:
        raise StoreError(
            f"{len(requests)} requests with a {metric} in this time; "
            f"{MIN_REQUESTS} are needed to speak of a tail"
        )
    requests.sort(key=lambda item: -item[1])
    num_tail = max(_MIN_IN_TAIL, round(len(requests) * tail_share))
    slices = [
        found
        for dimension, value_of in DIMENSIONS.items()
        for found in _slices(dimension, value_of, requests, num_tail)
        if found.excess >= _MIN_EXCESS
    ]
    slices.sort(key=lambda found: -found.excess)
    values = [value for _, value in requests]
    slowest = [span.trace_id for span, _ in requests[:num_tail]]
    p50_ms, p95_ms = percentile(values, 0.5), percentile(values, 0.95)
    return Diagnosis(metric, len(requests), p50_ms, p95_ms, slices, slowest)


def what_held_back(reader: SpanSource, diagnosis: Diagnosis) -> str:
    """In one sentence, what delayed most of the slowest requests, by their whole traces."""
    chosen = diagnosis.slowest[:_MAX_EXPLAINED]
    causes = Counter(explain(spans).cause for spans in map(reader.trace, chosen) if spans)
    if not causes:
        return ""
    cause, count = causes.most_common(1)[0]
    verdict = (
        f"held back by {cause}: {cause.meaning}" if cause else "held back by nothing: it was their own work"
    )
    return f"{count} of the {causes.total()} slowest were {verdict}"


def refusals(spans: Iterable[StoredSpan]) -> str:
    """In one sentence, whom limits refused: no latency tells of them. "" for nobody."""
    refused = Counter(
        (str(span.attributes.get(names.TENANT, "unknown")), str(span.attributes[names.OUTCOME]))
        for span in spans
        if span.attributes.get(names.OUTCOME) in REFUSED_BY_LIMITS
    )
    if not refused:
        return ""
    most = refused.most_common(_MAX_REFUSALS)
    listed = ", ".join(f"{count} of tenant {tenant} ({reason})" for (tenant, reason), count in most)
    return f"{Cause.RATE_LIMIT}: {refused.total()} requests were refused by their tenants' limits: {listed}"


def _slices(
    dimension: str, value_of: Value, requests: Sequence[tuple[StoredSpan, float]], num_tail: int
) -> list[Slice]:
    labels = [value_of(span) for span, _ in requests]
    found: list[Slice] = []
    for label in dict.fromkeys(labels[:num_tail]):
        in_tail = labels[:num_tail].count(label)
        inside = [value for (_, value), other in zip(requests, labels, strict=True) if other == label]
        outside = [value for (_, value), other in zip(requests, labels, strict=True) if other != label]
        if (
            in_tail >= _MIN_IN_TAIL
            and outside
            and _is_no_accident(in_tail, num_tail, len(inside) / len(labels))
        ):
            found.append(
                Slice(
                    dimension,
                    label,
                    len(inside),
                    len(inside) / len(requests),
                    in_tail / num_tail,
                    percentile(inside, 0.95),
                    percentile(outside, 0.95),
                )
            )
    return found


def _is_no_accident(in_tail: int, num_tail: int, share_of_all: float) -> bool:
    """Whether so many of the tail would hardly be in the slice if the tail were drawn from all requests."""
    expected = num_tail * share_of_all
    deviation = math.sqrt(expected * (1 - share_of_all))
    return in_tail - expected >= _MIN_DEVIATIONS * deviation


def render(diagnosis: Diagnosis, held_back: str = "", refused: str = "") -> RenderableType:
    """Who was refused, the verdict, what held the slowest back, then the slices that stand out."""
    head = (
        f"{diagnosis.num_requests} requests, {diagnosis.metric} p50 {diagnosis.p50_ms:.0f} ms, "
        f"p95 {diagnosis.p95_ms:.0f} ms"
    )
    verdicts = [Text(each, style="bold yellow") for each in (refused, diagnosis.verdict, held_back) if each]
    lines: list[RenderableType] = [Text(head), *verdicts]
    if diagnosis.slices:
        titles = ("dimension", "value", "requests", "of all", "of slowest", "p95 ms", "elsewhere")
        rows = table(*titles, num_left=2)
        for found in diagnosis.slices:
            rows.add_row(
                found.dimension,
                found.value,
                str(found.num_requests),
                f"{found.share_of_all:.0%}",
                f"{found.share_of_tail:.0%}",
                f"{found.p95_ms:.0f}",
                f"{found.p95_elsewhere_ms:.0f}",
            )
        lines += [Text(""), rows]
    return Group(*lines)


def _answer(reader: SpanSource, parsed: argparse.Namespace) -> RenderableType:
    now_ns = time.time_ns()
    until_ns = now_ns if parsed.until is None else min(now_ns, parsed.until)
    since_ns = max(0, until_ns - round(parsed.minutes * 60e9))
    requests, counted = (
        reader.spans_named(name, since_ns=since_ns, until_ns=parsed.until) for name in _MAY_REFUSE
    )
    refused = refusals([*requests, *counted])
    try:
        found = diagnose(requests, parsed.metric)
    except StoreError as error:
        # Where most are refused, few are left to be slow.
        raise StoreError(f"{error}; {refused}" if refused else str(error)) from error
    return render(found, what_held_back(reader, found), refused)


def _unix_ns(text: str) -> int:
    """Of a time with its zone, as an alert or a log tells it; 0 before 1970."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time with a zone; write it as 2026-11-23T02:25:00Z")
    return max(0, round(found.timestamp() * 1e6) * 1000)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 with one clear line when there is too little to go by."""
    parser = argparse.ArgumentParser(prog="millrace diagnose", description=__doc__)
    parser.add_argument("--metric", choices=tuple(METRICS), default="ttft")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument(
        "--until", type=_unix_ns, metavar="TIME", help="back from then, as 2026-11-23T02:25:00Z; default now"
    )
    return run(parser, _answer, arguments)


if __name__ == "__main__":
    sys.exit(main())
