"""The OpenAPI documents are true: whatever schemathesis sends, status, type and body are as documented."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.auth.authorizer import AUTHORIZE_PREFIX
from gateway.faces.anthropic import batches_openapi as message_batches
from gateway.faces.anthropic import openapi as anthropic
from gateway.faces.openai import batches_openapi as batches
from gateway.faces.openai.openapi import EXAMPLES, document
from gateway.faces.pooled import openapi as pooled
from gateway.faces.responses import openapi as responses
from gateway.http.application import Application
from gateway.ui import openapi as account
from gateway.ui.files import file_handlers
from runtime.context import CONTEXT_HEADER
from tests.clients.python.beyond_schema import only_beyond_schema, served
from tests.unit.gateway.rig.deployment import deployed, signed_context

HEADERS = {CONTEXT_HEADER: signed_context()}


def tables(folder: Path) -> dict[str, Any]:
    """A gateway that serves all that there is a document of."""
    batches_ = {"directory": str(folder), "max_files": 100_000, "max_batches": 100_000}
    return {"gateway": {"admin_tenants": ["acme"], "batches": batches_}}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway on a thread of its own: schemathesis calls block."""
    started: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with deployed(tables=tables(tmp_path_factory.mktemp("batches"))) as stack:
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
    # What the document allows is served, and nothing else is.
    only_beyond_schema,
    negative_data_rejection,
]
# The paths of each document, by its own.
DOCUMENTS = {
    "/openapi.json": msgspec.json.decode(document())["paths"],
    anthropic.PATH: msgspec.json.decode(anthropic.document())["paths"],
    responses.PATH: msgspec.json.decode(responses.document())["paths"],
    pooled.PATH: msgspec.json.decode(pooled.document())["paths"],
    batches.PATH: msgspec.json.decode(batches.document())["paths"],
    message_batches.PATH: msgspec.json.decode(message_batches.document())["paths"],
    account.PATH: msgspec.json.decode(account.document())["paths"],
}
PATHS = {path: operations for paths in DOCUMENTS.values() for path, operations in paths.items()}
OPERATIONS = [(method, path) for path, operations in PATHS.items() for method in operations]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_undocumented_is_answered(address: str, method: str, path: str, mode: GenerationMode) -> None:
    (described,) = [each for each, paths in DOCUMENTS.items() if path in paths]
    schema = schemathesis.openapi.from_url(f"{address}{described}", headers=HEADERS)
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = served(case.body, "tiny", path)
        case.call_and_validate(headers=HEADERS, checks=CHECKS if _shows(case) else CHECKS[:-1])

    try:
        check()
    except Unsatisfiable:
        # There is no wrong input for an operation without parameters.
        assert mode is GenerationMode.NEGATIVE


def _shows(case: schemathesis.Case) -> bool:
    """Whether what is wrong can be seen. Parts of a form are bytes: a file that is a number, or null, is a
    file with its text.
    """
    is_form = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    return not is_form or isinstance(case.body.get("file", ""), str | bytes)


# Pages of the gateway that are not for clients: Envoy answers 404 to them. Then the files of the page at /ui.
NOT_FOR_CLIENTS = {("get", "/metrics"), ("", AUTHORIZE_PREFIX)}
FOR_PEOPLE = {(method.lower(), path) for method, path in file_handlers()}


async def test_the_documents_list_every_route_and_no_other(tmp_path: Path) -> None:
    async with deployed(tables=tables(tmp_path)) as stack:
        application = stack.gateway.http._application._handler
        assert isinstance(application, Application)
        served = {(method.lower(), path) for method, path in application._routes}
        served |= {(method.lower(), beginning) for beginning, (method, _) in application._below.items()}
    # A parameter is what follows the beginning of its path.
    beginnings = {(method, path.partition("{")[0]) for method, path in OPERATIONS}
    listed = {("" if ("", start) in served else method, start) for method, start in beginnings}
    assert listed == served - NOT_FOR_CLIENTS - FOR_PEOPLE
    assert served >= NOT_FOR_CLIENTS | FOR_PEOPLE


def test_the_document_lists_what_is_served(address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    options = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "tools", "response_format", "service_tier"} <= set(options)
    assert options["functions"]["enum"] == [None]
    assert options["temperature"]["anyOf"][0]["maximum"] == 2.0


# --- the types by themselves ------------------------------------------------------------------------------

SCHEMAS = msgspec.json.decode(document())["components"]["schemas"]
HELLO = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HELLO}
TOOL = {"type": "function", "function": {"name": "add"}}


def _closed(schema: Any) -> Any:
    """The schema without room for what it does not declare."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def _validator(name: str, *, closed: bool = False) -> jsonschema_rs.Validator:
    schemas = _closed(SCHEMAS) if closed else SCHEMAS
    root = {"components": {"schemas": schemas}, "$ref": f"#/components/schemas/{name}"}
    return jsonschema_rs.validator_for(root)


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({}, True),
        ({"messages": []}, False),
        ({"messages": [{"role": "user"}]}, False),
        ({"messages": [{"role": "user", "content": "x", "odd": 1}]}, True),
        ({"messages": [{"role": "tool", "content": "x"}]}, False),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, True),
        ({"messages": [{"role": "assistant", "refusal": "no", "content": "x"}]}, False),
        ({"odd": 1}, False),
        ({"store": False}, True),
        ({"store": True}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {}, "stream": True}, True),
        ({"guided_regex": "a"}, True),
        ({"guided_regex": "a", "guided_json": {}}, False),
        ({"guided_regex": "a", "ignore_eos": True}, False),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "required", "tools": [TOOL]}, True),
        ({"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"}, False),
        ({"tools": [{**TOOL, "cache_control": {}}]}, True),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, True),
        ({"top_k": -1}, True),
        ({"top_p": 0}, False),
    ],
    ids=str,
)
def test_a_body_is_described_as_it_is_judged(address: str, extra: dict[str, Any], allowed: bool) -> None:
    body = {**CHAT, "model": "tiny", "max_tokens": 2, **extra}
    assert _validator("ChatBody").is_valid(body) == allowed
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=HEADERS)
    # The engine here answers with letters, which no pattern judges.
    assert (answer.status_code != 400) == allowed, answer.text


BODIES = {
    "createChatCompletion": "ChatBody",
    "createCompletion": "CompletionBody",
    "tokenize": "TokenizeBody",
    "detokenize": "DetokenizeBody",
    "loadAdapter": "LoadBody",
    "unloadAdapter": "UnloadBody",
}


@pytest.mark.parametrize("operation", BODIES)
def test_examples_are_what_they_show(operation: str) -> None:
    for example in EXAMPLES[operation].values():
        _validator(BODIES[operation]).validate(example)


@pytest.mark.parametrize(
    ("path", "chunk", "extra"),
    [
        ("/v1/chat/completions", "ChatCompletionChunk", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", "ChatCompletionChunk", {"n": 2, "temperature": 1, "stop": "b"}),
        ("/v1/completions", "CompletionChunk", {"prompt": "ab", "logprobs": 2, "echo": True}),
    ],
    ids=["chat with log-probabilities", "chat of two answers", "completion"],
)
def test_events_are_described_and_have_nothing_else(
    address: str, path: str, chunk: str, extra: dict[str, Any]
) -> None:
    body = {"model": "tiny", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    asked = {**body, **({} if "prompt" in extra else {"messages": HELLO}), **extra}
    blocks = httpx.post(f"{address}{path}", json=asked, headers=HEADERS).text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    assert len(blocks) > 2
    for block in blocks:
        _validator(chunk, closed=True).validate(msgspec.json.decode(block.removeprefix("data: ")))


def test_every_status_of_an_operation_is_described_with_its_headers() -> None:
    answers = PATHS["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= answers.keys()
    assert {"retry-after", "x-ratelimit-remaining-tokens"} <= answers["429"]["headers"].keys()
    assert "www-authenticate" in answers["401"]["headers"]
    for operations in PATHS.values():
        for operation in operations.values():
            assert operation["summary"]
