"""Our bytes against the generated classes of OpenTelemetry's own definition."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceState

from observability.decode import decode
from observability.otlp import MalformedOtlp, count_spans, encode, encode_resource, encode_span
from observability.recorder import SpanRecorder
from observability.spans import Lineage, RecordedSpan

_RESOURCE = encode_resource({"service.name": "gateway", "service.namespace": "millrace"})
_VALUES = st.one_of(
    st.text(max_size=100),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=5), max_size=3),
    # Equal as keys of a dictionary, and different on the wire.
    st.sampled_from((0, 1, True, False, 0.0, 1.0, -0.0, "1")),
)
_ATTRIBUTES = st.dictionaries(st.sampled_from(("a", "b", "k" * 200)), _VALUES)


@pytest.fixture(scope="module")
def recorder() -> Any:
    made = SpanRecorder(lambda spans, timeout_s: True, lambda context: {}, delay_s=1000.0)
    yield made
    made.shutdown()


def _parsed(*spans: RecordedSpan) -> Any:
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(
        encode(map(encode_span, spans), _RESOURCE)
    )
    (group,) = request.resource_spans
    assert [pair.value.string_value for pair in group.resource.attributes] == ["gateway", "millrace"]
    (scope,) = group.scope_spans
    assert scope.scope.name == "millrace"
    return scope.spans


def _span(recorder: SpanRecorder, **fields: Any) -> RecordedSpan:
    lineage = Lineage(
        fields.pop("trace_id", 7), fields.pop("trace_state", None), fields.pop("identity", None)
    )
    made = {
        "name": "x",
        "span_id": 8,
        "parent_id": 0,
        "kind": SpanKind.INTERNAL,
        "attributes": {},
        "links": (),
        "start_ns": 1,
    }
    span = RecordedSpan(recorder, lineage, **{**made, **fields})
    span.end_ns = 2
    return span


@settings(max_examples=200, deadline=None)
@given(attributes=_ATTRIBUTES, inherited=_ATTRIBUTES)
def test_attributes_are_read_as_they_were_written(
    recorder: SpanRecorder, attributes: dict[str, Any], inherited: dict[str, Any]
) -> None:
    span = _span(recorder, attributes=attributes, identity=inherited)
    (stored,) = decode(encode([encode_span(span)], _RESOURCE))
    expected = {**inherited, **attributes}
    assert stored.attributes == expected
    assert {key: type(value) for key, value in stored.attributes.items()} == {
        key: type(value) for key, value in expected.items()
    }


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from(SpanKind),
)
def test_ids_kinds_and_times(
    recorder: SpanRecorder, trace_id: int, span_id: int, parent_id: int, kind: SpanKind
) -> None:
    (sent,) = _parsed(
        _span(recorder, trace_id=trace_id, span_id=span_id, parent_id=parent_id, kind=kind, start_ns=span_id)
    )
    assert int.from_bytes(sent.trace_id, "big") == trace_id
    assert int.from_bytes(sent.span_id, "big") == span_id
    assert int.from_bytes(sent.parent_span_id, "big") == parent_id
    assert sent.kind == kind.value + 1
    assert sent.start_time_unix_nano == span_id
    assert sent.end_time_unix_nano == 2


def test_events_links_state_and_status(recorder: SpanRecorder) -> None:
    span = _span(
        recorder,
        trace_state=TraceState([("vendor", "1")]),
        links=(Link(SpanContext(5, 6, False), {"why": "long_prefill"}),),
    )
    span.end_ns = 0
    span.set_status(Status(StatusCode.ERROR, "lost"))
    span.add_event("exception", {"exception.type": "ValueError"}, 17)
    span.end(3)
    (sent,) = _parsed(span)
    assert sent.trace_state == "vendor=1"
    (link,) = sent.links
    assert (int.from_bytes(link.trace_id, "big"), int.from_bytes(link.span_id, "big")) == (5, 6)
    assert link.attributes[0].value.string_value == "long_prefill"
    (event,) = sent.events
    assert (event.name, event.time_unix_nano) == ("exception", 17)
    assert event.attributes[0].value.string_value == "ValueError"
    assert (sent.status.message, sent.status.code) == ("lost", StatusCode.ERROR.value)


@pytest.mark.parametrize("count", [0, 1, 3, 700])
def test_spans_are_counted_without_being_read(recorder: SpanRecorder, count: int) -> None:
    spans = [_span(recorder, attributes={"text": "x" * (number % 300)}) for number in range(count)]
    assert count_spans(encode(map(encode_span, spans), _RESOURCE)) == count


def test_counting_passes_over_fields_it_does_not_know() -> None:
    request = trace_service_pb2.ExportTraceServiceRequest()
    request.resource_spans.add(schema_url="https://example.org").scope_spans.add(schema_url="s").spans.add()
    # Field 1000 with three bytes, at the top.
    assert count_spans(b"\xc2\x3e\x03abc" + request.SerializeToString()) == 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedOtlp):
        assert count_spans(data) >= 0
    list(decode(data))
