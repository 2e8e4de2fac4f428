"""The engine's part of a request's trace, written when it ends from the moments that the core measured."""

from __future__ import annotations

from opentelemetry.trace import Link, SpanKind

from contract.outputs import NUMBERS
from engine.service.neighbours import RecentWork, Work
from engine.types import ChoiceHistory, FinishReason, FirstTokenTimings, Request, TokenEvent
from observability.emit import names
from observability.emit.names import SpanName
from observability.emit.tracing import RemoteSpan, RequestIdentity, Telemetry

_COUNT_KEYS = {name: getattr(names, name.upper()) for name in NUMBERS if hasattr(names, name.upper())}
_DELAY_KEYS = {cause.value: key for cause, key in names.DELAYED_BY_MS.items()}


class RequestTrace:
    """Collects a request's moments: engine.request and its steps queue, prefill chunks, first_decode, decode.

    `recent` is the engine's, shared by all its requests.
    """

    def __init__(self, telemetry: Telemetry, request: Request, engine_id: str, recent: RecentWork) -> None:
        self._telemetry = telemetry
        self._request = request
        identity = RequestIdentity(request.external_id, request.client_request_id)
        self._span = telemetry.start(
            names.ENGINE_REQUEST,
            kind=SpanKind.SERVER,
            parent=RemoteSpan(request.traceparent, request.tracestate, identity),
            start_s=request.arrival_s,
        )
        self._engine_id = engine_id
        self._recent = recent
        # Its own place in the batch, once it had one.
        self._place: Work | None = None
        self._first: FirstTokenTimings | None = None
        self.num_output_tokens = 0

    def observe(self, event: TokenEvent, now: float) -> None:
        """Takes in one event; the first token's timings become spans at once."""
        self.num_output_tokens += len(event.token_ids)
        if event.first_token is not None:
            self._first = event.first_token
            self._record_first_token(event.first_token)
        if event.statistics is not None and event.failure is None and self._first is not None:
            self._record_decode(event.choice_index, event.statistics, now)

    def end(self, event: TokenEvent, now: float) -> None:
        """Ends engine.request with its outcome."""
        if self._place is not None:
            self._place.end_s = now
        if not self._span.is_recording():
            return
        request, failure = self._request, event.failure
        reason = event.finish_reason or FinishReason.ERROR
        details: dict[str, str | int] = {
            names.TENANT: request.tenant,
            names.TIER: request.tier,
            names.ENGINE_ID: self._engine_id,
            names.PROMPT_TOKENS: len(request.prompt_token_ids),
            names.MAX_TOKENS: request.sampling.max_tokens,
            names.NUM_CHOICES: request.sampling.n,
            names.OUTCOME: failure.reason if failure else reason.name.lower(),
            names.OUTPUT_TOKENS: self.num_output_tokens,
        }
        if self._first is not None:
            details[names.CACHED_TOKENS] = self._first.cached_prompt_tokens
            details[names.NUM_CHUNKS] = len(self._first.prefill_chunks)
        self._telemetry.end(self._span, end_s=now, details=details, error=failure.message if failure else "")

    def _record_first_token(self, first: FirstTokenTimings) -> None:
        step, span = self._telemetry.step, self._span
        if not span.is_recording():
            return
        self._place = self._recent.prefilled(
            span.get_span_context(), first.first_scheduled_s, first.prefill_end_s
        )
        step(names.ENGINE_QUEUE, of=span, start_s=first.arrival_s, end_s=first.first_scheduled_s)
        for start_s, end_s, num_tokens in first.prefill_chunks:
            step(
                names.ENGINE_PREFILL,
                of=span,
                start_s=start_s,
                end_s=end_s,
                attributes={names.CHUNK_TOKENS: num_tokens},
            )
        step(names.ENGINE_FIRST_DECODE, of=span, start_s=first.prefill_end_s, end_s=first.first_token_s)

    def _record_decode(self, choice_index: int, statistics: ChoiceHistory, now: float) -> None:
        if not self._span.is_recording():
            return
        delays = sorted(statistics.delayed_by_s.items(), key=lambda item: -item[1])
        attributes: dict[str, str | int | float | list[str]] = {
            names.CHOICE_INDEX: choice_index,
            **{key: getattr(statistics, name) for name, key in _COUNT_KEYS.items()},
            names.GRAMMAR_MS: statistics.grammar_s * 1000,
            names.DELAYED_BY: [cause for cause, _ in delays],
        }
        for cause, seconds in delays:
            key = _DELAY_KEYS.get(cause)
            if key is not None:
                attributes[key] = seconds * 1000
        self._record_losses(choice_index, statistics)
        self._telemetry.step(
            names.ENGINE_DECODE,
            of=self._span,
            start_s=now - statistics.decode_s,
            end_s=now,
            attributes=attributes,
            links=self._links(statistics, now),
            is_notable=statistics.num_preemptions > 0,
        )

    def _record_losses(self, choice_index: int, statistics: ChoiceHistory) -> None:
        """Times out of the batch, the returns, and blocks brought back from host memory."""
        lost: list[tuple[SpanName, float, float, dict[str, int]]] = [
            (names.ENGINE_PREEMPTED, start_s, end_s, {}) for start_s, end_s in statistics.absences_s
        ]
        lost += [
            (names.ENGINE_RESUMED, start_s, end_s, {names.RECOMPUTED_TOKENS: tokens})
            for start_s, end_s, tokens in statistics.comebacks_s
        ]
        lost += [
            (names.ENGINE_OFFLOAD, start_s, end_s, {names.RESTORED_TOKENS: tokens})
            for start_s, end_s, tokens in statistics.restores_s
        ]
        for name, start_s, end_s, attributes in lost:
            self._telemetry.record(
                name,
                start_s=start_s,
                end_s=end_s,
                parent=self._span,
                attributes={names.CHOICE_INDEX: choice_index, **attributes},
            )

    def _links(self, statistics: ChoiceHistory, now: float) -> list[Link]:
        """The requests whose work took the time that this one lost."""
        first = self._first
        if first is None or not statistics.delayed_by_s:
            return []
        return self._recent.links(
            self._span.get_span_context(),
            statistics.delayed_by_s,
            whole=(first.arrival_s, now),
            waits=((first.arrival_s, first.first_scheduled_s), *statistics.absences_s),
        )
