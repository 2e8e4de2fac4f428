"""One trace per request, from Envoy to the engine's step, with the expected edges."""

from __future__ import annotations

import subprocess
import sys

import openai
import pytest

from observability import names
from tests.e2e.stack import Stack

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
