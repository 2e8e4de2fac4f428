"""Why one request took as long as it did: every cause that its trace shows, with the time that it cost.

Causes are of two kinds. Delays are what others, or the system, did to the request; they were measured where
they happened, or follow from the spans. Work is what the request itself needed. A delay that is too small to
matter is not blamed: then the answer is the request's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    # None for the request's own work.
    cause: Cause | None = None


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
    work = sorted(_work(spans), key=lambda finding: -finding.milliseconds)
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
        verdict = "nothing held it back" + (
            f": {work[0].text}, {work[0].milliseconds:.0f} ms" if work else ""
        )
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


# For which engines keep a request in the queue.
_KEEPS_FROM_QUEUE = (
    Cause.KV_PRESSURE,
    Cause.HIGHER_TIER,
    Cause.BATCH_FULL,
    Cause.COLD_ADAPTER,
    Cause.ANSWER_PACE,
)


def _delays(spans: Sequence[StoredSpan]) -> list[Finding]:
    """Measured delays, and those that follow from spans that only exist when something went wrong."""
    found = dict(delays_of(spans))
    # The engine's part, for which it kept the request from the queue; the compilation comes on top.
    explained_ms = found.get(Cause.GRAMMAR_COMPILE, 0.0)
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
        found[Cause.GRAMMAR_COMPILE] = explained_ms + compiled_ms
    _charge_preemption(found, spans)
    explained_ms += sum(found.get(cause, 0.0) for cause in _KEEPS_FROM_QUEUE)
    ttft = ttft_of(spans)
    if ttft is not None:
        # Time in the queue that no cause accounts for: the queue was simply not empty.
        rest_ms = ttft.parts_ms.get(TtftPart.QUEUE, 0.0) - explained_ms - found.get(Cause.LONG_PREFILL, 0.0)
        if rest_ms >= MIN_DELAY_MS:
            found[Cause.BATCH_FULL] = found.get(Cause.BATCH_FULL, 0.0) + rest_ms
    return [Finding(ms, _delay_text(cause, spans), cause) for cause, ms in found.items() if ms > 0]


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


def _work(spans: Sequence[StoredSpan]) -> list[Finding]:
    found: list[Finding] = []
    request = request_span(spans)
    attributes = request.attributes if request else {}
    ttft = ttft_of(spans)
    for part, milliseconds in (ttft.parts_ms if ttft else {}).items():
        if part is TtftPart.QUEUE:
            continue
        text = part.meaning
        if part is TtftPart.PREFILL:
            prompt, cached = attributes.get(genai.INPUT_TOKENS), attributes.get(names.CACHED_TOKENS, 0)
            text = "computing its own prompt" + (
                f" of {prompt} tokens, {cached} of them cached" if prompt else ""
            )
        if part is TtftPart.FIRST_DECODE and any(span.name == names.GATEWAY_SAMPLE for span in spans):
            tokens = attributes.get(genai.OUTPUT_TOKENS)
            text = "generating samples until one was chosen" + (f", {tokens} tokens" if tokens else "")
        found.append(Finding(milliseconds, text))
    decode_ms = _covered_ms(span for span in spans if span.name == names.ENGINE_DECODE)
    # Of samples of which one is given, generating is most of the time until the answer begins.
    if decode_ms and not any(span.name == names.GATEWAY_SAMPLE for span in spans):
        tokens = attributes.get(genai.OUTPUT_TOKENS)
        found.append(Finding(decode_ms, "generating" + (f" {tokens} tokens" if tokens else "")))
    return [finding for finding in found if finding.milliseconds > 0]


def _covered_ms(spans: Iterable[StoredSpan]) -> float:
    """Time in which any of them was open: choices of one request are generated at the same time."""
    covered_ns = end_ns = 0
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
