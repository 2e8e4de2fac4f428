"""What is kept of every request, written once when it ends: metrics, its span, its row in the ledger.

An attempt closes with one call (`Books.close`); all that is written of it is written there, some milliseconds
later, so that no client waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from opentelemetry.trace import Span, SpanKind

from contract.chat import Conversation
from contract.errors import MillraceError, Reason
from gateway.limits.limiter import Charges
from gateway.models.catalog import Target
from gateway.pipeline import span_attributes
from gateway.pipeline.attempt import CANCELLED, Attempt, Outcome
from gateway.pipeline.call import Call
from gateway.pipeline.delta import SharedTime, Usage
from gateway.pipeline.ports import INTERRUPTED, FinishedRequest, Ledger, OpenEntry
from gateway.pipeline.sharers import OwnRequest, OwnWork
from gateway.pipeline.span_attributes import ttft_parts
from gateway.tiers import Tier
from gateway.types.request import Caller, GenerationRequest
from observability.emit import genai, hand_overs, names, retention
from observability.emit.metrics import NO_EXEMPLAR, Metrics
from observability.emit.names import TtftPart, length_bucket
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred

# Finish reasons of answers that ended by themselves.
COMPLETE = frozenset({"stop", "tool_calls"})


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that has ended, and when, on both clocks."""

    attempt: Attempt
    outcome: Outcome
    usage: Usage
    monotonic_s: float
    unix_s: float

    @property
    def call(self) -> Call:
        """What was asked."""
        return self.attempt.call

    @property
    def duration_s(self) -> float:
        """Since the request's first byte."""
        return self.monotonic_s - self.call.caller.received_s

    @property
    def tpot_s(self) -> float | None:
        """See Meter."""
        return self.attempt.meter.tpot_s(self.attempt.info.num_choices)

    @property
    def group(self) -> str:
        """The outcome as a label: ok, cancelled or failed."""
        if self.outcome.name == CANCELLED:
            return "cancelled"
        return "failed" if self.outcome.is_failure else "ok"


class Books:
    """Knows what runs, and writes each request's outcome once, to all places that keep it."""

    def __init__(self, metrics: Metrics, telemetry: Telemetry, ledger: Ledger, deferred: Deferred) -> None:
        self.metrics = metrics
        # Accepted attempts that have not ended.
        self.running: set[Attempt] = set()
        # Told of attempts that have ended and kept their tokens, last of all.
        self.when_written: Callable[[Ended], None] = lambda _: None
        # A tier has so many attempts under way.
        self._num_active: dict[str, int] = {}
        self._own_work = OwnWork()
        # Of ended attempts whose engines have not said their last word.
        self._telling: set[asyncio.Task[Any]] = set()
        self._telemetry = telemetry
        self._ledger = ledger
        self._deferred = deferred
        metrics.begin(names.RESUBMISSIONS)

    def expects(self, models: Iterable[str], tiers: Iterable[Tier]) -> None:
        """Counts of these models and tiers begin at 0; those of tenants do when each is first counted."""
        judged = [tier.name for tier in tiers if tier.config.ttft_target_ms or tier.config.tpot_target_ms]
        for model in models:
            self.metrics.begin(names.TOOL_CALLS, model=model)
            for tier in judged:
                self.metrics.begin(names.GOODPUT, tier=tier, model=model)

    def gap_observer(self, call: Call, target: Target) -> Callable[[float], None]:
        """See AttemptBooks."""
        return self.metrics.observer(names.ITL, model=target.told, tier=call.tier.name)

    def running_by_model(self) -> Counter[str]:
        """Accepted attempts that have not ended, by version of the model that engines have them for."""
        return Counter(attempt.stream.model for attempt in self.running)

    def open(self, attempt: Attempt, charges: Charges) -> OpenEntry:
        """An attempt goes to an engine."""
        self.running.add(attempt)
        self._own_work.add(attempt.call.caller.identity.tenant, _work_of(attempt))
        self._count_active(attempt.call.tier, 1)
        return self._ledger.begin(
            FinishedRequest(
                **_accepted(attempt),
                entry_id=attempt.call.entry_id,
                ended_unix_ms=time.time_ns() // 1_000_000,
                outcome=INTERRUPTED,
            ),
            charges,
        )

    def supersede(self, attempt: Attempt) -> None:
        """Another attempt of the same call has its place, and its entry in the ledger."""
        self.running.discard(attempt)
        self._count_active(attempt.call.tier, -1)

    def shared_with(self, attempt: Attempt) -> tuple[SharedTime, ...]:
        """See AttemptBooks."""
        tenant = attempt.call.caller.identity.tenant
        return self._own_work.shared(tenant, _work_of(attempt), attempt.meter.statistics.delayed_by_s)

    def close(self, attempt: Attempt, outcome: Outcome, usage: Usage) -> None:
        """An attempt has ended; it is what is recorded of its call."""
        self.supersede(attempt)
        attempt.call.is_closed = True
        if attempt.stream.num_losses:
            # Seldom, and whoever looks for it looks at once.
            self._note_continuations(attempt, outcome)
        if attempt.stream.split:
            self._note_split(attempt)
        ended = Ended(
            attempt=attempt,
            outcome=outcome,
            usage=usage,
            monotonic_s=time.monotonic(),
            unix_s=time.time(),
        )
        self._deferred.call(self._write, ended)

    def fell_back(self, taken: Attempt, refusal: MillraceError) -> None:
        """A cheaper model answers what another one refused for its load."""
        self.metrics.add(
            names.FALLBACKS,
            model=taken.fallback_from,
            fallback=taken.target.told,
            tier=taken.call.tier.name,
            reason=refusal.reason.value,
        )

    def _count_active(self, tier: Tier, change: int) -> None:
        if tier.name not in self._num_active:
            # Read when it is scraped.
            number = partial(self._num_active.__getitem__, tier.name)
            self.metrics.set_function(names.ACTIVE_STREAMS, number, tier=tier.name)
        self._num_active[tier.name] = self._num_active.get(tier.name, 0) + change

    def _note_continuations(self, attempt: Attempt, outcome: Outcome) -> None:
        result = "failed" if outcome.name == Reason.ENGINE_LOST.value else "continued"
        self.metrics.add(names.RESUBMISSIONS, attempt.stream.num_losses, outcome=result)
        for start_s, end_s in attempt.stream.interruptions:
            self._telemetry.record(
                names.GATEWAY_RESUBMIT, start_s=start_s, end_s=end_s, parent=attempt.call.span
            )

    def _note_split(self, attempt: Attempt) -> None:
        self.metrics.add(hand_overs.SPLITS, outcome=attempt.stream.split)
        if attempt.stream.handed_over_s is not None:
            start_s, end_s = attempt.stream.handed_over_s
            self._telemetry.record(
                hand_overs.GATEWAY_HAND_OVER, start_s=start_s, end_s=end_s, parent=attempt.call.span
            )

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
        self.metrics.add(names.REJECTIONS, reason=reason, tier=tier)
        self._count(caller, request, model, tier, "cancelled" if reason == CANCELLED else "refused")
        labels = _gen_ai_labels(request, model)
        self.metrics.observe(
            names.GEN_AI_DURATION, end_s - caller.received_s, span=NO_EXEMPLAR, **labels, error_type=reason
        )
        span = self._kept(span, caller)
        if not span.is_recording():
            return
        recorded = span_attributes.asked(self._telemetry, caller.identity, request)
        recorded.attributes[names.OUTCOME] = reason
        if isinstance(error, MillraceError) and error.retry_after_s is not None:
            recorded.details[names.RETRY_AFTER_S] = error.retry_after_s
        self._telemetry.end(
            span, end_s=end_s, attributes=recorded.attributes, details=recorded.details, error=reason
        )

    def _write(self, end: Ended) -> None:
        first_s = end.attempt.meter.first_output_s
        if first_s is not None:
            self._telemetry.record_step(
                names.GATEWAY_STREAM, of=end.call.span, start_s=first_s, end_s=end.monotonic_s
            )
        info = end.attempt.info
        self._count(
            end.call.caller, end.call.request, info.model, end.call.tier.name, end.group, info.revision
        )
        # First of all: whatever fails below, what was used is paid for.
        self._record_when_told(end)
        form, judge = end.call.request.response_format, end.attempt.judge
        if form is not None and end.group == "ok":
            # Every token was allowed by the grammar: an answer that ended by itself is complete, one that was
            # cut by a limit is not. What the grammar leaves open has been judged.
            complete = (judge is None or judge.all_valid) and end.outcome.name in COMPLETE
            kind = span_attributes.GUIDED_KINDS[type(form)]
            self.metrics.add(names.GUIDED_OUTPUTS, kind=kind, model=info.model, valid=str(complete).lower())
        self._observe(end)
        self._observe_gen_ai(end)
        self._count_tokens(end)
        self._count_calls(end)
        kept_its_promise = self._judge(end)
        self._end_span(end, is_notable=end.outcome.is_failure or not kept_its_promise)
        if end.attempt.kept_ids is not None:
            self.when_written(end)

    def _record_when_told(self, end: Ended) -> None:
        """A row says what engines have spent, which they tell last of all."""
        telling = end.attempt.stream.when_told()
        if telling is None:
            self._ledger.record(_entry(end))
            return
        self._telling.add(telling)

        def record(told: asyncio.Task[Any]) -> None:
            self._telling.discard(told)
            self._ledger.record(_entry(end))

        telling.add_done_callback(record)

    async def hear_last_words(self, within_s: float) -> None:
        """Returns when engines have told what ended requests have taken, and the ledger has it."""
        self._deferred.flush()
        if self._telling:
            await asyncio.wait(list(self._telling), timeout=within_s)
            # A task that was done before this has its row written in the next iteration of the loop.
            await asyncio.sleep(0)

    def _count(
        self,
        caller: Caller,
        request: GenerationRequest,
        model: str,
        tier: str,
        group: str,
        revision: str = "",
    ) -> None:
        self.metrics.add(
            names.REQUESTS,
            face=request.face,
            model=model,
            revision=revision,
            tier=tier,
            tenant=caller.identity.tenant,
            outcome=group,
        )

    def _observe(self, end: Ended) -> None:
        observe = self.metrics.observe
        request, usage, info = end.call.request, end.usage, end.attempt.info
        of = {"model": info.model, "revision": info.revision, "tier": end.call.tier.name}
        observe(names.E2E, end.duration_s, span=NO_EXEMPLAR, **of, face=request.face)
        if usage.kv_lost is not None:
            observe(retention.KV_LOST, usage.kv_lost, span=NO_EXEMPLAR, **of)
        of |= _slices(end)
        if end.tpot_s is not None:
            bucket = length_bucket(usage.billed_tokens)
            observe(names.TPOT, end.tpot_s, span=NO_EXEMPLAR, **of, output_bucket=bucket)
        if usage.ttft is None:
            return
        observe(
            names.TTFT,
            usage.ttft.total_s,
            # The trace that a slow first token leads to.
            span=end.call.span.get_span_context() if end.call.span.is_recording() else NO_EXEMPLAR,
            **of,
        )
        for part, seconds in ttft_parts(usage.ttft).items():
            if part is TtftPart.DELIBERATION and not seconds:
                # Few answers are chosen among samples; zeros of all others would hide how long those take.
                continue
            observe(names.TTFT_PART, seconds, span=NO_EXEMPLAR, part=part.value, tier=end.call.tier.name)

    def _observe_gen_ai(self, end: Ended) -> None:
        """The same times as other makers' servers report them."""
        observe, labels = self.metrics.observe, _gen_ai_labels(end.call.request, end.attempt.info.model)
        error = "" if end.group == "ok" else end.outcome.name
        observe(names.GEN_AI_DURATION, end.duration_s, span=NO_EXEMPLAR, **labels, error_type=error)
        if error:
            return
        if end.usage.ttft is not None:
            observe(names.GEN_AI_TTFT, end.usage.ttft.total_s, span=NO_EXEMPLAR, **labels)
        if end.tpot_s is not None:
            observe(names.GEN_AI_TPOT, end.tpot_s, span=NO_EXEMPLAR, **labels)

    def _count_tokens(self, end: Ended) -> None:
        usage = end.usage
        labels = {
            "model": end.attempt.info.model,
            "revision": end.attempt.info.revision,
            "tier": end.call.tier.name,
            "tenant": end.call.caller.identity.tenant,
        }
        for kind, amount in (
            ("prompt_computed", usage.prompt_tokens - usage.cached_prompt_tokens),
            ("prompt_cached", usage.cached_prompt_tokens),
            ("completion", usage.completion_tokens),
            ("candidate", usage.candidate_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if amount > 0:
                self.metrics.add(names.TOKENS, amount, kind=kind, **labels)

    def _count_calls(self, end: Ended) -> None:
        prompt = end.call.request.prompt
        offered = {tool.name for tool in prompt.tools} if isinstance(prompt, Conversation) else set()
        for name, arguments in end.attempt.tool_calls():
            valid = str(name in offered and _is_object(arguments)).lower()
            self.metrics.add(names.TOOL_CALLS, model=end.attempt.info.model, valid=valid)

    def _judge(self, end: Ended) -> bool:
        """Counts which targets of its tier a request met; whether it met all that apply."""
        targets, ttft, completed = end.call.tier.config, end.usage.ttft, end.group == "ok"
        labels = {"tier": end.call.tier.name, "tenant": end.call.caller.identity.tenant}
        all_met: list[bool] = []
        for objective, target_ms, value_s in (
            ("ttft", targets.ttft_target_ms, None if ttft is None else ttft.total_s),
            ("tpot", targets.tpot_target_ms, end.tpot_s),
        ):
            if target_ms is None or (value_s is None and completed):
                continue
            met = completed and value_s is not None and value_s * 1000 <= target_ms
            self.metrics.add(names.SLO, 1, **labels, objective=objective, met=str(met).lower())
            all_met.append(met)
        if all_met and end.group != "cancelled":
            model, kept = end.attempt.info.model, str(all(all_met)).lower()
            self.metrics.add(names.GOODPUT, tier=end.call.tier.name, model=model, met=kept)
        return all(all_met)

    def _kept(self, span: Span, caller: Caller) -> Span:
        """The request's span; one that is kept where its trace is not recorded."""
        if span.is_recording():
            return span
        return self._telemetry.keep(
            names.GATEWAY_REQUEST, parent=caller.trace, kind=SpanKind.SERVER, start_s=caller.received_s
        )

    def _end_span(self, end: Ended, *, is_notable: bool) -> None:
        span = self._kept(end.call.span, end.call.caller) if is_notable else end.call.span
        if not span.is_recording():
            return
        asked = span_attributes.asked(self._telemetry, end.call.caller.identity, end.call.request)
        answered = span_attributes.answered(
            self._telemetry,
            end.attempt,
            end.usage,
            end.outcome,
            duration_s=end.duration_s,
            tpot_s=end.tpot_s,
        )
        self._telemetry.end(
            span,
            end_s=end.monotonic_s,
            attributes=asked.attributes | answered.attributes,
            details=asked.details | answered.details,
            error=end.outcome.name if end.outcome.is_failure else "",
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, ValueError):
        return False


def _gen_ai_labels(request: GenerationRequest, model: str) -> dict[str, str]:
    return {
        "gen_ai_operation_name": span_attributes.operation(request),
        "gen_ai_provider_name": genai.PROVIDER,
        "gen_ai_request_model": model,
        "gen_ai_response_model": model,
    }


def _slices(end: Ended) -> dict[str, str]:
    """Labels of the times to a token, but for model and tier."""
    attempt, usage = end.attempt, end.usage
    return {
        "tenant": end.call.caller.identity.tenant,
        "revision": attempt.info.revision,
        "prompt_bucket": length_bucket(usage.prompt_tokens),
        "cache": "hit" if usage.cached_prompt_tokens else "miss",
        "guided": str(end.call.request.response_format is not None).lower(),
        "speculative": str(attempt.meter.statistics.drafted_tokens > 0).lower(),
        "adapter": attempt.info.adapter,
        "pool": attempt.pool,
    }


def _work_of(attempt: Attempt) -> OwnRequest:
    return OwnRequest(attempt.call.caller.identity.request_id, attempt.engine, attempt.meter)


def _accepted(attempt: Attempt) -> dict[str, Any]:
    """What the ledger keeps of a request as it was accepted."""
    call, info = attempt.call, attempt.info
    caller, request = call.caller, call.request
    form = request.response_format
    return {
        "request_id": caller.identity.request_id,
        "client_request_id": caller.client_request_id,
        "num_retries": caller.num_retries,
        "tenant": caller.identity.tenant,
        "key_id": caller.identity.key_id,
        "tier": call.tier.name,
        "model": info.model,
        "revision": info.revision,
        "face": request.face,
        "guided": "" if form is None else span_attributes.GUIDED_KINDS[type(form)],
        "adapter": info.adapter,
        "num_choices": info.num_choices,
        "labels": request.metadata,
    }


def _entry(end: Ended) -> FinishedRequest:
    usage, attempt = end.usage, end.attempt
    took = attempt.meter.statistics
    return FinishedRequest(
        **_accepted(attempt),
        entry_id=attempt.entry.entry_id,
        ended_unix_ms=round(end.unix_s * 1000),
        outcome=end.outcome.name,
        path=path_of(end),
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        candidate_tokens=usage.candidate_tokens,
        unclaimed_tokens=max(0, attempt.stream.num_generated - usage.billed_tokens),
        reasoning_tokens=usage.reasoning_tokens,
        num_engines_lost=attempt.stream.num_losses,
        speculative_waste_tokens=took.drafted_tokens - took.accepted_tokens,
        recomputed_tokens=took.recomputed_tokens,
        num_preemptions=took.num_preemptions,
        engine_time=attempt.stream.engine_time,
        grammar_ms=took.grammar_s * 1000,
        queue_ms=attempt.meter.first_token.queue_s * 1000,
        ttft_ms=None if usage.ttft is None else usage.ttft.total_s * 1000,
        duration_ms=end.duration_s * 1000,
    )


def path_of(end: Ended) -> str:
    """What a request took beside the plain way, in one order, as in "cached+guided"; "plain" if nothing."""
    took, stream = end.attempt.meter.statistics, end.attempt.stream
    taken = {
        "cached": end.usage.cached_prompt_tokens > 0,
        "guided": end.call.request.response_format is not None,
        "speculative": took.drafted_tokens > 0,
        "adapter": bool(end.attempt.info.adapter),
        "candidates": end.usage.candidate_tokens > 0,
        "preempted": took.num_preemptions > 0,
        "continued": stream.num_losses > 0,
    }
    return "+".join(name for name, is_taken in taken.items() if is_taken) or "plain"
