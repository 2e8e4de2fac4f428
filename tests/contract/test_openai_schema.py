"""The OpenAPI document is true: whatever schemathesis sends, status, type and body are as documented."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context

HEADERS = {CONTEXT_HEADER: signed_context()}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A gateway on a thread of its own: schemathesis calls block."""
    started: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with deployed() as stack:
            started.append(f"http://127.0.0.1:{stack.gateway.http.port}")
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield started[0]
    loop.call_soon_threadsafe(done.set)
    thread.join()


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/health"),
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_undocumented_is_answered(address: str, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=HEADERS, checks=CHECKS)

    try:
        check()
    except Unsatisfiable:
        # There is no wrong input for an operation without parameters.
        assert mode is GenerationMode.NEGATIVE


def test_the_document_lists_every_operation(address: str) -> None:
    paths = httpx.get(f"{address}/openapi.json").json()["paths"]
    assert sorted(OPERATIONS) == sorted((method, path) for path in paths for method in paths[path])


def test_the_document_lists_what_is_served(address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    options = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "tools", "response_format", "service_tier"} <= set(options)
    assert "functions" not in options
    assert options["temperature"]["anyOf"][0]["maximum"] == 2.0
