"""Why one request took as long as it did: every cause that its trace shows, with the time that it cost.

Causes are of two kinds. Delays are what others, or the system, did to the request; they were measured where
they happened, or follow from the spans. Work is what the request itself needed. A delay that is too small to
matter is not blamed: then the answer is the request's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from observability.analysis.decode import StoredSpan
from observability.analysis.source import SpanSource
from observability.analysis.tree import delays_of, request_span, ttft_of
from observability.emit import genai, names
from observability.emit.names import Cause, TtftPart

# A delay is blamed when it is at least this much, and at least this share of the whole time.
MIN_DELAY_MS = names.DELAY_MS
MIN_DELAY_SHARE = 0.1

# Reasons of the error table.
REFUSED_BY_LIMITS = {
    "REQUEST_RATE_EXCEEDED",
    "TOKEN_RATE_EXCEEDED",
    "CONCURRENCY_EXCEEDED",
    "BUDGET_EXHAUSTED",
}

# Nothing failed: what the request waited for until then may be why its client lost patience.
_LEFT = "CANCELLED"


@dataclass(frozen=True)
class Finding:
    """One share of a request's time, in words."""

    milliseconds: float
    text: str
    # None for the request's own work, and for a wait that no cause was named for.
    cause: Cause | None = None
    is_wait: bool = False


@dataclass(frozen=True)
class Neighbour:
    """Another request whose prompt was computed on the same engine meanwhile."""

    request_id: str
    tenant: str
    overlap_ms: float
    num_tokens: int


@dataclass(frozen=True)
class Explanation:
    """The whole answer."""

    request_id: str
    total_ms: float
    ttft_ms: float | None
    # One sentence says why.
    verdict: str
    # The cause that is blamed; None when it was the request's own work, or a refusal for another reason.
    cause: Cause | None
    # All findings, delays first, each kind by time.
    findings: Sequence[Finding]
    neighbours: Sequence[Neighbour] = ()


def explain(spans: Sequence[StoredSpan], neighbours: Sequence[Neighbour] = ()) -> Explanation:
    """Explains a request by the spans of its trace."""
    request_id = next((span.request_id for span in spans if span.request_id), "unknown")
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    total_ms = (end_ns - start_ns) / 1e6
    ttft = ttft_of(spans)
    delays = sorted(_delays(spans), key=lambda finding: -finding.milliseconds)
    work = sorted(_work(spans, delays), key=lambda finding: -finding.milliseconds)
    largest = delays[0] if delays else None
    outcome = _failure(spans)
    if outcome and outcome != _LEFT:
        cause = Cause.RATE_LIMIT if outcome in REFUSED_BY_LIMITS else None
        verdict = _refusal(spans, outcome)
    elif largest is not None and largest.milliseconds >= max(MIN_DELAY_MS, MIN_DELAY_SHARE * total_ms):
        cause = largest.cause
        verdict = f"{largest.milliseconds:.0f} of {total_ms:.0f} ms: {largest.text}"
        if cause is Cause.LONG_PREFILL and neighbours:
            verdict += f" ({_name(neighbours[0])})"
    elif request_span(spans) is None:
        # Services export apart from each other: a part of the trace says nothing about the whole.
        cause = None
        verdict = "the gateway's part of its trace is not here yet; ask again in a moment"
    else:
        cause = None
        verdict = "no cause was named" if work and work[0].is_wait else "nothing held it back"
        verdict += f": {work[0].text}, {work[0].milliseconds:.0f} ms" if work else ""
    if outcome == _LEFT:
        verdict = f"its client left after {total_ms:.0f} ms; until then {verdict}"
    return Explanation(
        request_id=request_id,
        total_ms=total_ms,
        ttft_ms=None if ttft is None else ttft.total_ms,
        verdict=verdict,
        cause=cause,
        findings=[*delays, *work],
        neighbours=neighbours,
    )


def _failure(spans: Sequence[StoredSpan]) -> str:
    """Reason of the error table with which the request ended, wherever it was refused; "" for none."""
    outcomes = (str(span.attributes.get(names.OUTCOME, "")) for span in spans)
    return next((outcome for outcome in outcomes if outcome.isupper()), "")


def _refusal(spans: Sequence[StoredSpan], outcome: str) -> str:
    retry = [span.attributes[names.RETRY_AFTER_S] for span in spans if names.RETRY_AFTER_S in span.attributes]
    advice = f"; a retry after {float(retry[0]):.1f} s may succeed" if retry else ""
    if outcome in REFUSED_BY_LIMITS:
        return f"it was refused by its tenant's limits ({outcome}){advice}"
    return f"it failed with {outcome}{advice}"


# Besides the parts of the time to the first token: what comes after it.
_GENERATING = "generating"
_PROMPT = (TtftPart.PREFILL, TtftPart.FIRST_DECODE)
_ANSWER = (TtftPart.DELIBERATION, _GENERATING)
# Where a delay may lie: its time is taken out of the first of these that has some, then of the next.
_WITHIN_QUEUE = (TtftPart.QUEUE, *_ANSWER, *_PROMPT)
_WITHIN_ANSWER = (*_ANSWER, *_PROMPT, TtftPart.NETWORK, TtftPart.QUEUE)
_WITHIN: Mapping[Cause, Sequence[str]] = {
    Cause.PREEMPTION: _WITHIN_ANSWER,
    Cause.FORGOTTEN: _WITHIN_ANSWER,
    Cause.ENGINE_LOST: _WITHIN_ANSWER,
    Cause.RATE_LIMIT: (TtftPart.PREPROCESS, TtftPart.QUEUE),
    Cause.GRAMMAR_COMPILE: (TtftPart.PREPROCESS, TtftPart.QUEUE),
    Cause.LONG_PREFILL: (TtftPart.QUEUE, *_PROMPT, *_ANSWER),
    Cause.ANSWER_PACE: (TtftPart.QUEUE, *_PROMPT, *_ANSWER),
}


def _delays(spans: Sequence[StoredSpan]) -> list[Finding]:
    """Measured delays, and those that follow from spans that only exist when something went wrong."""
    found = _waited(spans)
    compiled_ms = 0.0
    for span in spans:
        duration_ms = span.duration_ms
        if span.name == names.TOKENIZER_COMPILE and span.attributes.get(names.GRAMMAR_CACHE) != "hit":
            compiled_ms = max(compiled_ms, duration_ms)
        if span.name in {names.GATEWAY_RESERVE, names.GATEWAY_RATE_LIMIT} and duration_ms >= MIN_DELAY_MS:
            found[Cause.RATE_LIMIT] = found.get(Cause.RATE_LIMIT, 0.0) + duration_ms
        if span.name == names.GATEWAY_RESUBMIT:
            found[Cause.ENGINE_LOST] = found.get(Cause.ENGINE_LOST, 0.0) + duration_ms
    if compiled_ms:
        # The engine's part is there already; the compilation comes on top.
        found[Cause.GRAMMAR_COMPILE] = found.get(Cause.GRAMMAR_COMPILE, 0.0) + compiled_ms
    _charge_preemption(found, spans)
    return [Finding(ms, _delay_text(cause, spans), cause) for cause, ms in found.items() if ms > 0]


def _waited(spans: Sequence[StoredSpan]) -> dict[Cause, float]:
    """What the services measured. Samples of one answer wait at the same time, and engines tell of each: then
    the causes share the time in which any of them waited.
    """
    found = delays_of(spans)
    if not any(span.name == names.GATEWAY_SAMPLE for span in spans):
        return found
    waits = (names.ENGINE_QUEUE, names.ENGINE_PREFILL, names.ENGINE_PREEMPTED)
    most_ms = _covered_ms(span for span in spans if span.name in waits)
    share = min(1.0, most_ms / (sum(found.values()) or 1.0))
    return {cause: ms * share for cause, ms in found.items()}


def _charge_preemption(found: dict[Cause, float], spans: Sequence[StoredSpan]) -> None:
    """Waits for a batch slot after the first token are preemptions."""
    if not any(span.attributes.get(names.NUM_PREEMPTIONS) for span in spans):
        return
    ttft = ttft_of(spans)
    queue_ms = ttft.parts_ms.get(TtftPart.QUEUE, 0.0) if ttft else 0.0
    for cause in (Cause.BATCH_FULL, Cause.HIGHER_TIER):
        waited_ms = found.pop(cause, 0.0)
        first_wait_ms = min(waited_ms, queue_ms)
        queue_ms -= first_wait_ms
        if first_wait_ms:
            found[cause] = first_wait_ms
        if waited_ms > first_wait_ms:
            found[Cause.PREEMPTION] = found.get(Cause.PREEMPTION, 0.0) + waited_ms - first_wait_ms


def _delay_text(cause: Cause, spans: Sequence[StoredSpan]) -> str:
    text = cause.meaning
    if cause is Cause.PREEMPTION:
        times = sum(int(span.attributes.get(names.NUM_PREEMPTIONS, 0)) for span in spans)
        tokens = sum(int(span.attributes.get(names.RECOMPUTED_TOKENS, 0)) for span in spans)
        text += f" (preempted {times} times, {tokens} tokens computed again)"
    return text


def _work(spans: Sequence[StoredSpan], delays: Sequence[Finding]) -> list[Finding]:
    """The parts of the request's time without what it was delayed by in them, so that all shares add up."""
    ttft, request = ttft_of(spans), request_span(spans)
    times: dict[str, float] = dict(ttft.parts_ms.items()) if ttft else {}
    # What was generated before the client had the first token is in one of the parts.
    streams = (each for each in spans if each.name == names.GATEWAY_STREAM)
    first_ns = next((each.start_ns for each in streams if request and each.parent_id == request.span_id), 0)
    first_ns += round(times.get(TtftPart.SERIALIZE, 0.0) * 1e6)
    decodes = (span for span in spans if span.name == names.ENGINE_DECODE)
    times[_GENERATING] = _covered_ms(decodes, from_ns=first_ns)
    for delay in delays:
        left_ms = delay.milliseconds
        for part in _WITHIN.get(delay.cause, _WITHIN_QUEUE) if delay.cause else ():
            taken_ms = min(left_ms, times.get(part, 0.0))
            if taken_ms:
                times[part], left_ms = times[part] - taken_ms, left_ms - taken_ms
    attributes = request.attributes if request else {}
    return [
        Finding(ms, _work_text(part, attributes), is_wait=part is TtftPart.QUEUE)
        for part, ms in times.items()
        if ms > 0
    ]


def _work_text(part: str, attributes: Mapping[str, Any]) -> str:
    tokens = attributes.get(genai.OUTPUT_TOKENS)
    generated = f"{tokens} tokens" if tokens else ""
    match part:
        case TtftPart.PREFILL:
            prompt, cached = attributes.get(genai.INPUT_TOKENS), attributes.get(names.CACHED_TOKENS, 0)
            of_them = f" of {prompt} tokens, {cached} of them cached" if prompt else ""
            return f"computing its own prompt{of_them}"
        case TtftPart.DELIBERATION:
            return ", ".join(filter(None, ("generating samples until one was chosen", generated)))
        case TtftPart():
            return part.meaning
        case _:
            return " ".join(filter(None, ("generating", generated)))


def _covered_ms(spans: Iterable[StoredSpan], from_ns: int = 0) -> float:
    """Time in which any of them was open, from a moment on: choices of one request are generated at the same
    time.
    """
    covered_ns, end_ns = 0, from_ns
    for span in sorted(spans, key=lambda each: each.start_ns):
        covered_ns += max(0, span.end_ns - max(span.start_ns, end_ns))
        end_ns = max(end_ns, span.end_ns)
    return covered_ns / 1e6


def find_neighbours(reader: SpanSource, spans: Sequence[StoredSpan]) -> list[Neighbour]:
    """Requests whose prefill overlapped with this one's time in the same engine, the longest first."""
    mine = next((span for span in spans if span.name == names.ENGINE_REQUEST), None)
    if mine is None:
        return []
    around = reader.spans_between((names.ENGINE_PREFILL, names.ENGINE_REQUEST), mine.start_ns, mine.end_ns)
    overlaps: dict[str, tuple[float, int]] = {}
    for chunk in around:
        if chunk.name == names.ENGINE_PREFILL and chunk.trace_id != mine.trace_id:
            overlap = min(chunk.end_ns, mine.end_ns) - max(chunk.start_ns, mine.start_ns)
            milliseconds, tokens = overlaps.get(chunk.trace_id, (0.0, 0))
            chunk_tokens = int(chunk.attributes.get(names.CHUNK_TOKENS, 0))
            overlaps[chunk.trace_id] = (milliseconds + overlap / 1e6, tokens + chunk_tokens)
    # By trace: a request has a span for each of its choices or texts.
    found: dict[str, Neighbour] = {}
    for engine in around:
        if (
            engine.name == names.ENGINE_REQUEST
            and engine.trace_id in overlaps
            and engine.attributes.get(names.ENGINE_ID) == mine.attributes.get(names.ENGINE_ID)
        ):
            tenant = str(engine.attributes.get(names.TENANT, ""))
            found[engine.trace_id] = Neighbour(engine.request_id, tenant, *overlaps[engine.trace_id])
    return sorted(found.values(), key=lambda neighbour: -neighbour.overlap_ms)


def _name(neighbour: Neighbour) -> str:
    of_tenant = f" of tenant {neighbour.tenant}" if neighbour.tenant else ""
    return f"request {neighbour.request_id}{of_tenant}: {neighbour.num_tokens} prompt tokens meanwhile"
