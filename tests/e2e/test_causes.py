"""Six causes are planted in a running stack; `why` names each of them, from either store.

The engine is simulated, so that steps take the time that the plan says and the planted cause is the largest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from observability.analysis.decode import StoredSpan
from observability.analysis.jaeger import JaegerReader
from observability.analysis.store import SpanReader
from observability.analysis.why import explain_stored
from observability.emit import names
from observability.emit.names import Cause
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import LIMITED_KEY, Stack, eventually, running_stack
from tests.e2e.streaming import Client, tokens
from tests.unit.observability.jaeger_stand_in import jaeger

PACE = {
    "MILLRACE_ENGINE__SIMULATION__STEP_MS": "5",
    "MILLRACE_ENGINE__SIMULATION__TOKENS_PER_S": "10000",
    "MILLRACE_ENGINE__SIMULATION__NUM_BLOCKS": "512",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "2",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_BATCHED_TOKENS": "512",
    # Every prompt is computed: a cached one would delay nobody.
    "MILLRACE_ENGINE__CACHE__PREFIX_CACHING": "false",
    # The bundled model has two adapters.
    "MILLRACE_ENGINE__ADAPTERS__SLOTS": "1",
}

CLIENT_REQUEST_ID = "order-17"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("causes"), "--simulated", environment=PACE) as stack:
        yield stack


def _long_prefill(stack: Stack) -> str:
    # Still generating when the long prompts have been computed, however slow the machine is.
    mine = Client(stack, tokens(8), 400)
    assert mine.started.wait(60)
    for number in range(3):
        Client(stack, tokens(7000 + number), 2).wait()
        if not mine.is_running:
            break
    return mine.wait()


def _kv_pressure(stack: Stack) -> str:
    holder = Client(stack, tokens(5000), 600)
    assert holder.started.wait(60)
    mine = Client(stack, tokens(4000), 2)
    # It waits until the holder ends; more of it would only be waiting.
    assert eventually(lambda: stack.metrics("engine")[0].value(names.REQUESTS_WAITING) > 0)
    holder.wait()
    return mine.wait()


def _preemption(stack: Stack) -> str:
    first = Client(stack, tokens(8), 400, tier="batch")
    second = Client(stack, tokens(8), 400, tier="batch")
    assert first.started.wait(60)
    assert second.started.wait(60)
    Client(stack, tokens(8), 300, tier="interactive").wait()
    # The one that was displaced is the one that was blamed for.
    for request_id in (first.wait(), second.wait()):
        spans = stack.trace(request_id, [names.ENGINE_DECODE, names.GATEWAY_REQUEST])
        if any(span.attributes.get(names.NUM_PREEMPTIONS) for span in spans):
            away = [span for span in spans if span.name == names.ENGINE_PREEMPTED]
            back = [span for span in spans if span.name == names.ENGINE_RESUMED]
            # Each return begins where an absence ends.
            assert [span.start_ns for span in back] == pytest.approx([span.end_ns for span in away], abs=1e6)
            return request_id
    raise AssertionError("nobody was displaced")


def _grammar_compile(stack: Stack) -> str:
    words = [f"word-{index}-{'x' * 40}" for index in range(400)]
    schema = {
        "type": "object",
        "properties": {f"field_{index}": {"enum": words[index * 5 :]} for index in range(20)},
        "required": [f"field_{index}" for index in range(20)],
        "additionalProperties": False,
    }
    with stack.openai() as client:
        answer = client.chat.completions.with_raw_response.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Fill it in."}],
            max_tokens=1,
            response_format={"type": "json_schema", "json_schema": {"name": "large", "schema": schema}},
        )
    return str(answer.headers["x-request-id"])


def _cold_adapter(stack: Stack) -> str:
    with stack.openai() as client:
        served = [model.id for model in client.models.list()]
    pirate, entries = (next(each for each in served if each.endswith(name)) for name in ("pirate", "entries"))
    holder = Client(stack, tokens(8), 200, model=pirate)
    assert holder.started.wait(60)
    # It waits for the only slot.
    mine = Client(stack, tokens(8), 2, model=entries)
    holder.wait()
    return mine.wait()


def _rate_limit(stack: Stack) -> str:
    with stack.openai(LIMITED_KEY) as client:
        for _ in range(3):
            try:
                client.completions.create(
                    model=stack.model,
                    prompt=tokens(4),
                    max_tokens=1,
                    extra_headers={"x-request-id": CLIENT_REQUEST_ID},
                )
            except openai.RateLimitError as error:
                return str(error.response.headers["x-request-id"])
    raise AssertionError("the limit did not apply")


PLANTED: dict[Cause, Callable[[Stack], str]] = {
    Cause.LONG_PREFILL: _long_prefill,
    Cause.KV_PRESSURE: _kv_pressure,
    Cause.PREEMPTION: _preemption,
    Cause.COLD_ADAPTER: _cold_adapter,
    Cause.RATE_LIMIT: _rate_limit,
}


@pytest.mark.parametrize("cause", PLANTED)
def test_why_names_the_planted_cause(slow: Stack, cause: Cause) -> None:
    _check(slow, PLANTED[cause](slow), cause)


@needs_weights
def test_why_names_a_grammar_that_was_compiled(stack: Stack) -> None:
    """On the bundled model: a simulated engine has no grammars."""
    _check(stack, _grammar_compile(stack), Cause.GRAMMAR_COMPILE)


def _check(stack: Stack, request_id: str, cause: Cause) -> None:
    served = [names.GATEWAY_REQUEST, names.ENGINE_DECODE]
    last = [names.GATEWAY_RATE_LIMIT] if cause is Cause.RATE_LIMIT else served
    if cause is Cause.GRAMMAR_COMPILE:
        # Each service sends its part by itself.
        last.append(names.TOKENIZER_COMPILE)
    # Envoy's span ends the trace; without it the whole time is not known.
    last.append(names.ENVOY_INGRESS)
    stack.trace(request_id, last)
    explanation, _ = explain_stored(SpanReader(Path(stack.state.trace_store)), request_id)
    assert explanation.cause is cause, explanation
    if cause is Cause.RATE_LIMIT:
        assert re.search(r"a retry after \d+\.\d s may succeed", explanation.verdict)
        spans = stack.trace(request_id, last)
        assert {span.attributes.get(names.CLIENT_REQUEST_ID) for span in spans} == {CLIENT_REQUEST_ID}
    with jaeger(stack.exported) as url:
        reader = JaegerReader(url)
        standing, _ = explain_stored(reader, request_id)
        reader.close()
        # A deployment's store says the same as the one on this machine.
        assert standing == explanation
        for where in ([], ["--jaeger", url]):
            shown = stack.command("why", request_id, *where)
            assert explanation.verdict.split(":")[0] in shown
    if cause in {Cause.LONG_PREFILL, Cause.KV_PRESSURE, Cause.PREEMPTION}:
        _check_links(stack, stack.trace(request_id, last))


def _check_links(stack: Stack, spans: list[StoredSpan]) -> None:
    """The summary of the decoding links to other requests of the same engine."""
    (decode,) = [span for span in spans if span.name == names.ENGINE_DECODE]
    assert decode.links, decode.attributes
    reader = SpanReader(Path(stack.state.trace_store))
    for trace_id, span_id in decode.links:
        assert trace_id != decode.trace_id
        (linked,) = [span for span in reader.trace(trace_id) if span.span_id == span_id]
        assert linked.name == names.ENGINE_REQUEST
    reader.close()


def test_parts_of_the_first_token_sum_to_what_the_client_measures(slow: Stack) -> None:
    """Within 5 % of the time that the gateway measured; the gateway's own time is within the client's."""
    request_id = Client(slow, tokens(3000), 4).wait()
    spans = slow.trace(request_id, [names.GATEWAY_REQUEST])
    (request,) = [span for span in spans if span.name == names.GATEWAY_REQUEST]
    parts = [float(request.attributes[key]) for key in names.TTFT_PARTS.values()]
    total = float(request.attributes[names.TTFT_MS])
    assert all(part >= 0 for part in parts), request.attributes
    assert sum(parts) == pytest.approx(total, rel=0.05)
    # 3000 tokens at 10,000 a second, in six steps: the plan's own time, of which a step cannot take less.
    assert float(request.attributes[names.TTFT_PARTS[names.TtftPart.PREFILL]]) >= 300
    assert json.dumps(dict(request.attributes))
