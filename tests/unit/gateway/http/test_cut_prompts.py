"""`truncate_prompt_tokens`, wherever it can be asked for: what goes, what stays, and that it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2

from gateway.faces.unserved import WARNING_HEADER
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer

METADATA = ((CONTEXT_HEADER, signed_context()),)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Stay."},
    {"role": "user", "content": "a" * 40},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "b" * 40, "tool_call_id": "c1"},
    {"role": "assistant", "content": "c" * 40},
    {"role": "user", "content": "d" * 40},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "last"},
]
ROOM = 120


def small() -> ScriptedEngine:
    return ScriptedEngine(max_model_len=ROOM)


def seen(stack: Deployment) -> list[str]:
    """Contents of the messages that the model has seen."""
    return [each.content for each in stack.tokenizer.prepared[-1].conversation.messages]


@pytest.mark.parametrize(
    ("cut_to", "kept", "told"),
    [
        (-1, ["Stay.", "d" * 40, "ok", "last"], "oldest 1 of 3 turns"),
        (90, ["Stay.", "d" * 40, "ok", "last"], "oldest 1 of 3 turns"),
        (40, ["Stay.", "last"], "oldest 2 of 3 turns"),
    ],
)
async def test_the_oldest_turns_go_with_their_calls_and_results(
    cut_to: int, kept: list[str], told: str
) -> None:
    async with deployed(small()) as stack:
        refused = await stack.chat(messages=TALK)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        served = await stack.chat(messages=TALK, truncate_prompt_tokens=cut_to, max_tokens=16)
        assert served.status_code == 200, served.text
        assert seen(stack) == kept
        assert told in served.headers[WARNING_HEADER]
        left_out = served.json()["choices"][0]["left_out"]
        assert told == "oldest {num_turns} of {of_turns} turns".format(**left_out)
        assert left_out["num_tokens"] > 40 * left_out["num_turns"]
        events = await stack.events(
            "/v1/chat/completions", model="tiny", messages=TALK, truncate_prompt_tokens=cut_to, max_tokens=16
        )
        assert seen(stack) == kept
        *before, last = [event["choices"][0] for event in events]
        assert last["left_out"] == left_out
        assert not any("left_out" in each for each in before)


async def test_a_prompt_that_is_short_enough_stays_whole() -> None:
    async with deployed() as stack:
        served = await stack.chat(messages=TALK, truncate_prompt_tokens=-1)
        assert (served.status_code, len(seen(stack))) == (200, len(TALK))
        assert WARNING_HEADER not in served.headers
        assert "left_out" not in served.text


async def test_instructions_and_the_last_turn_stay_even_where_they_are_too_long() -> None:
    async with deployed(small()) as stack:
        long = [{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 2 * ROOM}]
        refused = await stack.chat(messages=long, truncate_prompt_tokens=-1)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("as_ids", [False, True])
async def test_plain_prompts_lose_their_beginning(as_ids: bool) -> None:
    prompts: list[Any] = ["x" * 50 + "end", "short"]
    if as_ids:
        prompts = [list(each.encode()) for each in prompts]
    async with deployed() as stack:
        body = {
            "model": "tiny",
            "prompt": prompts,
            "truncate_prompt_tokens": 10,
            "max_tokens": 2,
            "echo": True,
        }
        served = await stack.http.post("/v1/completions", json=body)
        assert served.status_code == 200, served.text
        assert served.json()["usage"]["prompt_tokens"] == 15
        assert [each["text"][:10] for each in served.json()["choices"]] == ["x" * 7 + "end", "shorthe"[:7]]
        warning = served.headers[WARNING_HEADER]
        assert "prompt[0]: truncation left out the first 43 of the prompt's 53 tokens" in warning
        assert "prompt[1]" not in warning
        cut, whole = served.json()["choices"]
        assert cut["left_out"] == {"num_tokens": 43, "num_turns": 0, "of_turns": 0}
        assert "left_out" not in whole


async def test_tokenize_shows_what_would_be_left() -> None:
    async with deployed() as stack:
        body: dict[str, Any] = {"model": "tiny", "truncate_prompt_tokens": 5}
        text = await stack.http.post("/tokenize", json={**body, "prompt": "0123456789"})
        assert bytes(text.json()["tokens"]) == b"56789"
        assert "first 5 of the prompt's 10 tokens" in text.headers[WARNING_HEADER]
        talk = await stack.http.post(
            "/tokenize", json={**body, "truncate_prompt_tokens": 90, "messages": TALK}
        )
        assert 0 < talk.json()["count"] <= 90
        assert "oldest 1 of 3 turns" in talk.headers[WARNING_HEADER]


async def test_anthropics_api_has_it_as_an_extension() -> None:
    talk = [{"role": each, "content": each * 10} for each in ("user", "assistant", "user")]
    body = {"model": "tiny", "max_tokens": 500, "messages": talk, "truncate_prompt_tokens": -1}
    async with deployed(small()) as stack:
        served = await stack.http.post("/v1/messages", json=body)
        assert served.status_code == 200, served.text
        assert seen(stack) == ["user" * 10]
        assert "oldest 1 of 2 turns" in served.headers[WARNING_HEADER]
        left_out = served.json()["left_out"]
        assert (left_out["num_turns"], left_out["of_turns"]) == (1, 2)
        assert left_out["num_tokens"] > 20
        streamed = await stack.http.post("/v1/messages", json={**body, "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        (start,) = [each for each in events if each["type"] == "message_start"]
        (end,) = [each for each in events if each["type"] == "message_delta"]
        assert start["message"]["left_out"] == end["left_out"] == left_out


async def test_grpc_tells_it_with_the_first_message() -> None:
    said = [each for each in TALK if each["role"] != "tool" and "tool_calls" not in each]
    messages = [{**each, "role": f"ROLE_{each['role'].upper()}"} for each in said]
    conversation = ParseDict({"messages": messages}, chat_pb2.Conversation())
    async with deployed() as stack:
        asked = inference_pb2.ChatRequest(model="tiny", conversation=conversation, truncate_prompt_tokens=60)
        first, *others = [each async for each in stack.inference.Chat(asked, metadata=METADATA)]
        assert (first.left_out.num_turns, first.left_out.of_turns) == (2, 3)
        assert first.left_out.num_tokens > 0
        assert not any(each.HasField("left_out") for each in others)
        generated = inference_pb2.GenerateRequest(model="tiny", text="0123456789", truncate_prompt_tokens=4)
        generated.sampling.max_tokens = 1
        first, *_ = [each async for each in stack.inference.Generate(generated, metadata=METADATA)]
        assert first.left_out == inference_pb2.LeftOut(num_tokens=6)
        shown = inference_pb2.TokenizeRequest(model="tiny", text="0123456789", truncate_prompt_tokens=4)
        counted = await stack.inference.Tokenize(shown, metadata=METADATA)
        assert (bytes(counted.token_ids), counted.left_out.num_tokens) == (b"6789", 6)


@pytest.mark.parametrize("cut_to", [0, -2, 5000])
async def test_lengths_that_are_none_are_refused(cut_to: int) -> None:
    async with deployed() as stack:
        asked = {"model": "tiny", "truncate_prompt_tokens": cut_to}
        for path, prompt in (
            ("/v1/chat/completions", {"messages": TALK}),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            refused = await stack.http.post(path, json={**asked, **prompt})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
        assert "4096" in refused.text or cut_to < 1


async def test_what_stands_before_every_text_is_asked_for_by_grpc_as_well() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.start_ids = [1]
    async with deployed(tokenizer=tokenizer) as stack:
        for adds, expected in ((None, 4), (True, 4), (False, 3)):
            generated = inference_pb2.GenerateRequest(model="tiny", text="abc", add_special_tokens=adds)
            generated.sampling.max_tokens = 1
            *_, last = [each async for each in stack.inference.Generate(generated, metadata=METADATA)]
            assert last.usage.prompt_tokens == expected
            counting = inference_pb2.CountTokensRequest(model="tiny", text="abc", add_special_tokens=adds)
            counted = await stack.inference.CountTokens(counting, metadata=METADATA)
            assert counted.num_tokens == expected


HUGE = [{"role": "user", "content": "b" * 3 * ROOM}]
SHORT = [{"role": "user", "content": "a" * 20}]


@pytest.mark.parametrize(
    ("path", "body", "field", "told"),
    [
        ("responses", {"input": HUGE, "truncation": "auto"}, "input", "are kept for the answer"),
        (
            "responses",
            {"input": SHORT, "truncation": "auto", "max_output_tokens": ROOM - 1},
            "max_output_tokens",
            f"max_output_tokens {ROOM - 1} leaves room for 1",
        ),
        ("responses/input_tokens", {"input": HUGE, "truncation": "auto"}, "input", "are kept for the answer"),
        (
            "messages",
            {"messages": HUGE, "max_tokens": 8, "truncate_prompt_tokens": -1},
            "messages",
            "8 are kept for the answer",
        ),
        (
            "chat/completions",
            {"messages": SHORT, "truncate_prompt_tokens": 5},
            "messages",
            "truncate_prompt_tokens allows 5",
        ),
    ],
)
async def test_what_cannot_be_cut_is_refused_by_the_models_own_length(
    path: str, body: dict[str, Any], field: str, told: str
) -> None:
    async with deployed(small()) as stack:
        refused = await stack.http.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert f"maximum context length is {ROOM} tokens" in error["message"]
        assert told in error["message"]
        assert (error.get("param") or error["details"]["field"]) == field


@pytest.mark.parametrize(
    ("path", "prompt", "tool", "field"),
    [
        (
            "chat/completions",
            "messages",
            {"type": "function", "function": {"name": "f", "parameters": None}},
            "tools[0].function.parameters",
        ),
        (
            "responses",
            "input",
            {"type": "function", "name": "f", "parameters": None},
            "tools[0].parameters",
        ),
        ("messages", "messages", {"name": "f", "input_schema": None}, "tools[0].input_schema"),
    ],
)
async def test_a_tools_schema_is_told_of_by_the_faces_own_name(
    path: str, prompt: str, tool: dict[str, Any], field: str
) -> None:
    def asked(schema: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(tool).replace("null", json.dumps(schema))
        limit = {"max_tokens": 8} if prompt == "messages" else {}
        return {"model": "tiny", prompt: SHORT, "tools": [json.loads(text)], **limit}

    async with deployed() as stack:
        refused = await stack.http.post(f"/v1/{path}", json=asked({"type": "impossible"}))
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error.get("param") or error["details"]["field"]) == field
        assert error["message"].startswith(f"{field}: ")
        loose = asked({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})
        served = await stack.http.post(f"/v1/{path}", json=loose)
        assert served.status_code == 200, served.text
        if path == "chat/completions":
            assert served.json()["enforcement"]["unenforced"][0]["keyword"] == "$ref"
        else:
            told = f"{field} is not enforced exactly: $ref at /properties/a/$ref"
            assert served.headers[WARNING_HEADER] == told
