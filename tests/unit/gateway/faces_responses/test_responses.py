"""The Responses API through the official SDK, against the generated types of the specification."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
from millrace.common.v1 import chat_pb2
from openresponses_types import types as spec

from contract.chat import Conversation
from contract.errors import MillraceError, Reason
from gateway.faces.responses.tools import OfferedTool, ToolFormat, ToolSelection, chosen, field_parts, toolbox
from gateway.faces.sealed import Seal
from gateway.faces.unserved import WARNING_HEADER
from gateway.types.request import GenerationRequest
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import Reply, ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, written

THINKS = "<think>It is easy.</think>It is 4."
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "}</x>"}}</tool_call>'
PATCH = '*** Begin Patch\n+caf\u00e9 \U0001f642 "quoted"\n*** End Patch'
PATCH_CALL = f'<tool_call>{{"name": "apply_patch", "arguments": {json.dumps({"input": PATCH})}}}</tool_call>'
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
APPLY: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
ANSWERS = {
    "text": "It is 4.",
    "thoughts": THINKS,
    "call": f"<think>Add.</think>I add.\n{CALL}",
    "two calls": CALL + "\n" + CALL,
    "custom": PATCH_CALL,
    "nothing": "",
    "space before a call": f"<think>Add.</think>\n\n{CALL}\n",
    "text between calls": f"<think>Add.</think>\n\none {CALL}\ntwo\n{PATCH_CALL}three",
}
EVENTS = {
    next(iter(model.model_fields["type"].annotation)).value: model
    for name, model in vars(spec).items()
    if name.endswith("StreamingEvent")
}
# OpenAI's SDKs and agents read thoughts under these names; the specification calls them otherwise.
SPEC_NAMES = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


def says(text: str) -> Reply:
    return lambda submit, choice: [*written(text), END_ID]


@asynccontextmanager
async def serving(text: str = "It is 4.", **rig: Any) -> AsyncIterator[Deployment]:
    per_step = rig.pop("tokens_per_step", 1)
    async with deployed(ScriptedEngine(reply=says(text), tokens_per_step=per_step), **rig) as stack:
        yield stack


def sdk(stack: Deployment) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stack.http.base_url}/v1",
        api_key="checked at the edge",
        default_headers={CONTEXT_HEADER: signed_context()},
        max_retries=0,
    )


async def post(stack: Deployment, path: str = "", **body: Any) -> httpx.Response:
    return await stack.http.post(f"/v1/responses{path}", json={"model": "tiny", "input": "hi", **body})


async def events(stack: Deployment, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the specification, their numbers without a gap."""
    response = await post(stack, stream=True, **body)
    assert response.status_code == 200, response.text
    *blocks, last = response.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
        kind = SPEC_NAMES.get(event["type"], event["type"])
        if "custom" not in json.dumps(event):
            EVENTS[kind].model_validate({**event, "type": kind})
    return found


def roles(messages: Any) -> list[str]:
    return [chat_pb2.Role.Name(each.role).removeprefix("ROLE_").lower() for each in messages]


def without_moments(response: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when and how a request came."""
    text = json.dumps({**response, "created_at": 0, "completed_at": 0})
    return dict(json.loads(text.replace(response["id"].removeprefix("resp_"), "ID")))


@pytest.mark.parametrize("tokens_per_step", [1, 7, 5000])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_stream_tells_what_the_whole_answer_says(answer: str, tokens_per_step: int) -> None:
    async with serving(ANSWERS[answer], tokens_per_step=tokens_per_step) as stack:
        whole = (await post(stack, tools=[ADD, APPLY])).json()
        streamed = await events(stack, tools=[ADD, APPLY])
    if "custom" not in json.dumps(whole["output"]):
        spec.ResponseResource.model_validate({**whole, "tools": []})
    final = streamed[-1]["response"]
    assert without_moments(final) == without_moments(whole)
    assert [each["type"] for each in streamed[:2]] == ["response.created", "response.in_progress"]
    assert streamed[-1]["type"] == "response.completed"
    # Items come one after another, each whole, with the id and place that they have in the end.
    rebuilt: list[dict[str, Any]] = []
    for event in streamed[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(rebuilt)
            assert event["item"]["status"] == "in_progress"
            text, item_id = "", event["item"]["id"]
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (item_id, len(rebuilt))
            text += event["delta"]
        elif kind == "response.output_item.done":
            rebuilt.append(event["item"])
            assert item_id == event["item"]["id"]
        elif "content_part" not in kind:
            assert text in (event.get("text"), event.get("arguments"), event.get("input"))
    assert rebuilt == final["output"]


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("text", ["message"]),
        ("thoughts", ["reasoning", "message"]),
        ("call", ["reasoning", "message", "function_call"]),
        ("two calls", ["function_call", "function_call"]),
        ("custom", ["custom_tool_call"]),
        ("nothing", ["message"]),
        ("space before a call", ["reasoning", "function_call"]),
        (
            "text between calls",
            ["reasoning", "message", "function_call", "message", "custom_tool_call", "message"],
        ),
    ],
)
async def test_items_are_those_of_the_answer(answer: str, kinds: list[str]) -> None:
    async with serving(ANSWERS[answer]) as stack:
        response = (await post(stack, tools=[ADD, APPLY])).json()
    output = response["output"]
    assert [each["type"] for each in output] == kinds
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
    assert all(each["id"].startswith(prefixes[each["type"]]) for each in output)
    assert all(each["status"] == "completed" for each in output)
    assert response["id"].startswith("resp_")
    assert response["completed_at"] >= response["created_at"]
    for each in output:
        if each["type"] == "custom_tool_call":
            assert (each["name"], each["input"]) == ("apply_patch", PATCH)
        elif each["type"] == "function_call":
            assert json.loads(each["arguments"]) == {"a": 2, "b": "}</x>"}
            assert each["call_id"]


async def test_the_resource_says_what_was_asked_for_and_what_is_true() -> None:
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "max_output_tokens": 50,
        "max_thinking_tokens": 20,
        "tools": [ADD, {"type": "web_search"}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "add"}],
        },
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "service_tier": "fast",
        "safety_identifier": "who",
        "prompt_cache_key": "key",
        "store": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
    }
    async with serving(THINKS, tables={"model": {"defaults": {"top_p": 0.75}}}) as stack:
        response = await post(stack, **body)
        submit, prepared = stack.engines[0].submissions[0], stack.tokenizer.prepared[0].conversation
    told = response.json()
    assert set(told) == set(spec.ResponseResource.model_fields)
    spec.ResponseResource.model_validate(told)
    same = ("instructions", "temperature", "max_output_tokens", "metadata", "service_tier", "truncation")
    for name in (
        *same,
        "safety_identifier",
        "prompt_cache_key",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning",
    ):
        assert told[name] == body[name], name
    assert (told["top_p"], told["store"], told["status"]) == (0.75, False, "completed")
    assert [each["name"] for each in told["tools"]] == ["add"]
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert told["usage"]["total_tokens"] == told["usage"]["input_tokens"] + told["usage"]["output_tokens"]
    assert submit.sampling.temperature == 0.5
    assert submit.sampling.max_tokens == 50
    assert submit.sampling.max_thinking_tokens == 20
    assert roles(prepared.messages) == ["system", "user"]
    assert [each.content for each in prepared.messages] == ["Be brief.", "hi"]
    assert prepared.template_options["reasoning_effort"] == "low"
    warned = " ".join(value for name, value in response.headers.multi_items() if name == WARNING_HEADER)
    for name in ("store", "reasoning.summary", "tools[1]"):
        assert f"{name} has no effect" in warned


async def test_turns_go_on_without_a_store() -> None:
    """As an agent does it: everything that came is sent back, thoughts as they were sealed."""
    async with serving(ANSWERS["call"]) as stack, sdk(stack) as client:
        include: Any = ["reasoning.encrypted_content"]
        first = await client.responses.create(
            model="tiny", input="2+2?", tools=[ADD], include=include, store=False
        )
        sent = [each.to_dict() for each in first.output]
        # Codex keeps thoughts sealed, and drops what is written out.
        sent[0].pop("content")
        assert "Add." not in json.dumps(sent[0])
        call = first.output[-1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        history: Any = [{"role": "user", "content": "2+2?"}, *sent, result]
        await client.responses.create(model="tiny", input=history, tools=[ADD], include=include)
        messages = stack.tokenizer.prepared[-1].conversation.messages
        assert roles(messages) == ["user", "assistant", "tool"]
        assert (messages[1].reasoning, messages[1].content.strip()) == ("Add.", "I add.")
        assert json.loads(messages[1].tool_calls[0].arguments_json) == {"a": 2, "b": "}</x>"}
        assert messages[2].tool_call_id == messages[1].tool_calls[0].id == call.call_id

        for damaged in (sent[0]["encrypted_content"][:-6] + "AAAAA=", "gAAAA", "\u00e9"):
            history[1] = {**sent[0], "encrypted_content": damaged}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="tiny", input=history)
            assert refused.value.param == "input[1].encrypted_content"


def test_thoughts_are_sealed_for_one_tenant_of_one_deployment() -> None:
    seal = Seal(b"a secret of this test", "millrace responses")
    assert seal.open("acme", seal.close("acme", "x\ud800"), "f") == "x\ud800"
    sealed = seal.close("acme", "thoughts")
    assert sealed != seal.close("acme", "thoughts")
    others = (Seal(b"another secret of it", "millrace responses"), Seal(b"a secret of this test", "other"))
    for opener, tenant in ((seal, "other"), *((each, "acme") for each in others)):
        with pytest.raises(MillraceError):
            opener.open(tenant, sealed, "f")


async def test_custom_tools_and_namespaces_come_back_as_they_were_offered() -> None:
    shell = {"type": "function", "name": "run", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "mcp__box", "description": "A box.", "tools": [shell]}
    called = '<tool_call>{"name": "mcp__box__run", "arguments": {}}</tool_call>'
    async with serving(called) as stack:
        response = await post(stack, tools=[APPLY, space], tool_choice="auto")
        item = response.json()["output"][0]
        assert (item["name"], item["namespace"]) == ("run", "mcp__box")
        tools = {each.name: each for each in stack.tokenizer.prepared[-1].conversation.tools}
        assert list(tools) == ["apply_patch", "mcp__box__run"]
        assert "start: /x/" in tools["apply_patch"].description
        assert (tools["apply_patch"].input_syntax, tools["apply_patch"].input_grammar) == (
            "lark",
            "start: /x/",
        )
        assert WARNING_HEADER not in response.headers
        given = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": PATCH}
        output = {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        }
        await post(stack, tools=[APPLY, space], input=[{"role": "user", "content": "x"}, item, given, output])
        messages = stack.tokenizer.prepared[-1].conversation.messages
        assert [each.name for each in messages[1].tool_calls] == ["mcp__box__run", "apply_patch"]
        assert json.loads(messages[1].tool_calls[1].arguments_json) == {"input": PATCH}
        assert messages[2].content == "ok"
        choice = {"type": "custom", "name": "apply_patch"}
        await post(stack, tools=[APPLY], tool_choice=choice)
        forced = stack.tokenizer.prepared[-1].conversation.tool_choice
        assert forced.name == "apply_patch"


async def test_a_namespace_and_its_tool_have_names_of_full_length_each() -> None:
    name, space = "t" * 64, "s" * 64
    tools = [{"type": "namespace", "name": space, "tools": [{"type": "function", "name": name}]}]
    called = f'<tool_call>{{"name": "{space}__{name}", "arguments": {{}}}}</tool_call>'
    async with serving(called) as stack:
        item = (await post(stack, tools=tools)).json()["output"][0]
        assert (item["namespace"], item["name"]) == (space, name)
        for long, field in (
            ([{**tools[0], "name": space + "s"}], "tools[0].name"),
            ([{**tools[0], "tools": [{"type": "function", "name": name + "t"}]}], "tools[0].tools[0].name"),
            ([{"type": "function", "name": name + "t"}], "tools[0].name"),
        ):
            body = {"model": "tiny", "input": "x", "tools": long}
            refused = (await stack.http.post("/v1/responses", json=body)).json()
            assert refused["error"]["param"] == field


def test_refusals_of_tools_name_them_where_they_stand_in_the_body() -> None:
    patch = OfferedTool(type="custom", name="patch", format=ToolFormat("grammar", "regex", "a+"))
    box = toolbox(
        [
            OfferedTool(type="web_search"),
            OfferedTool(type="function", name="run"),
            OfferedTool(type="namespace", name="box", tools=[OfferedTool(type="custom", name="free"), patch]),
        ]
    )
    tools, _ = chosen(box, ToolSelection(type="custom", name="box__patch"))
    parts = field_parts(tools, box)
    request = GenerationRequest(model="m", prompt=Conversation(messages=()), field_parts=parts)
    assert [tool.name for tool in tools] == ["run", "box__free", "box__patch"]
    assert request.field("tools[2].function.input_grammar") == "tools[2].tools[1].format.definition"
    assert request.field("tools[0].function.parameters") == "tools[1].parameters"
    # The services behind know the tools that may be called.
    allowed = ToolSelection(type="allowed_tools", tools=[ToolSelection(type="custom", name="box__patch")])
    parts = field_parts(chosen(box, allowed)[0], box)
    assert parts["[0].function.input_grammar"] == "[2].tools[1].format.definition"


async def test_log_probabilities_are_those_of_the_text() -> None:
    async with serving(THINKS) as stack:
        include = ["message.output_text.logprobs"]
        whole = (await post(stack, include=include, top_logprobs=1)).json()
        streamed = await events(stack, include=include, top_logprobs=1)
    spec.ResponseResource.model_validate(whole)
    tokens = whole["output"][1]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in tokens).startswith("It is 4.")
    assert tokens[0]["top_logprobs"][0]["token"] == tokens[0]["token"]
    deltas = [each for each in streamed if each["type"] == "response.output_text.delta"]
    assert [token for each in deltas for token in each["logprobs"]] == tokens


async def test_a_failure_after_the_first_token_ends_the_stream_as_the_api_says() -> None:
    engine = ScriptedEngine(reply=says("x" * 4000), step_s=0.01)
    async with deployed(engine) as stack:
        body = {"model": "tiny", "input": "hi", "stream": True}
        async with stack.http.stream("POST", "/v1/responses", json=body) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            ends = MillraceError(Reason.DRAINING, "it leaves", retry_after_s=1.0)
            stack.gateway._pipeline.end_all(ends)
            text += "".join([piece async for piece in pieces])
    assert response.status_code == 200
    blocks = text.strip().split("\n\n")
    names = [block.split("\n")[0].removeprefix("event: ") for block in blocks]
    assert names[-3:] == ["error", "response.failed", "data: [DONE]"]
    told = [msgspec.json.decode(block.split("data: ", 1)[1]) for block in blocks[:-1]]
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    EVENTS["error"].model_validate(told[-2])
    EVENTS["response.failed"].model_validate(told[-1])
    failed = told[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == told[-2]["error"]["code"] == told[-2]["code"] == "draining"
    assert failed["output"][0]["status"] == "incomplete"


async def test_the_sdk_reads_streams_and_structured_answers() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    async with serving(THINKS) as stack, sdk(stack) as client:
        async with client.responses.stream(model="tiny", input="2+2?") as stream:
            texts = [each.delta async for each in stream if each.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(texts) == final.output_text == "It is 4."
        whole = await client.responses.create(model="tiny", input="2+2?", text=form)
        assert whole.output_text == "It is 4."
        asked = stack.tokenizer.prepared[-1].response_format.json_schema
        assert json.loads(asked.schema_json) == schema
        assert (asked.name, asked.strict) == ("a", True)
        count = await client.responses.input_tokens.count(model="tiny", input="hi", instructions="x")
        assert count.input_tokens == len("1: x\n2: hi\n")


async def test_a_conversation_is_compacted_by_its_model() -> None:
    async with serving("All is well.") as stack, sdk(stack) as client:
        said: Any = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        compacted = await client.responses.compact(model="tiny", input=said)
        sent: Any = [each.to_dict() for each in compacted.output]
        spec.CompactResource.model_validate(compacted.to_dict())
        assert [each["type"] for each in sent] == ["message", "compaction"]
        assert compacted.usage.output_tokens > 0
        await client.responses.create(model="tiny", input=[*sent, {"role": "user", "content": "And 3+3?"}])
        messages = stack.tokenizer.prepared[-1].conversation.messages
        assert [each.content for each in messages][::2] == ["2+2?", "And 3+3?"]
        assert messages[1].content.endswith("All is well.")


async def test_a_summary_that_is_not_whole_takes_no_conversations_place() -> None:
    async with serving("<think>Where to begin") as stack:
        response = await post(stack, "/compact")
    assert response.status_code == 500
    assert "no whole summary" in response.json()["error"]["message"]


@pytest.mark.parametrize("tokens_per_step", [1, 7, 20, 1000])
async def test_a_call_is_whole_though_its_end_comes_with_the_text_behind_it(tokens_per_step: int) -> None:
    async with serving(f"Hi{CALL}bye, and more", tokens_per_step=tokens_per_step) as stack:
        output = (await post(stack, tools=[ADD])).json()["output"]
    calls = [each for each in output if each["type"] == "function_call"]
    assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [
        ("add", {"a": 2, "b": "}</x>"})
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 2}, "max_tool_calls"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name"),
    ({"include": ["reasoning"]}, "include[0]"),
    ({"truncation": "some"}, "truncation"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [{**ADD, "name": "no name"}]}, "tools[0].name"),
    ({"tools": [{**APPLY, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"type": "computer_call", "id": "cu_1"}]}, "input[0].type"),
    ({"input": [{"foo": 1}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
        "input[0].output[0].type",
    ),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "4"}]}, "input[0].call_id"),
    ({"personality": "pirate"}, "personality"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[field for _, field in REFUSED])
async def test_what_is_not_served_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    async with serving() as stack:
        response = await post(stack, **body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == field
        assert field in error["message"]
        assert not stack.engines[0].submissions


async def test_what_codex_always_sends_is_served() -> None:
    """The fields, tools and items of its requests, with what it sends back of an answer."""
    body: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ],
        "tools": [
            {**ADD, "name": "shell", "description": "Runs."},
            APPLY,
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__x", "description": "", "tools": [ADD]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198-session",
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    async with serving(ANSWERS["custom"]) as stack:
        streamed = await events(stack, **body)
        messages = stack.tokenizer.prepared[-1].conversation.messages
    assert roles(messages) == ["system", "developer", "user", "assistant", "tool"]
    done = [each["item"] for each in streamed if each["type"] == "response.output_item.done"]
    assert done[-1]["input"] == PATCH
    assert streamed[-1]["response"]["usage"]["output_tokens"] > 0


async def test_limits_tiers_and_refusals_are_those_of_every_face() -> None:
    refusal = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "full", retry_after_s=2.0)
    async with deployed(ScriptedEngine(refusal=refusal)) as stack:
        response = await post(stack, stream=True)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await post(stack, model="none")).status_code == 404
    async with deployed(tables={"gateway": {"request": {"max_messages": 2}}}) as stack:
        many = await post(stack, input=[{"role": "user", "content": "x"}] * 3)
        assert many.json()["error"]["param"] == "input"


async def test_a_client_that_leaves_ends_the_work() -> None:
    engine = ScriptedEngine(reply=says("x" * 4000), step_s=0.01)
    async with deployed(engine) as stack:
        body = {"model": "tiny", "input": "hi", "stream": True}
        async with stack.http.stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200
            await anext(response.aiter_raw())
        while not engine.cancels:
            engine.changed.clear()
            await engine.changed.wait()
    assert engine.num_generated < 4000
