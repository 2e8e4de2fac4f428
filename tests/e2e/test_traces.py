"""One trace per request, from Envoy to the engine's step, with the expected edges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from observability.analysis.decode import StoredSpan, decode
from observability.analysis.store import SpanReader
from observability.emit import names
from tests.e2e.stack import Stack, eventually, running_stack
from tests.unit.observability.receivers import RECEIVERS, Received

# Child to parent, by span name; None is the root.
EDGES = {
    names.GATEWAY_REQUEST: names.ENVOY_INGRESS,
    names.GATEWAY_PREPARE: names.GATEWAY_REQUEST,
    names.TOKENIZER_PREPARE: names.GATEWAY_REQUEST,
    names.TOKENIZER_RENDER: names.TOKENIZER_PREPARE,
    names.TOKENIZER_ENCODE: names.TOKENIZER_PREPARE,
    names.ENGINE_QUEUE: names.ENGINE_REQUEST,
    names.ENGINE_PREFILL: names.ENGINE_REQUEST,
    names.ENGINE_FIRST_DECODE: names.ENGINE_REQUEST,
}


@pytest.fixture
def request_id(client: openai.OpenAI, stack: Stack) -> str:
    response = client.chat.completions.with_raw_response.create(
        model=stack.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
    )
    return str(response.headers["x-request-id"])


def test_trace_has_the_expected_edges(stack: Stack, request_id: str) -> None:
    spans = stack.trace(request_id, [*EDGES, names.ENGINE_REQUEST, names.GATEWAY_STREAM])
    assert len({span.trace_id for span in spans}) == 1
    by_id = {span.span_id: span for span in spans}

    def ancestors(name: str) -> list[str]:
        span = next(span for span in spans if span.name == name)
        chain = []
        while span.parent_id in by_id:
            span = by_id[span.parent_id]
            chain.append(span.name if span.service != names.ENVOY else str(names.ENVOY_INGRESS))
        return chain

    for child, parent in EDGES.items():
        assert parent in ancestors(child), (child, ancestors(child))
    assert names.GATEWAY_REQUEST in ancestors(names.ENGINE_REQUEST)
    assert {span.service for span in spans} >= set(names.SERVICES)


def test_every_span_says_which_request(stack: Stack, request_id: str) -> None:
    spans = stack.trace(request_id, list(EDGES))
    ours = [span for span in spans if span.service != names.ENVOY]
    assert not [span.name for span in ours if span.request_id != request_id]


def test_a_client_does_not_decide_whether_its_request_is_traced(client: openai.OpenAI, stack: Stack) -> None:
    for index, flags in enumerate(("00", "01")):
        trace_id = f"{index + 1:032x}"
        response = client.chat.completions.with_raw_response.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=2,
            extra_headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-{flags}"},
        )
        spans = stack.trace(str(response.headers["x-request-id"]), list(EDGES))
        # Its own trace goes on all the same.
        assert {span.trace_id for span in spans} == {trace_id}


def test_waterfall_in_the_terminal(stack: Stack, request_id: str) -> None:
    stack.trace(request_id, list(EDGES))
    shown = subprocess.run(
        [sys.executable, "-m", "services.cli", "trace", request_id],
        env={"MILLRACE_STATE_DIR": str(stack.directory), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for word in (request_id, "engine.prefill", "tokenizer.prepare", "time to the first token"):
        assert word in shown, shown


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_receiver_named_by_the_environment_gets_every_process_and_so_does_the_local_store(
    tmp_path: Path, protocol: str
) -> None:
    with RECEIVERS[protocol]() as received:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        with (
            running_stack(tmp_path, "--simulated", environment=environment) as stack,
            stack.openai() as client,
        ):
            answer = client.chat.completions.with_raw_response.create(
                model=stack.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=2
            )
            request_id = str(answer.headers["x-request-id"])
            assert eventually(lambda: _services(received, request_id) >= set(names.SERVICES))
            reader = SpanReader(Path(stack.state.trace_store))
            stored = {*names.SERVICES} - {names.ENVOY}
            assert eventually(lambda: {span.service for span in _found(reader, request_id)} == stored)
        assert {each["deployment.environment.name"] for each in received.resources} == {"test"}
        assert len({each["service.instance.id"] for each in received.resources}) == len(names.SERVICES)


def _services(received: Received, request_id: str) -> set[str]:
    """Whose spans of the request's one trace have come."""
    spans = [
        span
        for message in received.messages
        for span in decode(message.SerializeToString())
        if span.request_id == request_id
    ]
    assert len({span.trace_id for span in spans}) <= 1
    return {span.service for span in spans}


def _found(reader: SpanReader, request_id: str) -> list[StoredSpan]:
    return [span for trace in reader.traces_of_request(request_id) for span in reader.trace(trace)]
