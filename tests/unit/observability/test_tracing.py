"""Identity, propagation and times of spans, as an exporter sees them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import OwnRandomIds, RequestIdentity, Telemetry, unix_ns


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    provider = TracerProvider(id_generator=OwnRandomIds())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry("gateway", ObservabilityConfig(), provider)


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def _ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def _parent_id(span: ReadableSpan) -> int:
    return span.parent.span_id if span.parent else 0


def _attributes(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


def _times_ns(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_every_span_carries_the_identity_however_it_is_made(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    identity = RequestIdentity("r-1", client_request_id="mine", tenant="acme", tier="gold")
    context = tracing.with_identity(identity)
    root = telemetry.start(names.GATEWAY_REQUEST, parent=context)
    under = trace.set_span_in_context(root, context)
    with telemetry.span(names.GATEWAY_PREPARE, parent=under):
        assert tracing.current_identity() == identity
        with telemetry.span(names.GATEWAY_ROUTE):
            pass
    telemetry.record(names.GATEWAY_ADMIT, start_s=1.0, end_s=2.0, parent=under)
    telemetry.end(root)
    spans = exporter.get_finished_spans()
    assert len(spans) == 4
    for span in spans:
        assert _attributes(span) == identity.attributes()


def test_spans_below_spans_carry_the_callers_trace_and_the_identity(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    identity = RequestIdentity("r-1", client_request_id="mine", tenant="acme", tier="gold")
    remote = tracing.RemoteSpan(f"00-{'a' * 32}-{'b' * 16}-01", "", identity)
    request = telemetry.start(names.ENGINE_REQUEST, parent=remote)
    telemetry.record(names.ENGINE_QUEUE, start_s=1.0, end_s=2.0, parent=request)
    with telemetry.span(names.ENGINE_PREFILL, parent=request):
        telemetry.end(telemetry.start(names.ENGINE_FIRST_DECODE))
    telemetry.end(request)
    spans = _by_name(exporter)
    parents = {name: _parent_id(span) for name, span in spans.items()}
    own = {name: _ids(span)[1] for name, span in spans.items()}
    assert parents == {
        names.ENGINE_REQUEST: 0xBBBBBBBBBBBBBBBB,
        names.ENGINE_QUEUE: own[names.ENGINE_REQUEST],
        names.ENGINE_PREFILL: own[names.ENGINE_REQUEST],
        names.ENGINE_FIRST_DECODE: own[names.ENGINE_PREFILL],
    }
    for span in spans.values():
        assert _ids(span)[0] == int("a" * 32, 16)
        assert _attributes(span) == identity.attributes()


def test_below_a_trace_that_is_not_recorded_nothing_is_and_the_next_service_is_told_so(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    parent = tracing.RemoteSpan(f"00-{'a' * 32}-{'b' * 16}-00")
    request = telemetry.start(names.ENGINE_REQUEST, parent=parent)
    telemetry.record(names.ENGINE_QUEUE, start_s=1.0, end_s=2.0, parent=request, error="lost")
    telemetry.step(names.ENGINE_PREFILL, of=request, start_s=1.0, end_s=1.0)
    telemetry.step(names.ENGINE_DECODE, of=request, start_s=1.0, end_s=9.0)
    with telemetry.span(names.ENGINE_PREFILL, parent=request) as below:
        assert _parsed(tracing.traceparent_of(below)[0]) == ("a" * 32, 0)
        telemetry.end(telemetry.start(names.ENGINE_FIRST_DECODE))
    telemetry.end(request)
    assert exporter.get_finished_spans() == ()
    assert _parsed(tracing.traceparent_of(request)[0]) == ("a" * 32, 0)


def _parsed(traceparent: str) -> tuple[str, int]:
    """Trace id, and whether it is recorded."""
    _, trace_id, _, flags = traceparent.split("-")
    return trace_id, int(flags, 16) & 1


def test_short_steps_are_one_attribute_and_what_explains_something_is_a_span(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    identity = RequestIdentity("r-1", tenant="acme")
    request = telemetry.start(names.GATEWAY_REQUEST, parent=tracing.RemoteSpan("", "", identity))
    start_s, long_s = time.monotonic(), names.LONG_MS / 1000
    short = {"of": request, "start_s": start_s, "end_s": start_s + long_s / 2}
    telemetry.step(names.GATEWAY_RESERVE, **short, attributes={names.POOL: "a"})  # type: ignore[arg-type]
    telemetry.step(names.GATEWAY_ADMIT, **short, error="refused")  # type: ignore[arg-type]
    telemetry.step(names.ENGINE_DECODE, **short, is_notable=True)  # type: ignore[arg-type]
    telemetry.step(names.GATEWAY_ROUTE, of=request, start_s=start_s, end_s=start_s + 2 * long_s)
    telemetry.end(request)
    spans = _by_name(exporter)
    assert spans.keys() == {
        names.GATEWAY_REQUEST, names.GATEWAY_ADMIT, names.ENGINE_DECODE, names.GATEWAY_ROUTE
    }  # fmt: skip
    ((name, start_ns, duration_ms, attributes),) = json.loads(
        _attributes(spans[names.GATEWAY_REQUEST])[names.STEPS]
    )
    assert name == names.GATEWAY_RESERVE
    assert attributes == {names.POOL: "a"}
    assert duration_ms == pytest.approx(names.LONG_MS / 2)
    assert start_ns == pytest.approx(unix_ns(start_s), abs=1e7)
    for name in (names.GATEWAY_ADMIT, names.GATEWAY_ROUTE, names.ENGINE_DECODE):
        assert _parent_id(spans[name]) == _ids(spans[names.GATEWAY_REQUEST])[1]
        assert _attributes(spans[name])[names.REQUEST_ID] == "r-1"
    assert spans[names.GATEWAY_ADMIT].status.description == "refused"


def test_short_steps_below_the_callers_span_leave_nothing(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    parent = tracing.RemoteSpan(f"00-{'a' * 32}-{'b' * 16}-01")
    telemetry.step(names.GATEWAY_AUTHORIZE, of=parent, start_s=1.0, end_s=1.0)
    telemetry.step(names.GATEWAY_AUTHORIZE, of=parent, start_s=1.0, end_s=1.0, error="INVALID_CREDENTIALS")
    (refused,) = exporter.get_finished_spans()
    assert refused.status.description == "INVALID_CREDENTIALS"
    assert _parent_id(refused) == 0xBBBBBBBBBBBBBBBB


def test_a_callers_state_goes_on(telemetry: Telemetry) -> None:
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    span = telemetry.start(names.ENGINE_REQUEST, parent=tracing.RemoteSpan(header, "vendor=1"))
    assert tracing.traceparent_of(span)[1] == "vendor=1"
    telemetry.end(span)


def test_recorded_spans_have_the_given_times_and_never_end_before_they_start(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    now_s = time.monotonic()
    telemetry.record(names.ENGINE_QUEUE, start_s=now_s - 2, end_s=now_s - 1)
    telemetry.record(names.ENGINE_PREFILL, start_s=now_s, end_s=now_s - 1)
    spans = _by_name(exporter)
    queue = spans[names.ENGINE_QUEUE]
    start_ns, end_ns = _times_ns(queue)
    assert end_ns - start_ns == pytest.approx(1e9, abs=1e6)
    assert end_ns == pytest.approx(unix_ns(now_s - 1), abs=1e7)
    start_ns, end_ns = _times_ns(spans[names.ENGINE_PREFILL])
    assert end_ns >= start_ns - 1e6


def test_a_traceparent_makes_the_next_service_a_child(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    parent = telemetry.start(names.GATEWAY_REQUEST)
    traceparent, _ = tracing.traceparent_of(parent)
    telemetry.record(
        names.ENGINE_REQUEST, start_s=0, end_s=1, parent=tracing.context_from_traceparent(traceparent)
    )
    telemetry.end(parent)
    child = _by_name(exporter)[names.ENGINE_REQUEST]
    assert _parent_id(child) == parent.get_span_context().span_id
    assert _ids(child)[0] == parent.get_span_context().trace_id


@pytest.mark.parametrize("header", ["", "nonsense", "00-zz-zz-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_bad_traceparent_starts_a_new_trace(
    telemetry: Telemetry, exporter: InMemorySpanExporter, header: str
) -> None:
    telemetry.record(
        names.ENGINE_REQUEST, start_s=0, end_s=1, parent=tracing.context_from_traceparent(header)
    )
    assert _parent_id(_by_name(exporter)[names.ENGINE_REQUEST]) == 0
    assert not tracing.RemoteSpan(header).get_span_context().is_valid


def test_an_exception_marks_the_span_but_its_message_stays_out(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(ValueError), telemetry.span(names.GATEWAY_PREPARE):
        raise ValueError("the client's own words")
    span = _by_name(exporter)[names.GATEWAY_PREPARE]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError"
    assert "words" not in span.to_json()


def test_without_an_endpoint_nothing_is_recorded_and_the_callers_context_passes_through() -> None:
    telemetry = Telemetry("gateway", ObservabilityConfig(), None)
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    span = telemetry.start(names.GATEWAY_REQUEST, parent=tracing.context_from_traceparent(header))
    assert not span.is_recording()
    assert tracing.traceparent_of(span)[0] == header
    telemetry.end(span)
    telemetry.shutdown()


def test_seeding_the_global_generator_does_not_repeat_ids(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    for _ in range(2):
        random.seed(0)
        telemetry.record(names.ENGINE_REQUEST, start_s=0, end_s=1)
    first, second = map(_ids, exporter.get_finished_spans())
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_semconv_generation_follows_the_standard_variable_unless_configured() -> None:
    opted_in = {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental"}
    assert ObservabilityConfig().semconv_generation({}) == "v1.36"
    assert ObservabilityConfig().semconv_generation(opted_in) == "latest"
    assert ObservabilityConfig(semconv="both").semconv_generation(opted_in) == "both"
