"""The moments that the core measured become spans under the gateway's."""

from __future__ import annotations

import json
from typing import get_args, get_type_hints

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engine.service.metrics import RequestTrace
from engine.service.neighbours import RecentWork
from engine.speculation_config import SpeculationConfig
from engine.types import (
    GRAMMAR_DRAFTS,
    ChoiceHistory,
    FinishReason,
    FirstTokenTimings,
    Request,
    RequestFailure,
    SamplingParams,
    TokenEvent,
)
from observability.emit import drafts
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import RemoteSpan, Telemetry

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
REQUEST = Request(
    request_id=1,
    external_id="r-1",
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(),
    tenant="acme",
    tier="gold",
    arrival_s=100.0,
    traceparent=f"00-{TRACE}-{PARENT}-01",
)


def spans_of(*events: TokenEvent, recent: RecentWork | None = None) -> dict[str, list]:  # type: ignore[type-arg]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry("engine", ObservabilityConfig(), provider)
    trace = RequestTrace(telemetry, REQUEST, "engine-1", recent or RecentWork())
    for event in events:
        trace.observe(event, 103.0)
    trace.end(events[-1], 103.0, sum(len(event.token_ids) for event in events))
    found: dict[str, list] = {}  # type: ignore[type-arg]
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def seconds(span) -> float:  # type: ignore[no-untyped-def]
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_one_span_with_its_parts_below() -> None:
    first = FirstTokenTimings(
        arrival_s=100.0,
        first_scheduled_s=100.5,
        prefill_end_s=101.25,
        first_token_s=101.5,
        cached_prompt_tokens=0,
        prefill_chunks=((100.5, 101.0, 2), (101.0, 101.25, 1)),
    )
    statistics = ChoiceHistory(
        decode_s=1.5,
        num_preemptions=1,
        absences_s=((102.0, 102.5),),
        comebacks_s=((102.5, 102.75, 12),),
        restores_s=((102.5, 102.625, 16),),
        renewals_s=((102.75, 103.0, 32),),
        delayed_by_s={"preemption": 0.5},
    )
    spans = spans_of(
        TokenEvent(request_id=1, token_ids=(7,), first_token=first),
        TokenEvent(request_id=1, token_ids=(8,), finish_reason=FinishReason.STOP, statistics=statistics),
    )
    (request,) = spans["engine.request"]
    assert request.kind is SpanKind.SERVER, "service maps draw an edge to it from the gateway"
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    details = json.loads(request.attributes["millrace.details"])
    assert details["millrace.outcome"] == "stop"
    assert details["millrace.output_tokens"] == 2
    expected = {"engine.queue": [0.5], "engine.prefill": [0.5, 0.25], "engine.first_decode": [0.25]}
    expected |= {"engine.decode": [1.5], "engine.preempted": [0.5]}
    expected |= {"engine.resumed": [0.25], "engine.offload": [0.125], "engine.renewed": [0.25]}
    for name, durations in expected.items():
        assert [round(seconds(span), 3) for span in spans[name]] == durations
        assert all(span.parent.span_id == request.context.span_id for span in spans[name])
    assert list(spans["engine.decode"][0].attributes["millrace.delayed_by"]) == ["preemption"]
    assert spans["engine.resumed"][0].attributes["millrace.recomputed_tokens"] == 12
    assert spans["engine.offload"][0].attributes["millrace.restored_tokens"] == 16
    assert spans["engine.renewed"][0].attributes["millrace.recomputed_tokens"] == 32


def test_every_method_that_drafts_has_attributes_of_its_own() -> None:
    methods = get_args(get_type_hints(SpeculationConfig)["method"])
    assert set(drafts.PROPOSERS) == {*methods, GRAMMAR_DRAFTS} - {"off"}


def test_lost_time_links_to_those_whose_work_took_it() -> None:
    """A prefill during the decode is linked for the one cause, a place during the wait for the other."""
    recent = RecentWork()
    traces = {name: f"{number:032x}" for number, name in enumerate(("holder", "long", "past"), start=1)}
    contexts = {
        name: RemoteSpan(f"00-{trace}-{PARENT}-01").get_span_context() for name, trace in traces.items()
    }
    recent.prefilled(contexts["past"], 90.0, 91.0).end_s = 95.0
    recent.prefilled(contexts["holder"], 99.0, 99.9).end_s = 100.5
    recent.prefilled(contexts["long"], 101.5, 102.75)
    first = FirstTokenTimings(
        arrival_s=100.0,
        first_scheduled_s=100.5,
        prefill_end_s=101.0,
        first_token_s=101.0,
        cached_prompt_tokens=0,
        prefill_chunks=((100.5, 101.0, 3),),
    )

    def linked(delayed_by_s: dict[str, float]) -> dict[str, tuple[str, float]]:
        statistics = ChoiceHistory(decode_s=2.0, delayed_by_s=delayed_by_s)
        spans = spans_of(
            TokenEvent(request_id=1, token_ids=(7,), first_token=first),
            TokenEvent(request_id=1, finish_reason=FinishReason.STOP, statistics=statistics),
            recent=recent,
        )
        (decode,) = spans["engine.decode"]
        return {
            f"{link.context.trace_id:032x}": (
                link.attributes["millrace.link.cause"],
                link.attributes["millrace.link.overlap_ms"],
            )
            for link in decode.links
        }

    assert linked({}) == {}
    assert linked({"long_prefill": 0.001, "batch_full": 0.001}) == {}
    assert linked({"long_prefill": 1.25}) == {traces["long"]: ("long_prefill", 1250.0)}
    both = linked({"batch_full": 0.5, "long_prefill": 1.25})
    assert both[traces["holder"]] == ("batch_full", 500.0)
    assert both[traces["long"]] == ("long_prefill", 1250.0)
    assert traces["past"] not in both


def test_a_failure_marks_the_request() -> None:
    failure = RequestFailure(reason="STEP_FAILED", message="no device")
    spans = spans_of(TokenEvent(request_id=1, finish_reason=FinishReason.ERROR, failure=failure))
    (request,) = spans["engine.request"]
    assert not request.status.is_ok
    assert json.loads(request.attributes["millrace.details"])["millrace.outcome"] == "STEP_FAILED"
