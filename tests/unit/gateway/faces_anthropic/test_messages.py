"""Anthropic's Messages API over real sockets, against scripted engines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from millrace.common.v1 import context_pb2

from contract.errors import MillraceError, Reason
from contract.grammar import EnforcementReport, KeywordStatus
from gateway.faces.anthropic import answer_types as answers
from gateway.faces.anthropic.errors import ApiErrorBody
from gateway.faces.anthropic.fields import REFUSED, WITHOUT_EFFECT
from gateway.faces.anthropic.thoughts import PURPOSE, Thoughts
from gateway.faces.sealed import Seal
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import SECRET, Deployment, deployed
from tests.unit.gateway.rig.engine import Reply, ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, written

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
BODY = {"model": "tiny", "max_tokens": 400, "messages": HI}
PATH = "/v1/messages"


def says(text: str) -> Reply:
    return lambda _submit, _choice: [*written(text), END_ID]


def call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def whole(stack: Deployment, **extra: Any) -> answers.MessageAnswer:
    response = await stack.http.post(PATH, json={**BODY, **extra})
    assert response.status_code == 200, response.text
    answer = msgspec.json.decode(response.content, type=answers.MessageAnswer)
    # Nothing is written that is not declared.
    assert msgspec.json.decode(msgspec.json.encode(answer)) == response.json()
    return answer


async def streamed(stack: Deployment, **extra: Any) -> list[answers.MessageEvent]:
    response = await stack.http.post(PATH, json={**BODY, "stream": True, **extra})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return list(map(read_event, response.text.removesuffix("\n\n").split("\n\n")))


def read_event(block: str) -> answers.MessageEvent:
    name, data = re.fullmatch(r"event: (\w+)\ndata: (.*)", block).groups()  # type: ignore[union-attr]
    event: answers.MessageEvent = msgspec.json.decode(data, type=answers.MessageEvent)
    assert msgspec.json.decode(msgspec.json.encode(event)) == msgspec.json.decode(data)
    assert event.__struct_config__.tag == name
    return event


def joined(events: list[answers.MessageEvent]) -> answers.MessageAnswer:
    """The message that a client makes of events; raises where one is out of its order."""
    start, ping, *middle, end, stop = [
        each for index, each in enumerate(events) if index == 1 or not isinstance(each, answers.Ping)
    ]
    assert isinstance(start, answers.MessageStart)
    assert isinstance(ping, answers.Ping)
    assert isinstance(end, answers.MessageDelta)
    assert isinstance(stop, answers.MessageStop)
    assert (start.message.content, start.message.stop_reason) == ([], None)
    blocks: list[Any] = []
    pieces: list[str] = []
    is_open = False
    for event in middle:
        if isinstance(event, answers.BlockStart):
            assert not is_open
            assert event.index == len(blocks)
            blocks.append(msgspec.structs.asdict(event.content_block))
            blocks[-1]["type"] = event.content_block.__struct_config__.tag
            is_open, pieces = True, []
        elif isinstance(event, answers.BlockDelta):
            assert is_open
            assert event.index == len(blocks) - 1
            (name,) = event.delta.__struct_fields__
            text = getattr(event.delta, name)
            if name == "partial_json":
                pieces.append(text)
            else:
                blocks[-1][name] += text
        else:
            assert isinstance(event, answers.BlockStop)
            assert is_open
            is_open = False
            if pieces:
                blocks[-1]["input"] = msgspec.json.decode("".join(pieces))
    assert not is_open
    return msgspec.structs.replace(
        start.message,
        content=msgspec.convert(blocks, list[answers.AnswerBlock]),
        stop_reason=end.delta.stop_reason,
        stop_sequence=end.delta.stop_sequence,
        usage=end.usage,
    )


def but_signatures(message: answers.MessageAnswer) -> answers.MessageAnswer:
    """No two of them are alike."""
    content = [
        msgspec.structs.replace(each, signature="") if isinstance(each, answers.ThinkingAnswer) else each
        for each in message.content
    ]
    return msgspec.structs.replace(message, content=content)


@pytest.mark.parametrize(
    ("text", "extra", "blocks", "reason"),
    [
        ("hello", {}, ["text"], "end_turn"),
        ("why\n</think>\n\nhello", {}, ["thinking", "text"], "end_turn"),
        ("why\n</think>\n\n" + call('{"a": 1}'), {"tools": [TOOL]}, ["thinking", "tool_use"], "tool_use"),
        (
            "why\n</think>\n\nsure\n" + call('{"a": "}\\""}') + "\n" + call("{}"),
            {"tools": [TOOL]},
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
        (
            "why\n</think>\n\none\n" + call('{"a": 1}') + "\ntwo" + call("{}") + "\n\nthree",
            {"tools": [TOOL]},
            ["thinking", "text", "tool_use", "text", "tool_use", "text"],
            "tool_use",
        ),
        (
            call("{}").removesuffix("</tool_call>") + "behind",
            {"tools": [TOOL]},
            ["tool_use", "text"],
            "tool_use",
        ),
        (
            call('{"a": 1}') + call("{}"),
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ["tool_use"],
            "tool_use",
        ),
        (call("[1, 2]"), {"tools": [TOOL]}, ["tool_use"], "tool_use"),
        (call('{"a": nothing}'), {"tools": [TOOL]}, ["tool_use"], "tool_use"),
        ("one STOP two", {"stop_sequences": ["STOP"]}, ["text"], "stop_sequence"),
        ("abcdefgh", {"max_tokens": 4}, ["text"], "max_tokens"),
        ("a" * 5000, {"max_tokens": 32000}, ["text"], "model_context_window_exceeded"),
        ("why\n</think>\n\n", {}, ["thinking"], "end_turn"),
        ("why never ended", {}, ["thinking"], "end_turn"),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 3, 5000])
async def test_a_stream_is_the_whole_message_however_it_is_cut(
    text: str, extra: dict[str, Any], blocks: list[str], reason: str, tokens_per_step: int
) -> None:
    engine = ScriptedEngine(reply=says(text), tokens_per_step=tokens_per_step)
    async with deployed(engine) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n" if text.startswith("why") else ""
        message = await whole(stack, **extra)
        events = await streamed(stack, **extra)
        assert [each.__struct_config__.tag for each in message.content] == blocks
        assert message.stop_reason == reason
        assert message.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
        assert but_signatures(joined(events)) == but_signatures(message)
        assert message.id == "msg_request-1"
        assert message.usage.input_tokens == len("2: hi\n") - 1
        assert message.usage.cache_read_input_tokens == 1
        assert message.usage.output_tokens_details.thinking_tokens <= message.usage.output_tokens


async def test_a_stream_that_can_send_nothing_for_long_sends_pings() -> None:
    async with deployed(ScriptedEngine(reply=says("why" * 200 + "</think>so"))) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        config = {"type": "adaptive", "display": "omitted"}
        events = await streamed(stack, thinking=config, max_tokens=700)
        assert sum(isinstance(each, answers.Ping) for each in events) > 10
        thought, text = joined(events).content
        assert isinstance(thought, answers.ThinkingAnswer)
        assert (thought.thinking, text) == ("", answers.TextAnswer("so"))
        assert but_signatures(joined(events)) == but_signatures(
            await whole(stack, thinking=config, max_tokens=700)
        )


async def test_thoughts_go_back_as_they_came_and_no_others() -> None:
    async with deployed(ScriptedEngine(reply=says("why\n</think>\n\nhello"))) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        content = msgspec.to_builtins((await whole(stack)).content)
        turns = [*HI, {"role": "assistant", "content": content}, *HI]
        await whole(stack, messages=turns)
        _, told, _ = stack.tokenizer.prepared[-1].conversation.messages
        assert (told.reasoning, told.content) == ("why", "hello")

        hidden = (await whole(stack, thinking={"type": "adaptive", "display": "omitted"})).content
        turns[1]["content"] = msgspec.to_builtins(hidden)
        assert turns[1]["content"][0]["thinking"] == ""
        await whole(stack, messages=turns)
        assert stack.tokenizer.prepared[-1].conversation.messages[1].reasoning == "why"

        turns[1]["content"] = content
        content[0]["thinking"] = "why not"
        changed = await stack.http.post(PATH, json={**BODY, "messages": turns})
        assert refused_field(changed) == "messages[1].content[0].signature"

        content[0] = {"type": "thinking", "thinking": "why", "signature": "of another server"}
        foreign = await stack.http.post(PATH, json={**BODY, "messages": turns})
        assert foreign.status_code == 200
        assert "messages[1].content[0]" in foreign.headers["x-millrace-warning"]
        assert stack.tokenizer.prepared[-1].conversation.messages[1].reasoning == ""


async def test_a_thought_of_one_tenant_is_none_of_another() -> None:
    async with deployed(ScriptedEngine(reply=says("why\n</think>\n\nhello"))) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        for tenant, status in (("acme", 200), ("other", 400)):
            thoughts = Thoughts(Seal(SECRET.encode(), PURPOSE), tenant)
            block = {"type": "thinking", "thinking": "why", "signature": thoughts.sign("why", shown=True)}
            turns = [*HI, {"role": "assistant", "content": [block]}, *HI]
            assert (await stack.http.post(PATH, json={**BODY, "messages": turns})).status_code == status


async def test_turns_become_the_messages_of_a_template() -> None:
    async with deployed() as stack:
        used = {"type": "tool_use", "id": "toolu_a", "name": "add", "input": {"a": [1]}}
        result = {"type": "tool_result", "tool_use_id": "toolu_a"}
        turns = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": []},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, used]},
            {
                "role": "user",
                "content": [
                    {**result, "is_error": True, "content": [{"type": "text", "text": "broken"}]},
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "The"},
        ]
        await whole(
            stack, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], messages=turns
        )
        asked = stack.tokenizer.prepared[0].conversation
        told = [(each.role, each.content) for each in asked.messages]
        assert told == [
            (1, "a\n\nb"),
            (2, "one\n\ntwo"),
            (3, "so"),
            (4, "Error: broken"),
            (2, "go on"),
            (1, "be brief"),
            (3, "The"),
        ]
        (made,) = asked.messages[2].tool_calls
        assert (made.id, made.name, msgspec.json.decode(made.arguments_json)) == ("a", "add", {"a": [1]})
        assert asked.messages[3].tool_call_id == "a"
        assert asked.continue_final_message


Look = Callable[[Any, Any], object]


def option(prepared: Any, name: str) -> object:
    return dict(prepared.conversation.template_options).get(name)


SERVED: list[tuple[dict[str, Any], Look, object]] = [
    ({"temperature": 0.5}, lambda s, p: s.sampling.temperature, 0.5),
    ({"top_p": 0.25}, lambda s, p: s.sampling.top_p, 0.25),
    ({"top_k": 7}, lambda s, p: s.sampling.top_k, 7),
    ({"max_tokens": 5}, lambda s, p: s.sampling.max_tokens, 5),
    ({"service_tier": "fast"}, lambda s, p: tier_of(s), "fast"),
    ({"service_tier": "standard_only"}, lambda s, p: tier_of(s), "standard"),
    ({"thinking": {"type": "adaptive"}}, lambda s, p: option(p, "enable_thinking"), True),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 99}},
        lambda s, p: s.sampling.max_thinking_tokens,
        99,
    ),
    ({"thinking": {"type": "disabled"}}, lambda s, p: option(p, "enable_thinking"), False),
    ({"output_config": {"effort": "max"}}, lambda s, p: option(p, "reasoning_effort"), "max"),
    ({}, lambda s, p: option(p, "enable_thinking"), None),
    ({"tools": [TOOL]}, lambda s, p: p.conversation.tools[0].parameters_json, '{"type":"object"}'),
    ({"tools": [{**TOOL, "strict": True}]}, lambda s, p: p.conversation.tools[0].strict, True),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}},
        lambda s, p: p.conversation.tool_choice.name,
        "add",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        lambda s, p: p.response_format.json_schema.strict,
        True,
    ),
    (
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        lambda s, p: s.grammar.payload,
        b"grammar",
    ),
]


def tier_of(submit: Any) -> str:
    return context_pb2.RequestContext.FromString(submit.context.payload).tier


@pytest.mark.parametrize(("extra", "look", "expected"), SERVED)
async def test_a_field_reaches_those_who_serve_it(
    extra: dict[str, Any], look: Look, expected: object
) -> None:
    async with deployed() as stack:
        response = await stack.http.post(PATH, json={**BODY, **extra})
        assert response.status_code == 200, response.text
        assert look(stack.engines[0].submissions[0], stack.tokenizer.prepared[0]) == expected
        assert "x-millrace-warning" not in response.headers


def refused_field(response: httpx.Response, kind: str = "invalid_request_error") -> str | None:
    """The field that a refusal names, in its details and in its message."""
    error = msgspec.json.decode(response.content, type=ApiErrorBody)
    assert error.error.type == kind, response.text
    assert error.request_id == response.headers["request-id"] == "request-1"
    field, code = error.error.details.field, error.error.details.error_code
    assert field is None or field in error.error.message or code == "context_length_exceeded"
    return error.error.details.field


THINKS = {"type": "enabled", "budget_tokens": 400}
USED = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    *(({name: {"a": 1}}, name) for name in REFUSED),
    ({"odd": 1}, "odd"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [USED]}]}, "messages[0].content[0].type"),
    ({"messages": [*HI, {"role": "assistant", "content": [USED]}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": [{**USED, "input": 1}]}]},
        "messages[0].content[0].input",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": [{"type": "document"}]}, "system[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"thinking": THINKS}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {**THINKS, "budget_tokens": 0}}, "thinking.budget_tokens"),
    # What ends a thought takes more.
    ({"thinking": {**THINKS, "budget_tokens": 1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"metadata": {"user_id": "u" * 600}}, "metadata.user_id"),
]


async def test_what_is_not_served_is_refused_by_name() -> None:
    async with deployed() as stack:
        for extra, field in REFUSALS:
            response = await stack.http.post(PATH, json={**BODY, **extra})
            assert response.status_code == 400, extra
            assert refused_field(response) == field, response.text
        missing = await stack.http.post(PATH, json={"model": "tiny", "messages": HI})
        assert refused_field(missing) == "max_tokens"


async def test_what_has_no_effect_is_named_in_a_header() -> None:
    async with deployed() as stack:
        for name in WITHOUT_EFFECT:
            response = await stack.http.post(PATH, json={**BODY, name: {"a": 1}})
            assert name in response.headers["x-millrace-warning"]
        stack.tokenizer.reasoning_format = ""
        marked = [{"role": "user", "content": [{"type": "text", "text": "hi", "odd": 1}]}]
        response = await stack.http.post(PATH, json={**BODY, "messages": marked, "mcp_servers": []})
        assert response.headers["x-millrace-ignored"] == "messages[0].content[0].odd"


async def test_errors_have_the_apis_statuses_and_types() -> None:
    async with deployed(tables={"gateway": {"max_body_bytes": 100_000}}) as stack:
        engine = stack.engines[0]
        for reason, status, kind in (
            (Reason.QUEUE_LIMIT_EXCEEDED, 529, "overloaded_error"),
            (Reason.TOKEN_RATE_EXCEEDED, 429, "rate_limit_error"),
            (Reason.BUDGET_EXHAUSTED, 402, "billing_error"),
            (Reason.STEP_FAILED, 500, "api_error"),
            (Reason.DEADLINE_EXCEEDED, 504, "timeout_error"),
        ):
            engine.refusal = MillraceError(reason, "wait", retry_after_s=1.5)
            response = await stack.http.post(PATH, json=BODY)
            assert (response.status_code, refused_field(response, kind)) == (status, None)
            assert response.headers["retry-after"] == "2"
        unknown = await stack.http.post(PATH, json={**BODY, "model": "x"})
        assert (unknown.status_code, refused_field(unknown, "not_found_error")) == (404, "model")
        nothing = await stack.http.get("/v1/messages/nothing")
        assert (nothing.status_code, refused_field(nothing, "not_found_error")) == (404, None)
        long = await stack.http.post(PATH, json={**BODY, "system": "a" * 5000})
        assert (long.status_code, refused_field(long)) == (400, "messages")
        told = "prompt is too long: 5010 tokens > 4096 maximum. "
        assert long.json()["error"]["message"].startswith(told)
        large = await stack.http.post(PATH, json={**BODY, "system": "a" * 200_000})
        assert (large.status_code, refused_field(large, "request_too_large")) == (413, None)
        many = await stack.http.post(PATH, json={**BODY, "system": [{}] * 40_000})
        assert (many.status_code, refused_field(many, "request_too_large")) == (413, None)
        forged = await stack.http.post(PATH, json=BODY, headers={CONTEXT_HEADER: "forged"})
        assert forged.status_code == 401
        assert forged.json()["error"]["type"] == "authentication_error"


async def test_a_large_body_is_counted_before_it_is_parsed() -> None:
    async with deployed(tables={"gateway": {"request": {"max_values": 1000}}}) as stack:
        blocks = [{"type": "text", "text": "a" * 60}] * 1200
        response = await stack.http.post(PATH, json={**BODY, "system": blocks})
        assert refused_field(response) == "system"


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    engine = ScriptedEngine(reply=says("hello" * 800), step_s=0.005)
    async with deployed(engine) as stack:
        body = {**BODY, "max_tokens": 4000, "stream": True}
        async with stack.http.stream("POST", PATH, json=body) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if "text_delta" in piece:
                    stack.gateway._pipeline.end_all(MillraceError(Reason.DRAINING, "shutting down"))
    *_, last = text.removesuffix("\n\n").split("\n\n")
    name, _, data = last.partition("\ndata: ")
    error = msgspec.json.decode(data, type=ApiErrorBody)
    assert (name, error.error.type, error.request_id) == ("event: error", "overloaded_error", "request-1")
    assert "message_stop" not in text


async def test_client_that_leaves_cancels_the_engine() -> None:
    engine = ScriptedEngine(reply=says("hello" * 800), step_s=0.005)
    async with deployed(engine) as stack:
        body = {**BODY, "max_tokens": 4000, "stream": True}
        async with stack.http.stream("POST", PATH, json=body) as response:
            async for _ in response.aiter_lines():
                break
        while not engine.cancels or engine.num_running:
            engine.changed.clear()
            await asyncio.wait_for(engine.changed.wait(), 10)
        assert engine.cancels[0].reason == 1


async def test_a_count_is_what_a_message_is_charged() -> None:
    async with deployed() as stack:
        asked = {"model": "tiny", "messages": HI, "system": "be brief", "tools": [TOOL]}
        counted = await stack.http.post(f"{PATH}/count_tokens", json=asked)
        usage = (await whole(stack, **asked)).usage
        assert counted.json() == {"input_tokens": usage.input_tokens + usage.cache_read_input_tokens}
        refused = await stack.http.post(f"{PATH}/count_tokens", json={**asked, "max_tokens": 5})
        assert refused_field(refused) == "max_tokens"


async def test_the_name_of_a_tool_has_up_to_128_characters() -> None:
    name = "n" * 128
    async with deployed(ScriptedEngine(reply=says(call("{}", name)))) as stack:
        answer = await whole(stack, tools=[{**TOOL, "name": name}])
        (block,) = answer.content
        assert isinstance(block, answers.ToolUseAnswer)
        assert block.name == name
        refused = await stack.http.post(PATH, json={**BODY, "tools": [{**TOOL, "name": name + "n"}]})
        assert refused_field(refused) == "tools[0].name"


async def test_all_apis_tell_of_a_tool_whose_schema_is_not_enforced() -> None:
    chat = {**BODY, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    response = {"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "add"}]}
    asked = {
        PATH: ({**BODY, "tools": [TOOL]}, "tools[0].input_schema"),
        "/v1/chat/completions": (chat, "tools[0].function.parameters"),
        "/v1/responses": (response, "tools[0].parameters"),
    }
    tokenizer = ByteTokenizer()
    note = "tool 'add' takes any JSON object\n"
    tokenizer.enforcement = EnforcementReport(
        unenforced=(KeywordStatus("parameters", "/tools/0/parameters", note),)
    )
    async with deployed(tokenizer=tokenizer) as stack:
        for path, (body, field) in asked.items():
            told = (await stack.http.post(path, json=body)).headers["x-millrace-warning"]
            assert told == f"{field} is not enforced: tool 'add' takes any JSON object\\n", path


async def test_models_are_listed_in_the_form_of_who_asks() -> None:
    async with deployed() as stack:
        spoken = {"anthropic-version": "2023-06-01"}
        listed = await stack.http.get("/v1/models", headers=spoken)
        models = msgspec.json.decode(listed.content, type=answers.MessageModelList)
        assert [each.display_name for each in models.data] == ["tiny", "default"]
        assert (models.first_id, models.last_id) == ("tiny", "default")
        assert (await stack.http.get("/v1/models/tiny", headers=spoken)).json() == listed.json()["data"][0]
        missing = await stack.http.get("/v1/models/none", headers=spoken)
        assert refused_field(missing, "not_found_error") == "model"
        assert (await stack.http.get("/v1/models")).json()["object"] == "list"
        for query, names, more in (
            ("limit=1", ["tiny"], True),
            ("limit=1&after_id=tiny&beta=true", ["default"], False),
            ("before_id=default", ["tiny"], False),
            ("after_id=default", [], False),
        ):
            page = (await stack.http.get(f"/v1/models?{query}", headers=spoken)).json()
            assert ([each["id"] for each in page["data"]], page["has_more"]) == (names, more)
        for query, kind, field in (
            ("limit=0", "invalid_request_error", "limit"),
            ("after_id=none", "not_found_error", "after_id"),
            ("after_id=tiny&before_id=tiny", "invalid_request_error", "before_id"),
        ):
            wrong = await stack.http.get(f"/v1/models?{query}", headers=spoken)
            assert refused_field(wrong, kind) == field


async def test_timing_is_told_in_the_words_of_chat_where_it_is_asked_for() -> None:
    async with deployed() as stack:
        chat = await stack.chat(include_timing=True)
        timed = {**BODY, "include_timing": True}
        whole = (await stack.http.post(PATH, json=timed)).json()
        streamed = (await stack.http.post(PATH, json={**timed, "stream": True})).text
        (end,) = [block for block in streamed.split("\n\n") if block.startswith("event: message_delta")]
        ended = msgspec.json.decode(end.partition("data: ")[2])
        assert whole["timing"].keys() == chat.json()["usage"]["timings"].keys() == ended["timing"].keys()
        assert whole["timing"]["first_token_ms"] > 0
        assert whole["timing"]["cached_tokens"] == whole["usage"]["cache_read_input_tokens"]
        assert "timing" not in (await stack.http.post(PATH, json=BODY)).json()
