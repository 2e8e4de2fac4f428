"""The engine's metrics, from what the core reports after every step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata

import msgspec
import psutil
from opentelemetry.trace import Link, SpanKind

from contract.outputs import NUMBERS
from engine.core import messages
from engine.service.neighbours import RecentWork, Work
from engine.types import (
    GRAMMAR_DRAFTS,
    BlocksEvicted,
    ChoiceHistory,
    DiskCounters,
    FinishReason,
    FirstTokenTimings,
    MemoryUse,
    Request,
    SchedulerCounters,
    SchedulerLoad,
    TokenEvent,
)
from engine.types.experts import ExpertSpread
from engine.types.hand_over import HandOverCounters
from observability.emit import drafts, experts, hand_overs, names, retention
from observability.emit.metrics import NO_EXEMPLAR, Metrics
from observability.emit.names import Metric, SpanName
from observability.emit.tracing import RemoteSpan, RequestIdentity, Telemetry

# The engine's part of a request's trace, written when it ends from the moments that the core measured.

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
        # Its own batch slot, once it had one.
        self._place: Work | None = None
        self._first: FirstTokenTimings | None = None

    def observe(self, event: TokenEvent, now: float) -> None:
        """Takes in an event that has more than tokens; the first token's timings become spans at once."""
        if event.first_token is not None:
            self._first = event.first_token
            self._record_first_token(event.first_token)
        if event.statistics is not None and event.failure is None and self._first is not None:
            self._record_decode(event.choice_index, event.statistics, now)

    def end(self, event: TokenEvent, now: float, num_output_tokens: int) -> None:
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
            names.OUTPUT_TOKENS: num_output_tokens,
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
        if statistics.drafts:
            attributes[drafts.DRAFTERS] = list(statistics.drafts)
        for drafter, (drafted, accepted) in statistics.drafts.items():
            attributes[drafts.DRAFTED_BY[drafter]] = drafted
            attributes[drafts.ACCEPTED_BY[drafter]] = accepted
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
        """Times out of the batch, the returns, blocks brought back from host memory, and renewals."""
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
        lost += [
            (retention.ENGINE_RENEWED, start_s, end_s, {names.RECOMPUTED_TOKENS: tokens})
            for start_s, end_s, tokens in statistics.renewals_s
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


# Reasons for which a client, and not the model, ended a request.
_CANCELLED = {FinishReason.CANCELLED: "cancelled", FinishReason.DEADLINE: "deadline"}

# Failures of requests that are not the client's doing, by reason.
_FAILURES = {"STEP_FAILED": names.STEP_FAILURES, "POISONED_REQUEST": names.ISOLATED}
_FROM_ZERO = (
    *(*_FAILURES.values(), names.FAILED_STEPS, names.STEP_HALVINGS, names.EVICTIONS),
    *(names.GRAMMAR_SECONDS, names.MODEL_FLOP, names.MODEL_READ),
)

# Metric and labels of each number that the scheduler counts.
_COUNTERS: tuple[tuple[Metric, dict[str, str], str], ...] = (
    (names.PREEMPTIONS, {}, "num_preemptions"),
    (names.PREFIX_QUERIES, {}, "prefix_queried_tokens"),
    (names.PREFIX_HITS, {}, "prefix_hit_tokens"),
    (names.RECOMPUTED, {}, "recomputed_tokens"),
    (names.PROMPT_TOKENS_DONE, {"source": "computed"}, "computed_prompt_tokens"),
    (names.PROMPT_TOKENS_DONE, {"source": "cached"}, "prefix_hit_tokens"),
    (names.PROMPT_TOKENS_DONE, {"source": "restored"}, "restored_tokens"),
    (names.OFFLOADED, {"direction": "out"}, "offloaded_blocks"),
    (names.OFFLOADED, {"direction": "in"}, "restored_blocks"),
    (retention.RENEWALS, {}, "num_renewals"),
    (retention.RENEWAL_SECONDS, {}, "renewal_s"),
)

# The same where engines hand prompts over.
_HAND_OVER: tuple[tuple[Metric, dict[str, str], str], ...] = (
    (hand_overs.BLOCKS, {"direction": "out"}, "num_sent"),
    (hand_overs.BLOCKS, {"direction": "in"}, "num_received"),
    (hand_overs.BYTES, {"direction": "out"}, "sent_bytes"),
    (hand_overs.BYTES, {"direction": "in"}, "received_bytes"),
    (hand_overs.PULLS, {}, "num_pulls"),
    (hand_overs.SECONDS, {}, "pull_s"),
    (hand_overs.FAILURES, {"reason": "late"}, "num_late"),
)


def _resident_bytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.Error:
        return 0.0


class EngineMetrics:
    """Writes one engine's gauges and counters from its reports."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._counted = SchedulerCounters()
        self._adapter_labels: dict[str, str] = {}
        # Experts that have changed ranks.
        self._num_moves = 0
        # The method of speculation.
        self._drafter = "off"
        # Counters exist from the start: Prometheus does not see the first event of one that begins with it.
        for family in _FROM_ZERO:
            metrics.add(family, 0)
        for family, labels, _ in _COUNTERS:
            metrics.add(family, 0, **labels)
        for event in names.DISK_BLOCKS.values["event"]:
            metrics.add(names.DISK_BLOCKS, 0, event=event)
        self._count_drafts(GRAMMAR_DRAFTS, 0, 0)

    def ready(self, report: messages.Ready, model: str, core_pid: int) -> None:
        """What does not change while the engine runs, and the core's real memory, read at every scrape."""
        memory, self._drafter = report.memory, report.facts.drafter
        if self._drafter != "off":
            self._count_drafts(self._drafter, 0, 0)
        for stage, seconds in report.stages_s.items():
            self.metrics.set(names.STARTUP_SECONDS, seconds, stage=stage)
        for of in ("flop", "read_bytes"):
            if peak := getattr(report.facts.work, f"peak_{of}"):
                self.metrics.set(names.PEAK, peak, of=of)
        core = psutil.Process(core_pid)
        self.metrics.set_function(names.MEMORY_PLAN, lambda: _resident_bytes(core), part="resident")
        version = metadata.version("millrace")
        self.metrics.set(names.BUILD_INFO, 1, service=names.ENGINE, version=version, model=model)
        self.metrics.set(
            names.CACHE_INFO, 1, block_size=str(memory.block_size), num_blocks=str(memory.num_blocks)
        )
        # The endpoint picker wants the family even where no adapter is served.
        self.adapters(0, ())
        for part in ("weights", "workspace", "headroom", "kv_cache", "adapter"):
            self.metrics.set(names.MEMORY_PLAN, getattr(memory, f"{part}_bytes"), part=part)

    def adapters(self, num_slots: int, loaded: Sequence[str]) -> None:
        """Other adapters than before are in memory."""
        if self._adapter_labels:
            self.metrics.remove(names.ADAPTERS_INFO, **self._adapter_labels)
        self._adapter_labels = {
            "max_lora": str(num_slots),
            "running_lora_adapters": ",".join(loaded),
            "waiting_lora_adapters": "",
        }
        self.metrics.set(names.ADAPTERS_INFO, time.time(), **self._adapter_labels)

    def steps_done(self, steps: Sequence[tuple[messages.StepDone, Mapping[int, str]]]) -> None:
        """Takes in reports, at least one, each with the tiers of the requests that it names; the tier of
        one that is not known is "".
        """
        num_tokens: Counter[str] = Counter()
        for step, tiers in steps:
            for event in step.events:
                tier = tiers.get(event.request_id, "")
                num_tokens[tier] += len(event.token_ids)
                if event.first_token or event.statistics or event.finish_reason or event.failure:
                    self._record_event(event, tier)
            self._record_step(step)
        for tier, number in num_tokens.items():
            if number:
                self.metrics.add(names.GENERATED_TOKENS, number, tier=tier)
        # Gauges show the last one.
        self._record_load(steps[-1][0].load)

    def _record_step(self, step: messages.StepDone) -> None:
        for change in step.kv_events:
            if isinstance(change, BlocksEvicted):
                self.metrics.add(names.EVICTIONS, len(change.block_hashes))
        if step.memory is not None:
            self._record_memory(step.memory)
        if step.experts is not None:
            self._record_experts(step.experts)
        if step.num_failed_steps:
            self.metrics.add(names.FAILED_STEPS, step.num_failed_steps)
        for totals in step.totals:
            self.metrics.observe(names.STEP_SECONDS, totals.seconds, span=NO_EXEMPLAR, kind=totals.kind)
            if totals.kind == "failed":
                continue
            self.metrics.add(names.MODEL_FLOP, totals.flop)
            self.metrics.add(names.MODEL_READ, totals.read_bytes)
            self.metrics.observe(names.STEP_TOKENS, totals.num_tokens, span=NO_EXEMPLAR)
            self.metrics.observe(names.STEP_SEQUENCES, totals.num_sequences, span=NO_EXEMPLAR)
            if totals.num_halvings:
                self.metrics.add(names.STEP_HALVINGS, totals.num_halvings)
            if totals.saved_s or totals.spent_s:
                for kind, seconds in (("saved", totals.saved_s), ("spent", totals.spent_s)):
                    self.metrics.add(names.SPECULATION_SECONDS, seconds, kind=kind, method=self._drafter)

    def _record_memory(self, memory: MemoryUse) -> None:
        for part in ("weights", "kv_cache", "workspace"):
            self.metrics.set(names.MEMORY_USED, getattr(memory, f"{part}_bytes"), part=part)

    def _record_experts(self, spread: ExpertSpread) -> None:
        self.metrics.set(experts.IMBALANCE, spread.imbalance)
        self.metrics.add(experts.MOVES, spread.num_moves - self._num_moves)
        self._num_moves = spread.num_moves

    def _record_load(self, load: SchedulerLoad) -> None:
        metrics = self.metrics
        metrics.set(names.REQUESTS_RUNNING, load.num_running)
        metrics.set(names.REQUESTS_WAITING, load.num_waiting)
        metrics.set(names.OLDEST_WAIT, load.oldest_wait_s)
        metrics.set(names.PENDING_PREFILL, load.pending_prefill_tokens)
        used = load.num_total_blocks - load.num_free_blocks
        metrics.set(names.KV_USAGE, used / max(1, load.num_total_blocks))
        metrics.set(names.KV_BLOCKS, used, state="used")
        metrics.set(names.KV_BLOCKS, load.num_cached_blocks, state="cached")
        metrics.set(names.KV_BLOCKS, load.num_free_blocks - load.num_cached_blocks, state="free")
        self._record_counters(load.counters)

    def _record_counters(self, counters: SchedulerCounters) -> None:
        """Adds what happened since the last report; the core counts from its start."""
        before, self._counted = self._counted, counters
        for metric, labels, name in _COUNTERS:
            more = getattr(counters, name) - getattr(before, name)
            if more:
                self.metrics.add(metric, more, **labels)
        if counters.hand_over is not None:
            self._record_hand_over(counters.hand_over, before.hand_over or HandOverCounters())
        self.metrics.set(names.DISK_BYTES, 0 if counters.disk is None else counters.disk.num_bytes)
        if counters.disk is None:
            return
        earlier = before.disk or DiskCounters()
        for event in names.DISK_BLOCKS.values["event"]:
            more = getattr(counters.disk, f"num_{event}") - getattr(earlier, f"num_{event}")
            if more:
                self.metrics.add(names.DISK_BLOCKS, more, event=event)

    def _record_hand_over(self, now: HandOverCounters, before: HandOverCounters) -> None:
        for metric, labels, name in _HAND_OVER:
            self.metrics.add(metric, getattr(now, name) - getattr(before, name), **labels)
        for reason, number in now.failures.items():
            self.metrics.add(hand_overs.FAILURES, number - before.failures[reason], reason=reason)
        self.metrics.set(hand_overs.HELD, now.num_held_blocks)

    def _record_event(self, event: TokenEvent, tier: str) -> None:
        """What an event says beside its tokens."""
        if event.first_token is not None:
            parts = event.first_token.parts
            self.metrics.observe(names.QUEUE_SECONDS, parts.queue_s, span=NO_EXEMPLAR, tier=tier)
            self.metrics.observe(names.PREFILL_SECONDS, parts.prefill_s, span=NO_EXEMPLAR, tier=tier)
        if event.statistics is not None:
            for use, seconds in msgspec.structs.asdict(event.statistics.engine_time).items():
                self.metrics.add(names.ENGINE_SECONDS, seconds, use=use.removesuffix("_s"), tier=tier)
        if event.statistics is not None and event.failure is None:
            self._record_statistics(event.statistics, tier)
        if event.finish_reason in _CANCELLED:
            self.metrics.add(names.ENGINE_CANCELLED, reason=_CANCELLED[event.finish_reason])
        if event.failure is not None and event.failure.reason in _FAILURES:
            self.metrics.add(_FAILURES[event.failure.reason])

    def _count_drafts(self, method: str, drafted: int, accepted: int) -> None:
        self.metrics.add(names.DRAFTED, drafted, method=method)
        self.metrics.add(names.ACCEPTED, accepted, method=method)

    def _record_statistics(self, statistics: ChoiceHistory, tier: str) -> None:
        metrics = self.metrics
        metrics.observe(names.DECODE_SECONDS, statistics.decode_s, span=NO_EXEMPLAR, tier=tier)
        for drafter, (drafted, accepted) in statistics.drafts.items():
            self._count_drafts(drafter, drafted, accepted)
        metrics.add(names.GRAMMAR_SECONDS, statistics.grammar_s)
        if statistics.candidate_tokens:
            metrics.add(names.GENERATED_TOKENS, statistics.candidate_tokens, tier=tier)
        for cause, seconds in statistics.delayed_by_s.items():
            metrics.add(names.DELAYED_SECONDS, seconds, cause=cause, tier=tier)
