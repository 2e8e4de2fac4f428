"""Half of a surrogate pair, and bytes that are no UTF-8, are no text: every API names the field at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from millrace.inference.v1 import inference_pb2
from websockets.asyncio.client import connect

from contract.errors import Reason
from contract.proto.status import from_rpc_error
from gateway.faces.grpc.servicer import FULL_NAME
from gateway.http.utf8 import check_utf8, half_pair
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.batches.serving import create, ended, jsonl, request, results, serving
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# Stands for what the tests put there.
CUT = "cut-here"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "description": CUT}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
SAID = {"type": "message", "role": "assistant"}

BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "message": (CHAT, {"messages": [{"role": "user", "content": CUT}]}, "messages[0].content"),
    "beside what is ignored": (
        CHAT,
        {"messages": [{"role": "user", "content": CUT, "refusal_of_its": 1}]},
        "messages[0].content",
    ),
    "streamed": (
        CHAT,
        {"messages": [USER, {"role": "user", "content": f"a{CUT}b"}], "stream": True},
        "messages[1].content",
    ),
    "tool": (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": f"f{CUT}"}}]},
        "tools[0].function.name",
    ),
    "schema": (
        CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
        "tools[0].function.parameters.properties.place.description",
    ),
    "metadata": (CHAT, {"messages": [USER], "metadata": {"a": CUT}}, "metadata.a"),
    "key of metadata": (CHAT, {"messages": [USER], "metadata": {CUT: "a"}}, "metadata"),
    "key of the body": (CHAT, {"messages": [USER], CUT: "a"}, "the body"),
    "answer's schema": (CHAT, {"messages": [USER], "guided_json": {"const": CUT}}, "guided_json.const"),
    "prompt": ("/v1/completions", {"prompt": ["a", CUT]}, "prompt[1]"),
    "tokenize": ("/tokenize", {"prompt": CUT}, "prompt"),
    "embeddings": ("/v1/embeddings", {"input": CUT}, "input"),
    "input": (RESPONSES, {"input": CUT}, "input"),
    "annotation": (
        RESPONSES,
        {"input": [{**SAID, "content": [{"type": "output_text", "text": "a", "annotations": [CUT]}]}]},
        "input[0].content[0].annotations[0]",
    ),
    "conversation": (
        "/v1/conversations",
        {"items": [{"type": "message", "role": "user", "content": CUT}]},
        "items[0].content",
    ),
    "system": (MESSAGES, {"max_tokens": 5, "messages": [USER], "system": CUT}, "system"),
    "tool's schema": (
        MESSAGES,
        {"max_tokens": 5, "messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}]},
        "tools[0].input_schema.properties.place.description",
    ),
    "counted": (
        f"{MESSAGES}/count_tokens",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": CUT}]}]},
        "messages[0].content[0].text",
    ),
    "message batch": (
        f"{MESSAGES}/batches",
        {"requests": [{"custom_id": f"a{CUT}", "params": {}}]},
        "requests[0].custom_id",
    ),
    "params": (
        f"{MESSAGES}/batches",
        {"requests": [{"custom_id": "a", "params": {"messages": [{"role": "user", "content": CUT}]}}]},
        "requests[0].params.messages[0].content",
    ),
    "batch": ("/v1/batches", {"input_file_id": CUT, "endpoint": CHAT}, "input_file_id"),
}


def written(body: Any, half: bytes) -> bytes:
    return json.dumps(body).encode().replace(CUT.encode(), half)


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\uDE00 and more", b"\xed\xa0\xbd"])
async def test_every_api_refuses_it_by_its_field(tmp_path: Path, half: bytes) -> None:
    store = {"tenants": ["*"], "key": "k" * 40, "url": f"sqlite:///{tmp_path / 'store.sqlite'}"}
    async with serving(tmp_path, tables={"gateway": {"store": store}}) as stack:
        for name, (path, body, field) in BODIES.items():
            needs_model = path not in ("/v1/conversations", "/v1/batches", f"{MESSAGES}/batches")
            sent = written({"model": "tiny", **body} if needs_model else body, half)
            response = await stack.http.post(path, content=sent)
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            named = error["details"]["field"] if path.startswith(MESSAGES) else error["param"]
            assert named == field, name
            assert error["message"].startswith(f"{field}: "), name
            assert "half of a surrogate pair" in error["message"], name


async def test_what_is_no_utf8_is_refused_where_it_is_taken_as_it_was_written() -> None:
    body = {"messages": [USER], "guided_json": {"const": CUT}, "model": "tiny"}
    async with deployed() as stack:
        refused = await stack.http.post(CHAT, content=written(body, b"\xff"))
        assert (await stack.http.post(CHAT, content=written(body, "é😀".encode()))).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "malformed_body")
    assert "not UTF-8 at byte" in refused.json()["error"]["message"]


async def test_a_socket_tells_it_and_goes_on() -> None:
    async with deployed() as stack:
        url = f"ws://127.0.0.1:{stack.gateway.http.port}{RESPONSES}"
        async with connect(url, additional_headers={CONTEXT_HEADER: signed_context("socket")}) as socket:
            event = {"type": "response.create", "model": "tiny", "input": CUT}
            await socket.send(written(event, b"\\ud83d").decode())
            told = json.loads(await socket.recv())
            assert (told["type"], told["status"], told["param"]) == ("error", 400, "input")
            await socket.send(json.dumps(event))
            assert json.loads(await socket.recv())["type"] == "response.created"


async def test_a_line_of_a_batch_becomes_an_error_line_with_its_name(tmp_path: Path) -> None:
    lines = [
        request("good"),
        written(request("cut", CUT), b"\\ud83d"),
        written(request(CUT), b"\\ud83d"),
        written(request("bytes", CUT), b"\xff"),
    ]
    async with serving(tmp_path) as stack:
        batch = await ended(stack, await create(stack, jsonl(*lines)))
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        bad = {each["error"]["line"]: each for each in await results(stack, batch["error_file_id"])}
    assert {line: (each["custom_id"], each["error"]["param"]) for line, each in bad.items()} == {
        2: ("cut", "body.messages[0].content"),
        3: (None, "custom_id"),
        4: (None, None),
    }


async def grpc_refusal(stack: Deployment, data: bytes) -> Any:
    call: Any = stack.channel.unary_stream(f"/{FULL_NAME}/Chat", bytes, bytes)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(aiter(call(data, metadata=((CONTEXT_HEADER, signed_context()),))))
    return from_rpc_error(failure.value)


@pytest.mark.parametrize("more", ["", "a" * 70_000])
async def test_grpc_refuses_it_by_its_field(more: str) -> None:
    asked = inference_pb2.ChatRequest(model="tiny", metadata={"a": f"{CUT}b{more}"})
    turns = asked.conversation.messages
    turns.add(role=2, content="hi" + more)
    turns.add(role=2, content=f"{CUT}m")
    data = asked.SerializeToString()
    # As long as what stands there.
    half = b"\xed\xa0\xbd" + b"." * (len(CUT) - 3)
    async with deployed() as stack:
        for mark, field in (("m", "conversation.messages[1].content"), ("b", "metadata[0].value")):
            error = await grpc_refusal(stack, data.replace(f"{CUT}{mark}".encode(), half + mark.encode()))
            assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
        assert (await grpc_refusal(stack, b"\xff\xff\xff" + more.encode())).reason is Reason.MALFORMED_BODY


def test_whole_pairs_and_what_only_looks_like_a_half_are_text() -> None:
    for text in (b'"\\ud83d\\ude00"', b'"\\\\ud83d"', "[1] \u00e9\U0001f600".encode()):
        check_utf8(text)
        assert half_pair(text) is None
    assert half_pair(b'{"a": "\\ud83d') is None
    with pytest.raises(UnicodeDecodeError) as raised:
        check_utf8("é".encode() * 50_000 + b"\xff")
    assert raised.value.start == 100_000
