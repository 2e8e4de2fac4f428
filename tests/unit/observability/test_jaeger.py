"""What is read from a deployment's Jaeger is what the local store says of the same spans."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from observability.analysis import diagnose, waterfall, why
from observability.analysis.decode import StoredSpan
from observability.analysis.jaeger import JaegerReader
from observability.analysis.source import StoreError
from observability.emit import names
from observability.emit.names import Cause, TtftPart
from tests.unit.observability import jaeger_stand_in
from tests.unit.observability.planted import PARTS, message, request_trace

# The causes that are planted in a real stack, too (tests/e2e/test_causes.py).
CAUSES = (
    Cause.LONG_PREFILL,
    Cause.KV_PRESSURE,
    Cause.PREEMPTION,
    Cause.GRAMMAR_COMPILE,
    Cause.RATE_LIMIT,
)
MINUTE_NS = 60 * 10**9


class Deployment:
    """Spans as services have sent them, and the address of what keeps them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.url = ""

    def add(self, spans: list[StoredSpan]) -> None:
        for service in dict.fromkeys(span.service for span in spans):
            self.messages.append(message([span for span in spans if span.service == service]))


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment()
    with jaeger_stand_in.jaeger(lambda: made.messages) as url:
        made.url = url
        yield made


def recent(request_id: str, number: int, **more: Any) -> list[StoredSpan]:
    start_ns = time.time_ns() - MINUTE_NS + number * 1_000_000
    return request_trace(request_id, number=number, start_ns=start_ns, **more)


@pytest.mark.parametrize("cause", CAUSES)
def test_diagnose_finds_the_planted_cause(
    deployment: Deployment, cause: Cause, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(5)
    # More than one page of answers.
    for number in range(1, 3 * jaeger_stand_in.MOST_TRACES):
        is_slow = number % 10 == 0
        delays = {cause: chance.uniform(900, 1100)} if is_slow else {}
        parts = {**PARTS, TtftPart.QUEUE: delays.get(cause, 20.0)}
        deployment.add(recent(f"r-{number}", number, parts_ms=parts, delays_ms=delays))
    assert diagnose.main(["--jaeger", deployment.url]) == 0
    shown = capsys.readouterr().out
    assert f"{3 * jaeger_stand_in.MOST_TRACES - 1} requests" in shown
    assert f"delayed by {cause}: 9%" in shown.replace("\n", " ")


def test_requests_of_a_time_are_told_from_those_before_and_after(deployment: Deployment) -> None:
    """Whichever of them the store answers with: it gives whole traces."""
    began_ns = time.time_ns() - MINUTE_NS
    for number in range(1, 3 * jaeger_stand_in.MOST_TRACES):
        deployment.add(
            request_trace(f"r-{number}", number=number, start_ns=began_ns + number * 1_000_000_000)
        )
    reader = JaegerReader(deployment.url)
    whole = reader.spans_named(names.GATEWAY_REQUEST, since_ns=0, until_ns=2**62)
    assert len(whole) == 3 * jaeger_stand_in.MOST_TRACES - 1
    first, last = whole[90], whole[10]
    found = reader.spans_named(names.GATEWAY_REQUEST, since_ns=first.start_ns, until_ns=last.start_ns)
    assert found == whole[10:91]
    reader.close()


def test_a_request_is_found_by_its_ids_and_explained_with_its_neighbours(deployment: Deployment) -> None:
    mine = recent("mine", 1, delays_ms={Cause.LONG_PREFILL: 150.0})
    loud = recent("loud", 2, parts_ms={**PARTS, TtftPart.QUEUE: 0.0, TtftPart.PREFILL: 180.0})
    for span in (*mine, *loud):
        assert isinstance(span.attributes, dict)
        if span.name == names.ENGINE_REQUEST:
            span.attributes[names.ENGINE_ID] = "e0"
        if span.name == names.GATEWAY_REQUEST and span in mine:
            span.attributes[names.CLIENT_REQUEST_ID] = "order-17"
    deployment.add(mine)
    deployment.add(loud)
    reader = JaegerReader(deployment.url)
    for what in ("mine", "chatcmpl-mine", "order-17", mine[0].trace_id):
        explanation, spans = why.explain_stored(reader, what)
        assert explanation.cause is Cause.LONG_PREFILL
        assert [each.request_id for each in explanation.neighbours] == ["loud"]
        assert spans == sorted(mine, key=lambda span: span.start_ns)
    assert reader.find("last")[0].trace_id == loud[0].trace_id
    reader.close()


def test_the_waterfall_is_drawn_from_there(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.add(recent("drawn", 1))
    assert waterfall.main(["--jaeger", deployment.url, "drawn"]) == 0
    assert "engine.prefill" in capsys.readouterr().out


def test_who_is_not_there_is_told_so(deployment: Deployment) -> None:
    reader = JaegerReader(deployment.url)
    with pytest.raises(StoreError, match="is empty"):
        reader.find("last")
    with pytest.raises(StoreError, match="no request or trace 'nobody' in the Jaeger at http"):
        reader.find("nobody")
    reader.close()


def test_what_does_not_answer_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            self.wfile.write(b"<html>an older Jaeger's page</html>")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert why.main(["--jaeger", url, "x"]) == 1
    error = capsys.readouterr().err
    assert "answers what is no OTLP" in error
    assert error.count("\n") == 1
    server.shutdown()
    thread.join()
    server.server_close()
    assert why.main(["--jaeger", url, "x"]) == 1
    assert "does not answer" in capsys.readouterr().err
