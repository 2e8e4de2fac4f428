"""Identity, propagation and times of spans, as an exporter sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.trace import StatusCode

from observability import names, tracing
from observability.clock import unix_ns
from observability.config import ObservabilityConfig
from observability.otlp import encode_span
from observability.recorder import SpanRecorder
from observability.spans import RecordedSpan
from observability.tracing import RequestIdentity, Telemetry


class Exported:
    """Keeps what a recorder exports."""

    def __init__(self) -> None:
        self._spans: list[RecordedSpan] = []
        self.recorder = SpanRecorder(self._take, tracing.identity_attributes, keep=lambda span: span)

    def _take(self, spans: Sequence[RecordedSpan], timeout_s: float) -> bool:
        self._spans += spans
        return True

    @property
    def spans(self) -> list[RecordedSpan]:
        """Spans that have ended."""
        assert self.recorder.force_flush()
        return self._spans


@pytest.fixture
def exporter() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.recorder.shutdown()


@pytest.fixture
def telemetry(exporter: Exported) -> Telemetry:
    return Telemetry("gateway", ObservabilityConfig(), exporter.recorder)


def _by_name(exporter: Exported) -> dict[str, RecordedSpan]:
    return {span.name: span for span in exporter.spans}


def test_every_span_carries_the_identity_however_it_is_made(telemetry: Telemetry, exporter: Exported) -> None:
    identity = RequestIdentity("r-1", client_request_id="mine", tenant="acme", tier="gold")
    context = tracing.with_identity(identity)
    root = telemetry.start(names.GATEWAY_REQUEST, parent=context)
    under = telemetry.under(root, context)
    with telemetry.span(names.GATEWAY_PREPARE, parent=under):
        assert tracing.current_identity() == identity
        with telemetry.span(names.GATEWAY_ROUTE):
            pass
    telemetry.record(names.GATEWAY_ADMIT, start_s=1.0, end_s=2.0, parent=under)
    telemetry.end(root)
    spans = exporter.spans
    assert len(spans) == 4
    for span in spans:
        assert span.lineage.identity == identity.attributes()


def test_spans_below_spans_carry_the_callers_trace_and_the_identity(
    telemetry: Telemetry, exporter: Exported
) -> None:
    identity = RequestIdentity("r-1", client_request_id="mine", tenant="acme", tier="gold")
    remote = tracing.remote_span(f"00-{'a' * 32}-{'b' * 16}-01", "", identity)
    request = telemetry.start(names.ENGINE_REQUEST, parent=remote)
    telemetry.record(names.ENGINE_QUEUE, start_s=1.0, end_s=2.0, parent=request)
    with telemetry.span(names.ENGINE_PREFILL, parent=request):
        telemetry.end(telemetry.start(names.ENGINE_FIRST_DECODE))
    telemetry.end(request)
    spans = _by_name(exporter)
    parents = {name: span.parent_id for name, span in spans.items()}
    own = {name: span.span_id for name, span in spans.items()}
    assert parents == {
        names.ENGINE_REQUEST: 0xBBBBBBBBBBBBBBBB,
        names.ENGINE_QUEUE: own[names.ENGINE_REQUEST],
        names.ENGINE_PREFILL: own[names.ENGINE_REQUEST],
        names.ENGINE_FIRST_DECODE: own[names.ENGINE_PREFILL],
    }
    for span in spans.values():
        assert span.lineage.trace_id == int("a" * 32, 16)
        assert span.lineage.identity == identity.attributes()


def test_below_a_trace_that_is_not_recorded_nothing_is_and_its_context_goes_on(
    telemetry: Telemetry, exporter: Exported
) -> None:
    header = f"00-{'a' * 32}-{'b' * 16}-00"
    request = telemetry.start(names.ENGINE_REQUEST, parent=tracing.remote_span(header))
    telemetry.record(names.ENGINE_QUEUE, start_s=1.0, end_s=2.0, parent=request, error="lost")
    with telemetry.span(names.ENGINE_PREFILL, parent=request) as below:
        assert tracing.traceparent_of(below)[0] == header
        telemetry.end(telemetry.start(names.ENGINE_FIRST_DECODE))
    telemetry.end(request)
    assert exporter.spans == []
    assert tracing.traceparent_of(request)[0] == header


def test_a_callers_state_goes_on(telemetry: Telemetry) -> None:
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    span = telemetry.start(names.ENGINE_REQUEST, parent=tracing.remote_span(header, "vendor=1"))
    assert tracing.traceparent_of(span)[1] == "vendor=1"
    telemetry.end(span)


def test_recorded_spans_have_the_given_times_and_never_end_before_they_start(
    telemetry: Telemetry, exporter: Exported
) -> None:
    now_s = time.monotonic()
    telemetry.record(names.ENGINE_QUEUE, start_s=now_s - 2, end_s=now_s - 1)
    telemetry.record(names.ENGINE_PREFILL, start_s=now_s, end_s=now_s - 1)
    spans = _by_name(exporter)
    queue = spans[names.ENGINE_QUEUE]
    assert queue.end_ns - queue.start_ns == pytest.approx(1e9, abs=1e6)
    assert queue.end_ns == pytest.approx(unix_ns(now_s - 1), abs=1e7)
    prefill = spans[names.ENGINE_PREFILL]
    assert prefill.end_ns >= prefill.start_ns - 1e6


def test_a_traceparent_makes_the_next_service_a_child(telemetry: Telemetry, exporter: Exported) -> None:
    parent = telemetry.start(names.GATEWAY_REQUEST)
    traceparent, _ = tracing.traceparent_of(parent)
    telemetry.record(
        names.ENGINE_REQUEST, start_s=0, end_s=1, parent=tracing.context_from_traceparent(traceparent)
    )
    telemetry.end(parent)
    child = _by_name(exporter)[names.ENGINE_REQUEST]
    assert child.parent_id == parent.get_span_context().span_id
    assert child.lineage.trace_id == parent.get_span_context().trace_id


@pytest.mark.parametrize("header", ["", "nonsense", "00-zz-zz-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_bad_traceparent_starts_a_new_trace(telemetry: Telemetry, exporter: Exported, header: str) -> None:
    telemetry.record(
        names.ENGINE_REQUEST, start_s=0, end_s=1, parent=tracing.context_from_traceparent(header)
    )
    assert _by_name(exporter)[names.ENGINE_REQUEST].parent_id == 0
    assert not tracing.span_context_of(header).is_valid


def test_an_exception_marks_the_span_but_its_message_stays_out(
    telemetry: Telemetry, exporter: Exported
) -> None:
    with pytest.raises(ValueError), telemetry.span(names.GATEWAY_PREPARE):
        raise ValueError("the client's own words")
    span = _by_name(exporter)[names.GATEWAY_PREPARE]
    assert span.status is not None
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError"
    assert b"words" not in encode_span(span)


def test_without_an_endpoint_nothing_is_recorded_and_the_callers_context_passes_through() -> None:
    telemetry = Telemetry("gateway", ObservabilityConfig(), None)
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    span = telemetry.start(names.GATEWAY_REQUEST, parent=tracing.context_from_traceparent(header))
    assert not span.is_recording()
    assert tracing.traceparent_of(span)[0] == header
    telemetry.end(span)
    telemetry.shutdown()


def test_seeding_the_global_generator_does_not_repeat_ids(telemetry: Telemetry, exporter: Exported) -> None:
    import random

    for _ in range(2):
        random.seed(0)
        telemetry.record(names.ENGINE_REQUEST, start_s=0, end_s=1)
    first, second = exporter.spans
    assert first.lineage.trace_id != second.lineage.trace_id


def test_semconv_generation_follows_the_standard_variable_unless_configured() -> None:
    opted_in = {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental"}
    assert ObservabilityConfig().semconv_generation({}) == "v1.36"
    assert ObservabilityConfig().semconv_generation(opted_in) == "latest"
    assert ObservabilityConfig(semconv="both").semconv_generation(opted_in) == "both"
