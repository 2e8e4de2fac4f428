"""What is told of a request that has ended: metrics, span attributes, the ledger."""

from __future__ import annotations

import time

import msgspec
from opentelemetry.trace import Span

from contract.errors import MillraceError, Reason
from gateway.pipeline import span_attributes
from gateway.pipeline.delta import Usage
from gateway.pipeline.generation import CANCELLED, Generation, Outcome
from gateway.pipeline.ports import FinishedRequest, Ledger
from gateway.pipeline.span_attributes import ttft_parts
from gateway.tiers import Tier
from gateway.types.caller import Caller
from gateway.types.request import GenerationRequest
from observability.emit import genai, names
from observability.emit.metrics import NO_EXEMPLAR, Metrics
from observability.emit.names import length_bucket
from observability.emit.tracing import Telemetry

# Finish reasons of answers that ended by themselves.
_COMPLETE = frozenset({"stop", "tool_calls"})


class End(msgspec.Struct, frozen=True):
    """The moment at which a request ended, on both clocks; it is told some milliseconds later."""

    monotonic_s: float
    unix_s: float

    @classmethod
    def now(cls) -> End:
        """This moment."""
        return cls(time.monotonic(), time.time())


class OutcomeRecorder:
    """Writes each request's outcome once, to all places that keep it."""

    def __init__(self, metrics: Metrics, telemetry: Telemetry, ledger: Ledger) -> None:
        self._metrics = metrics
        self._telemetry = telemetry
        self._ledger = ledger

    def refused(
        self,
        span: Span,
        caller: Caller,
        request: GenerationRequest,
        tier: str,
        model: str,
        error: BaseException,
        end_s: float,
    ) -> None:
        """A request that was not accepted, or whose client left before it was, at `end_s` (monotonic).

        `model` is "" where no such model is known to be served: a client's own word is no label.
        """
        reason = error.reason.value if isinstance(error, MillraceError) else Reason.INTERNAL.value
        if not isinstance(error, Exception):
            reason = CANCELLED
        self._metrics.add(names.REJECTIONS, reason=reason, tier=tier)
        self._count(caller, request, model, tier, "cancelled" if reason == CANCELLED else "refused")
        labels = _gen_ai_labels(request, model)
        self._metrics.observe(
            names.GEN_AI_DURATION, end_s - caller.received_s, span=NO_EXEMPLAR, **labels, error_type=reason
        )
        if not span.is_recording():
            return
        told = span_attributes.asked(self._telemetry, caller.identity, request)
        told.attributes[names.OUTCOME] = reason
        if isinstance(error, MillraceError) and error.retry_after_s is not None:
            told.details[names.RETRY_AFTER_S] = error.retry_after_s
        self._telemetry.end(span, end_s=end_s, attributes=told.attributes, details=told.details, error=reason)

    def ended(
        self,
        span: Span,
        caller: Caller,
        request: GenerationRequest,
        tier: Tier,
        generation: Generation,
        outcome: Outcome,
        usage: Usage,
        end: End,
    ) -> None:
        """An accepted request, with its one outcome."""
        duration_s = end.monotonic_s - caller.received_s
        tpot_s = generation.meter.tpot_s(generation.info.num_choices)
        group = _outcome_group(outcome)
        self._count(caller, request, request.model, tier.name, group)
        if request.response_format is not None and group == "ok":
            # Every token was allowed by the grammar: an answer that ended by itself is complete, one that was
            # cut by a limit is not. What the grammar leaves open has been judged.
            judged = generation.judge is None or generation.judge.all_valid
            complete = judged and outcome.name in _COMPLETE
            kind = span_attributes.GUIDED_KINDS[type(request.response_format)]
            self._metrics.add(names.GUIDED_OUTPUTS, kind=kind, valid=str(complete).lower())
        self._observe(span, request, tier, generation, usage, duration_s, tpot_s)
        self._observe_gen_ai(request, usage, duration_s, tpot_s, "" if group == "ok" else outcome.name)
        self._count_tokens(caller, request, tier.name, usage)
        self._judge(caller, tier, usage, tpot_s, completed=group == "ok")
        self._end_span(span, caller, request, tier, generation, usage, outcome, tpot_s, end)
        self._ledger.record(_entry(caller, request, tier, generation, usage, outcome, duration_s, end))

    def _count(self, caller: Caller, request: GenerationRequest, model: str, tier: str, group: str) -> None:
        self._metrics.add(
            names.REQUESTS,
            face=request.face,
            model=model,
            tier=tier,
            tenant=caller.identity.tenant,
            outcome=group,
        )

    def _observe(
        self,
        span: Span,
        request: GenerationRequest,
        tier: Tier,
        generation: Generation,
        usage: Usage,
        duration_s: float,
        tpot_s: float | None,
    ) -> None:
        metrics, model = self._metrics, request.model
        metrics.observe(
            names.E2E, duration_s, span=NO_EXEMPLAR, model=model, tier=tier.name, face=request.face
        )
        if tpot_s is not None:
            metrics.observe(
                names.TPOT,
                tpot_s,
                span=NO_EXEMPLAR,
                model=model,
                tier=tier.name,
                output_bucket=length_bucket(usage.completion_tokens),
                speculative=str(generation.meter.statistics.drafted_tokens > 0).lower(),
                pool=generation.pool,
            )
        if usage.ttft is None:
            return
        metrics.observe(
            names.TTFT,
            usage.ttft.total_s,
            # The trace that a slow first token leads to.
            span=span.get_span_context() if span.is_recording() else NO_EXEMPLAR,
            model=model,
            tier=tier.name,
            prompt_bucket=length_bucket(usage.prompt_tokens),
            cache="hit" if usage.cached_prompt_tokens else "miss",
            guided=str(request.response_format is not None).lower(),
            adapter=generation.info.adapter,
            pool=generation.pool,
        )
        for part, seconds in ttft_parts(usage.ttft).items():
            metrics.observe(names.TTFT_PART, seconds, span=NO_EXEMPLAR, part=part.value, tier=tier.name)

    def _observe_gen_ai(
        self, request: GenerationRequest, usage: Usage, duration_s: float, tpot_s: float | None, error: str
    ) -> None:
        """The same times as other makers' servers report them."""
        observe, labels = self._metrics.observe, _gen_ai_labels(request, request.model)
        observe(names.GEN_AI_DURATION, duration_s, span=NO_EXEMPLAR, **labels, error_type=error)
        if error:
            return
        if usage.ttft is not None:
            observe(names.GEN_AI_TTFT, usage.ttft.total_s, span=NO_EXEMPLAR, **labels)
        if tpot_s is not None:
            observe(names.GEN_AI_TPOT, tpot_s, span=NO_EXEMPLAR, **labels)

    def _count_tokens(self, caller: Caller, request: GenerationRequest, tier: str, usage: Usage) -> None:
        for kind, amount in (
            ("prompt_computed", usage.prompt_tokens - usage.cached_prompt_tokens),
            ("prompt_cached", usage.cached_prompt_tokens),
            ("completion", usage.completion_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if amount > 0:
                self._metrics.add(
                    names.TOKENS,
                    amount,
                    kind=kind,
                    model=request.model,
                    tier=tier,
                    tenant=caller.identity.tenant,
                )

    def _judge(
        self, caller: Caller, tier: Tier, usage: Usage, tpot_s: float | None, *, completed: bool
    ) -> None:
        measured = (
            ("ttft", tier.config.ttft_target_ms, None if usage.ttft is None else usage.ttft.total_s),
            ("tpot", tier.config.tpot_target_ms, tpot_s),
        )
        for objective, target_ms, value_s in measured:
            if target_ms is None or (value_s is None and completed):
                continue
            met = completed and value_s is not None and value_s * 1000 <= target_ms
            self._metrics.add(
                names.SLO,
                tier=tier.name,
                tenant=caller.identity.tenant,
                objective=objective,
                met=str(met).lower(),
            )

    def _end_span(
        self,
        span: Span,
        caller: Caller,
        request: GenerationRequest,
        tier: Tier,
        generation: Generation,
        usage: Usage,
        outcome: Outcome,
        tpot_s: float | None,
        end: End,
    ) -> None:
        if not span.is_recording():
            return
        asked = span_attributes.asked(self._telemetry, caller.identity, request)
        answered = span_attributes.answered(
            self._telemetry,
            request,
            tier,
            generation,
            usage,
            outcome,
            duration_s=end.monotonic_s - caller.received_s,
            tpot_s=tpot_s,
        )
        failed = outcome.name if outcome.error is not None else ""
        self._telemetry.end(
            span,
            end_s=end.monotonic_s,
            attributes=asked.attributes | answered.attributes,
            details=asked.details | answered.details,
            error=failed,
        )


def _gen_ai_labels(request: GenerationRequest, model: str) -> dict[str, str]:
    return {
        "gen_ai_operation_name": span_attributes.operation(request),
        "gen_ai_provider_name": genai.PROVIDER,
        "gen_ai_request_model": model,
        "gen_ai_response_model": model,
    }


def _outcome_group(outcome: Outcome) -> str:
    if outcome.name == CANCELLED:
        return "cancelled"
    return "ok" if outcome.name.islower() else "failed"


def _entry(
    caller: Caller,
    request: GenerationRequest,
    tier: Tier,
    generation: Generation,
    usage: Usage,
    outcome: Outcome,
    duration_s: float,
    end: End,
) -> FinishedRequest:
    return FinishedRequest(
        identity=caller.identity,
        model=request.model,
        tier=tier.name,
        face=request.face,
        outcome=outcome.name,
        ended_unix_s=end.unix_s,
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        num_choices=generation.info.num_choices,
        num_engines_lost=generation.num_engines_lost,
        statistics=generation.meter.statistics,
        queue_s=generation.meter.first_token.queue_s,
        ttft_s=None if usage.ttft is None else usage.ttft.total_s,
        duration_s=duration_s,
        metadata=request.metadata,
    )
