"""Every one of 200 requests leaves a whole trace: exported over OTLP by four services, received, stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from observability.analysis.decode import StoredSpan
from observability.emit import genai, names
from tests.e2e.stack import Stack, raw

NUM_REQUESTS = 200
NUM_CLIENTS = 16
# Child to parent, as they must be in every trace, whether a step was told by a span or by an event.
EDGES = {
    names.GATEWAY_REQUEST: names.ENVOY_INGRESS,
    names.GATEWAY_PREPARE: names.GATEWAY_REQUEST,
    names.GATEWAY_RESERVE: names.GATEWAY_REQUEST,
    names.GATEWAY_ADMIT: names.GATEWAY_REQUEST,
    names.GATEWAY_ROUTE: names.GATEWAY_REQUEST,
    names.GATEWAY_STREAM: names.GATEWAY_REQUEST,
    names.TOKENIZER_PREPARE: names.GATEWAY_REQUEST,
    names.TOKENIZER_RENDER: names.TOKENIZER_PREPARE,
    names.TOKENIZER_ENCODE: names.TOKENIZER_PREPARE,
    names.ENGINE_REQUEST: names.GATEWAY_REQUEST,
    names.ENGINE_QUEUE: names.ENGINE_REQUEST,
    names.ENGINE_PREFILL: names.ENGINE_REQUEST,
    names.ENGINE_FIRST_DECODE: names.ENGINE_REQUEST,
    names.ENGINE_DECODE: names.ENGINE_REQUEST,
}
ALL = [*EDGES, names.ENVOY_INGRESS]


def _ask(stack: Stack, number: int) -> str:
    body = (
        f'{{"model": "{stack.model}", "max_tokens": 2, "temperature": 0, '
        f'"messages": [{{"role": "user", "content": "Number {number}."}}]}}'
    )
    answer = raw(stack, "/v1/chat/completions", body.encode(), request_id=f"client-{number}")
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def test_every_request_leaves_a_whole_trace(stack: Stack) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        request_ids = list(pool.map(lambda number: _ask(stack, number), range(NUM_REQUESTS)))
    assert len(set(request_ids)) == NUM_REQUESTS
    for number, request_id in enumerate(request_ids):
        spans = stack.trace(request_id, ALL)
        _check_edges(spans)
        _check_identity(spans, request_id, f"client-{number}")
        _check_first_token(spans)


def _check_edges(spans: list[StoredSpan]) -> None:
    assert len({span.trace_id for span in spans}) == 1
    by_id = {span.span_id: span for span in spans}
    for child, parent in EDGES.items():
        for span in spans:
            if span.name == child:
                above = by_id.get(span.parent_id)
                assert above is not None, f"{child} has no parent"
                assert above.name == parent, f"{child} is below {above.name}"


def _check_identity(spans: list[StoredSpan], request_id: str, client_id: str) -> None:
    ours = [span for span in spans if span.service != names.ENVOY]
    assert {span.request_id for span in ours} == {request_id}
    assert {span.attributes.get(names.CLIENT_REQUEST_ID) for span in ours} == {client_id}


def _check_first_token(spans: list[StoredSpan]) -> None:
    (request,) = [span for span in spans if span.name == names.GATEWAY_REQUEST]
    parts = [float(request.attributes[key]) for key in names.TTFT_PARTS.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(float(request.attributes[names.TTFT_MS]), rel=0.05)
    # The parts that the engine reports are the lengths of its own spans.
    for part, name in (
        (names.TtftPart.QUEUE, names.ENGINE_QUEUE),
        (names.TtftPart.FIRST_DECODE, names.ENGINE_FIRST_DECODE),
    ):
        (span,) = [span for span in spans if span.name == name]
        assert span.duration_ms == pytest.approx(float(request.attributes[names.TTFT_PARTS[part]]), abs=1.0)
    assert request.attributes[genai.OPERATION] == "chat"
    (engine,) = [span for span in spans if span.name == names.ENGINE_REQUEST]
    assert request.attributes[genai.OUTPUT_TOKENS] == engine.attributes[names.OUTPUT_TOKENS]
    assert request.attributes[genai.INPUT_TOKENS] == engine.attributes[names.PROMPT_TOKENS]
