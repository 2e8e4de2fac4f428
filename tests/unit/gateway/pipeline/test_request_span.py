"""What the request's span and the conventions' metrics say of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from contract.chat import Conversation, Message, Role, TokenPrompt, ToolCall
from contract.outputs import FinishReason
from gateway.pipeline import transcript
from gateway.pipeline.delta import ChoiceDelta
from gateway.pipeline.transcript import Transcript
from gateway.text.delta import TextPart, ToolCallDelta
from observability.emit import genai, names
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import Telemetry
from tests.unit.gateway.pipeline.test_refunds import Leave, leave_over_grpc, leave_over_http
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

LABELS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "millrace",
    "gen_ai_request_model": "tiny",
    "gen_ai_response_model": "tiny",
}
REFUSED = LABELS | {"gen_ai_request_model": "", "gen_ai_response_model": ""}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def _telemetry(exporter: InMemorySpanExporter, *, capture_content: bool) -> Telemetry:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry("gateway", ObservabilityConfig(capture_content=capture_content), provider)


def _request_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name == names.GATEWAY_REQUEST]
    return span


def _attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


@pytest.mark.parametrize(("seed", "told"), [(7, 7), (2**63 - 1, 2**63 - 1), (2**64 - 1, str(2**64 - 1))])
async def test_every_seed_can_be_told(
    exporter: InMemorySpanExporter, seed: int, told: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A span's whole numbers end before seeds do."""
    engine = ScriptedEngine(reply=lambda submit, choice: encode("hello"))
    async with deployed(engine, telemetry=_telemetry(exporter, capture_content=False)) as stack:
        await stack.chat(seed=seed)
    span = _request_span(exporter)
    assert _attributes(span)[genai.SEED] == told
    encode_spans([span])
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
async def test_captured_content_has_the_conventions_form(
    exporter: InMemorySpanExporter, stream: bool
) -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("hello"))
    async with deployed(engine, telemetry=_telemetry(exporter, capture_content=True)) as stack:
        messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
        answer = await stack.chat(messages=messages, stream=stream)
        text = answer.text.removeprefix("data: ").split("\n")[0] if stream else answer.text
        answer_id = json.loads(text)["id"]
    attributes = _attributes(_request_span(exporter))
    assert attributes[genai.RESPONSE_ID] == answer_id
    assert json.loads(attributes[genai.INPUT_MESSAGES]) == [
        {"role": "system", "parts": [{"type": "text", "content": "short"}]},
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]},
    ]
    assert json.loads(attributes[genai.OUTPUT_MESSAGES]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "hello"}], "finish_reason": "length"}
    ]


async def test_content_stays_out_unless_it_is_asked_for_and_steps_are_told(
    exporter: InMemorySpanExporter,
) -> None:
    async with deployed(telemetry=_telemetry(exporter, capture_content=False)) as stack:
        assert (await stack.chat()).status_code == 200
    span = _request_span(exporter)
    # Service maps draw an edge to it from its caller.
    assert span.kind is SpanKind.SERVER
    assert not {genai.INPUT_MESSAGES, genai.OUTPUT_MESSAGES} & _attributes(span).keys()
    # On a busy machine a step may take long enough to be a span.
    told = {step[0] for step in json.loads(_attributes(span)[names.STEPS])} | {
        each.name for each in exporter.get_finished_spans()
    }
    assert told == {
        names.GATEWAY_REQUEST,
        names.GATEWAY_PREPARE,
        names.GATEWAY_RESERVE,
        names.GATEWAY_ADMIT,
        names.GATEWAY_ROUTE,
        names.GATEWAY_STREAM,
    }


@pytest.mark.parametrize("leave", [leave_over_http, leave_over_grpc])
async def test_a_client_that_leaves_is_told_alike_on_both_faces(
    exporter: InMemorySpanExporter, leave: Leave
) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    async with deployed(engine, telemetry=_telemetry(exporter, capture_content=False)) as stack:
        await leave(stack, engine)
        while stack.gateway.num_open:
            await asyncio.sleep(0.005)
        engine.gate.set()
    span = _request_span(exporter)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "CANCELLED")
    assert genai.FINISH_REASONS not in _attributes(span)


def _count(stack: Deployment, name: str, **labels: str) -> float | None:
    return stack.metrics.registry.get_sample_value(f"{name}_count", labels)


async def test_metrics_of_the_conventions() -> None:
    async with deployed() as stack:
        assert (await stack.chat(max_tokens=3)).status_code == 200
        assert (await stack.chat(model="nobody-serves-this")).status_code == 404
        assert (await stack.chat(temperature=99)).status_code == 400
        gateway, metrics = stack.gateway, stack
    assert gateway.num_open == 0
    assert _count(metrics, names.GEN_AI_DURATION.name, **LABELS, error_type="") == 1
    assert _count(metrics, names.GEN_AI_DURATION.name, **REFUSED, error_type="MODEL_NOT_FOUND") == 1
    assert _count(metrics, names.GEN_AI_DURATION.name, **LABELS, error_type="INVALID_ARGUMENT") == 1
    assert _count(metrics, names.GEN_AI_TTFT.name, **LABELS) == 1
    assert _count(metrics, names.GEN_AI_TPOT.name, **LABELS) == 1


def test_calls_and_their_results_are_parts() -> None:
    call = ToolCall(id="c1", name="add", arguments_json='{"a": 1}')
    prompt = Conversation(
        messages=(
            Message(role=Role.ASSISTANT, reasoning="hm", tool_calls=(call,)),
            Message(role=Role.TOOL, content="2", tool_call_id="c1"),
        )
    )
    assert json.loads(transcript.asked(prompt)) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
    ]
    assert transcript.asked(TokenPrompt((1, 2))) == ""


def test_an_answer_is_gathered_by_choice_and_the_deltas_stay_as_they_are() -> None:
    gathered = Transcript()
    pieces = [ToolCallDelta(0, "c1", "add", '{"a"'), ToolCallDelta(0, arguments=": 1")]
    deltas = [
        ChoiceDelta([*pieces[:1]], index=1),
        ChoiceDelta([TextPart("a")], index=0),
        ChoiceDelta([*pieces[1:]], index=1, finish_reason=FinishReason.TOOL_CALLS),
        ChoiceDelta([TextPart("b")], index=0),
    ]
    gathered.add(deltas)
    first, second = json.loads(gathered.answered())
    # Broken off.
    assert first == {
        "role": "assistant", "parts": [{"type": "text", "content": "ab"}], "finish_reason": "error"
    }  # fmt: skip
    # What is no JSON is told as the text that it is.
    assert second["parts"] == [{"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1'}]
    assert second["finish_reason"] == "tool_call"
    assert pieces[0].arguments == '{"a"'


@pytest.mark.parametrize("letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-4E00}", "\x01", '"'])
@pytest.mark.parametrize(
    ("num_messages", "num_calls", "length"),
    [(1, 0, 1_000_000), (3, 1, 100_000), (1_000, 0, 300), (1, 500, 300), (20, 20, 2_000)],
)
def test_captured_content_is_bounded_and_stays_in_form(
    num_messages: int, num_calls: int, length: int, letter: str
) -> None:
    calls = tuple(
        ToolCall(id=letter * length, name=letter * length, arguments_json='{"a": 1}')
        for _ in range(num_calls)
    )
    said = [
        Message(role=Role.ASSISTANT, content=f"{index}{letter * length}", tool_calls=calls)
        for index in range(num_messages)
    ]
    text = transcript.asked(Conversation(messages=(*said, Message(role=Role.USER, content="last"))))
    assert transcript.MAX_BYTES / 32 < len(text.encode()) <= transcript.MAX_BYTES
    told = json.loads(text)
    first = told[0]["parts"][0]
    assert first["type"] == "text"
    assert first["content"].startswith("0" + letter)
    assert told[-1] == {"role": "user", "parts": [{"type": "text", "content": "last"}]}
    assert "[cut: " in text


def test_captured_content_that_fits_is_whole() -> None:
    prompt = Conversation(messages=(Message(role=Role.USER, content="x" * 60_000),))
    assert json.loads(transcript.asked(prompt))[0]["parts"][0]["content"] == "x" * 60_000


def test_a_model_that_nobody_knows_is_told_in_part() -> None:
    asked = genai.of_generation({genai.REQUEST_MODEL: "x" * 1_000_000}, "both")
    assert asked[genai.REQUEST_MODEL] == "x" * 256


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize(
    ("body", "target_ms", "kept"),
    [
        ({}, 60_000, False),
        ({}, 1, True),
        ({"temperature": 9}, 60_000, True),
        ({"max_tokens": 0.5}, 60_000, False),
    ],
    ids=["plain", "slow", "refused", "unreadable"],
)
async def test_a_refusal_and_a_slow_request_are_kept_of_a_trace_that_is_not_recorded(
    exporter: InMemorySpanExporter, body: dict[str, Any], target_ms: int, kept: bool, share: float
) -> None:
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry("gateway", ObservabilityConfig(sample_ratio=share), provider)
    tables = {"tier": {"ttft_target_ms": target_ms}}
    async with deployed(ScriptedEngine(step_s=0.02), tables=tables, telemetry=telemetry) as stack:
        stack.http.headers["traceparent"] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
        await stack.chat(**body)
    found = [span for span in exporter.get_finished_spans() if span.name == names.GATEWAY_REQUEST]
    assert bool(found) == (kept and share > 0)
    for span in found:
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (
            0x4BF92F3577B34DA6A3CE929D0E0E4736,
            0xF067AA0BA902B7,
        )
        assert _attributes(span)[names.TENANT] == "acme"
        assert _attributes(span).get(names.OUTCOME) == ("INVALID_ARGUMENT" if body else None)
