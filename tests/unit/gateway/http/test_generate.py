"""Both generating endpoints over real sockets, against a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from millrace.inference.v1 import inference_pb2

from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, encode, written

HI = [{"role": "user", "content": "hi"}]


async def test_chat_answers_whole() -> None:
    async with deployed() as stack:
        response = await stack.chat()
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "hello 0"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["service_tier"] == "standard"
        assert body["usage"]["prompt_tokens"] == len(encode("2: hi\n"))
        assert body["usage"]["completion_tokens"] == len("hello 0") + 1
        assert response.headers["x-request-id"] == "request-1"
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_chat_streams_with_usage_last() -> None:
    async with deployed() as stack:
        events = await stack.events(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            stream_options={"include_usage": True},
            include_timing=True,
        )
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        assert text == "hello 0"
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "stop"
        assert all(e["usage"] is None for e in events[:-1])
        usage = events[-1]["usage"]
        assert events[-1]["choices"] == []
        parts = usage["time_to_first_token"]
        assert parts["total_ms"] == pytest.approx(
            sum(value for name, value in parts.items() if name != "total_ms")
        )
        assert parts["queue_ms"] == pytest.approx(1.0)
        timings = usage["timings"]
        assert (timings["queue_ms"], timings["first_token_ms"]) == (parts["queue_ms"], parts["total_ms"])
        assert (timings["prepare_ms"], timings["prefill_ms"]) == (parts["preprocess_ms"], parts["prefill_ms"])
        assert timings["tokens_per_second"] > 0
        assert timings["accepted_tokens"] <= timings["drafted_tokens"]


async def test_n_choices_are_kept_apart() -> None:
    async with deployed() as stack:
        body = (await stack.chat(n=3)).json()
        assert [c["message"]["content"] for c in body["choices"]] == ["hello 0", "hello 1", "hello 2"]


async def test_completions_of_several_prompts_number_their_choices_in_order() -> None:
    async with deployed() as stack:
        response = await stack.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": ["a", "bc"], "n": 2, "max_tokens": 50, "echo": True},
        )
        assert response.status_code == 200, response.text
        texts = [(c["index"], c["text"]) for c in response.json()["choices"]]
        assert texts == [(0, "ahello 0"), (1, "ahello 1"), (2, "bchello 0"), (3, "bchello 1")]
        assert response.json()["usage"]["prompt_tokens"] == 3


async def test_completions_take_token_ids_and_report_logprobs() -> None:
    async with deployed() as stack:
        response = await stack.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": encode("xy"), "max_tokens": 3, "logprobs": 0},
        )
        choice = response.json()["choices"][0]
        assert choice["text"] == "hel"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["h", "e", "l"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_echoed_prompt_has_its_logprobs_in_every_choice(order: tuple[int, int]) -> None:
    class InOrder(ScriptedEngine):
        async def _serve(self, submit: Any, outputs: Any) -> None:
            for choice in order:
                await self._serve_choice(submit, choice, outputs)

    body = {"model": "tiny", "prompt": "abc", "n": 2, "max_tokens": 3, "echo": True, "logprobs": 0}
    async with deployed(InOrder()) as stack:
        whole = (await stack.http.post("/v1/completions", json=body)).json()
        events = await stack.events("/v1/completions", **body)
    for bodies in ([whole], events):
        choices = [choice for each in bodies for choice in each["choices"]]
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            logprobs = [choice["logprobs"] for choice in mine if choice["logprobs"]]
            assert "".join(choice["text"] for choice in mine) == "abchel"
            assert [token for each in logprobs for token in each["tokens"]] == list("abchel")
            assert [offset for each in logprobs for offset in each["text_offset"]] == list(range(6))


# A character of two bytes, one of three and one of four, cut where the prompt ends.
@pytest.mark.parametrize("cut", range(1, 11))
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_and_its_answer_are_one_text_wherever_the_prompt_ends(cut: int, stream: bool) -> None:
    text = "a\u00e9\u20ac\U0001f642b"
    ids = encode(text)
    engine = ScriptedEngine(reply=lambda _submit, _choice: [*ids[cut:], END_ID])
    body = {"model": "tiny", "prompt": ids[:cut], "max_tokens": 20, "echo": True, "logprobs": 0}
    async with deployed(engine) as stack:
        if stream:
            choices = [
                choice for each in await stack.events("/v1/completions", **body) for choice in each["choices"]
            ]
        else:
            choices = (await stack.http.post("/v1/completions", json=body)).json()["choices"]
        request = inference_pb2.GenerateRequest(
            model="tiny", token_ids=inference_pb2.TokenIds(ids=ids[:cut]), echo=True
        )
        metadata = ((CONTEXT_HEADER, signed_context()),)
        answers = [each async for each in stack.inference.Generate(request, metadata=metadata)]
    assert "".join(choice["text"] for choice in choices) == text
    assert "".join(choice.text for each in answers for choice in each.choices) == text
    offsets = [at for each in choices if each["logprobs"] for at in each["logprobs"]["text_offset"]]
    assert offsets[: len(ids)] == [len(bytes(ids[:at]).decode(errors="ignore")) for at in range(len(ids))]


async def test_body_that_is_compressed_is_refused_by_the_header_that_says_so() -> None:
    async with deployed() as stack:
        for encoding, status in (("gzip", 400), ("identity", 200)):
            response = await stack.http.post(
                "/v1/completions",
                content=b'{"model": "tiny", "prompt": "a"}',
                headers={"content-encoding": encoding},
            )
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "content-encoding"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_tokens_behind_a_stop_string_are_not_charged(
    tokens_per_step: int, logprobs: int | None
) -> None:
    engine = ScriptedEngine(reply=lambda _s, _c: encode("one STOP and much more" * 3))
    engine.tokens_per_step = tokens_per_step
    async with deployed(engine) as stack:
        body = {"model": "tiny", "prompt": "hi", "stop": [" STOP"], "max_tokens": 60, "logprobs": logprobs}
        answer = (await stack.http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == "one"
        assert answer["usage"]["completion_tokens"] == len("one STOP")


@pytest.mark.parametrize("tokens_per_step", [1, 7, 64])
@pytest.mark.parametrize(("asked", "chunk"), [(60, 1024), (None, 8)])
async def test_answer_ends_where_the_budget_ends_however_late_it_is_seen(
    tokens_per_step: int, asked: int | None, chunk: int
) -> None:
    engine = ScriptedEngine(reply=lambda _s, _c: encode("abcdefghij" * 10), tokens_per_step=tokens_per_step)
    tables = {
        "tenant": {"monthly_tokens": 33},
        "gateway": {"limits": {"default_completion_tokens": chunk}},
    }
    async with deployed(engine, tables=tables) as stack:
        choice, usage = await _answer(stack, asked)
        # All but the prompt's tokens.
        granted = 33 - usage["prompt_tokens"]
        assert usage["completion_tokens"] == granted
        assert choice["message"]["content"] == ("abcdefghij" * 10)[:granted]
        assert len(choice["logprobs"]["content"]) == granted
        assert choice["finish_reason"] == "length"
        refused = await stack.chat(max_tokens=1)
        assert refused.json()["error"]["metadata"] == {"limit": "33", "used": "33"}


@pytest.mark.parametrize("tokens_per_step", [1, 7, 64])
async def test_answer_within_the_budget_is_whole(tokens_per_step: int) -> None:
    engine = ScriptedEngine(reply=lambda _s, _c: encode("abcdefghij" * 10), tokens_per_step=tokens_per_step)
    limits = {"default_completion_tokens": 8}
    tables = {"tenant": {"monthly_tokens": 1000}, "gateway": {"limits": limits}}
    async with deployed(engine, tables=tables) as stack:
        choice, _ = await _answer(stack, None)
        assert choice["message"]["content"] == "abcdefghij" * 10


async def _answer(stack: Deployment, max_tokens: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    response = await stack.chat(max_tokens=max_tokens, logprobs=True)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0], response.json()["usage"]


async def test_stop_string_over_chunks_cancels_the_engine_and_hides_its_logprobs() -> None:
    # Slow enough that it has not ended by itself when the stop string is found.
    engine = ScriptedEngine(reply=lambda submit, choice: encode("one two STOP three") * 20, step_s=0.01)
    async with deployed(engine) as stack:
        body = (await stack.chat(stop=[" STOP"], logprobs=True, max_tokens=300)).json()
        choice = body["choices"][0]
        assert choice["message"]["content"] == "one two"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == " STOP"
        assert "".join(t["token"] for t in choice["logprobs"]["content"]) == "one two"
        while not engine.cancels:
            engine.changed.clear()
            await engine.changed.wait()
        assert [cancel.reason for cancel in engine.cancels] == [3]
        while engine.num_running:
            engine.changed.clear()
            await engine.changed.wait()


async def test_tool_calls_and_reasoning_are_taken_out_of_the_text() -> None:
    text = 'think\n</think>\n\nsure\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine = ScriptedEngine(reply=lambda submit, choice: [*written(text), END_ID])
    async with deployed(engine) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        body = (await stack.chat(tools=tools)).json()
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == "think"
        assert message["content"] == "sure"
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        prompt = [{"role": "user", "content": "hi"}]
        events = await stack.events("/v1/chat/completions", messages=prompt, tools=tools)
        calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
        assert calls[0]["id"]
        assert "".join(c["function"]["arguments"] for c in calls) == '{"a": 1}'


@pytest.mark.parametrize(
    ("written_so_far", "content", "arguments"),
    [
        ("sure\n<tool_call>\n", "sure", None),
        ('sure\n<tool_call>\n{"name": "ad', "sure", None),
        ('<tool_call>\n{"name": "add"', "", ""),
        ('<tool_call>\n{"name": "add", "arguments": {"a": [1, "x', "", '{"a": [1, "x'),
    ],
)
async def test_a_call_that_max_tokens_cut_is_no_text(
    written_so_far: str, content: str, arguments: str | None
) -> None:
    asked = {"tools": [{"type": "function", "function": {"name": "add"}}], "max_tokens": len(written_so_far)}
    engine = ScriptedEngine(reply=lambda _submit, _choice: written(written_so_far + "d and more"))
    async with deployed(engine) as stack:
        (choice,) = (await stack.chat(**asked)).json()["choices"]
        chunks = await stack.events("/v1/chat/completions", messages=HI, **asked)
    message = choice["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    pieces = [call for each in deltas for call in each.get("tool_calls") or ()]
    assert (message["content"] or "", choice["finish_reason"]) == (content, "length")
    assert "".join(each.get("content") or "" for each in deltas) == content
    if arguments is None:
        assert not message.get("tool_calls")
        assert not pieces
        return
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": arguments}
    assert "".join(piece["function"].get("arguments") or "" for piece in pieces) == arguments


async def test_service_tier_is_honoured_and_echoed() -> None:
    async with deployed() as stack:
        response = await stack.chat(service_tier="fast")
        assert response.json()["service_tier"] == "fast"
        submitted = stack.engines[0].submissions[0].context
        from millrace.common.v1 import context_pb2

        context = context_pb2.RequestContext.FromString(submitted.payload)
        assert (context.tier, context.priority) == ("fast", 5)
        refused = await stack.chat(service_tier="platinum")
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "service_tier"


async def test_client_that_leaves_cancels_the_engine() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x") * 4000, step_s=0.005)
    async with deployed(engine) as stack:
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        while not engine.cancels or engine.num_running:
            engine.changed.clear()
            await asyncio.wait_for(engine.changed.wait(), 10)
        assert engine.cancels[0].reason == 1
        while stack.gateway.num_open:
            await asyncio.sleep(0.01)


async def test_models_say_by_what_tokens_are_drawn_and_who_says_so() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.generation_config = '{"temperature": 0.8, "top_k": 40, "top_p": 0.9}'
    tokenizer.sampling_sources = {"temperature": "llama.cpp"}
    tables = {"model": {"defaults": {"top_k": 5}}}
    async with deployed(tokenizer=tokenizer, tables=tables) as stack:
        expected = {
            "temperature": {"value": 0.8, "source": "llama.cpp"},
            "top_k": {"value": 5, "source": "defaults of the model in the configuration"},
            "top_p": {"value": 0.9, "source": "generation_config.json"},
        }
        assert (await stack.http.get("/v1/models/tiny")).json()["sampling_defaults"] == expected
        metadata = ((CONTEXT_HEADER, signed_context()),)
        listed = await stack.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        told = {each.option: (each.value, each.source) for each in listed.models[0].sampling_defaults}
        assert told == {name: (each["value"], each["source"]) for name, each in expected.items()}
        await stack.chat()
        drawn = stack.engines[0].submissions[0].sampling
        assert (drawn.temperature, drawn.top_k) == (pytest.approx(0.8), 5)
    async with deployed() as stack:
        assert (await stack.http.get("/v1/models/tiny")).json()["sampling_defaults"] == {}


async def test_a_checkpoint_that_is_not_sampled_is_greedy_where_one_answer_is_asked_for() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.generation_config = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9}'
    async with deployed(tokenizer=tokenizer) as stack:
        told = (await stack.http.get("/v1/models/tiny")).json()["sampling_defaults"]
        assert told == {"temperature": {"value": 0.0, "source": "generation_config.json"}}
        for options in ({}, {"top_p": 0.5}, {"temperature": 0.7}, {"n": 2}):
            await stack.chat(**options)
        drawn = [each.sampling.temperature for each in stack.engines[0].submissions]
        # Greedy answers would be equal.
        assert drawn == [0.0, 0.0, pytest.approx(0.7), 1.0]
    async with deployed(tokenizer=tokenizer, tables={"model": {"defaults": {"temperature": 0.3}}}) as stack:
        await stack.chat()
        assert stack.engines[0].submissions[0].sampling.temperature == pytest.approx(0.3)


async def test_models_and_tokens() -> None:
    async with deployed() as stack:
        listed = (await stack.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "default"]
        assert (await stack.http.get("/v1/models/tiny")).json()["max_model_len"] == 4096
        assert (await stack.http.get("/v1/models/none")).status_code == 404
        only = {"x-millrace-context": signed_context(allowed_models=("default",))}
        assert (await stack.http.get("/v1/models/tiny", headers=only)).status_code == 403
        other = {"x-millrace-context": signed_context(allowed_models=("other",))}
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await stack.http.post(path, json=body, headers=only)).status_code == 200
            assert (await stack.http.post(path, json=body, headers=other)).status_code == 403
        tokens = (await stack.http.post("/tokenize", json={"prompt": "hé"})).json()
        assert tokens["count"] == 3
        text = (await stack.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "hé"}
        assert (await stack.http.get("/health")).json() == {"status": "ok"}
        assert "millrace_build_info" in (await stack.http.get("/metrics")).text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user": "x" * 513}, "user"),
        ({"safety_identifier": "x" * 513}, "safety_identifier"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "refusal": "y"}]}]},
            "messages[0].content[0].refusal",
        ),
        ({"messages": [{"role": "user", "content": "x", "refusal": "y"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]},
            "messages[0].reasoning",
        ),
    ],
)
async def test_nothing_of_a_message_is_ignored_and_nothing_is_unbounded(
    body: dict[str, Any], field: str
) -> None:
    async with deployed() as stack:
        refused = await stack.chat(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


async def test_labels_beside_the_metadata_do_not_count_as_metadata() -> None:
    async with deployed() as stack:
        full = {str(number): "x" for number in range(16)}
        answer = await stack.chat(metadata=full, user="somebody", safety_identifier="else")
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": False},
            "add_special_tokens",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [0] * 20_000}},
            "chat_template_kwargs",
        ),
    ],
)
async def test_nothing_is_ignored_where_tokens_are_counted(body: dict[str, Any], field: str) -> None:
    async with deployed() as stack:
        refused = await stack.http.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


async def test_documents_that_the_tokenizer_service_could_not_read_are_refused() -> None:
    nested: Any = "x"
    for _ in range(30):
        nested = {"a": nested}
    async with deployed() as stack:
        # Written as a message it is just too deep to be read: it would end the stream for everybody.
        refused = await stack.chat(documents=[{"a": [nested]}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents"), refused.text


async def test_roles_that_are_known_are_named() -> None:
    async with deployed() as stack:
        refused = await stack.chat(messages=[{"role": "wizard", "content": "x"}])
        message = refused.json()["error"]["message"]
        assert message == "messages[0].role: 'wizard' is not one of system, user, assistant, tool, developer"


async def test_parts_of_a_message_are_joined() -> None:
    async with deployed() as stack:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "image_url": None}]
        answer = await stack.chat(messages=[{"role": "user", "content": parts}], user="x" * 512)
        assert answer.status_code == 200, answer.text
        (prepared,) = stack.tokenizer.prepared
        assert prepared.conversation.messages[0].content == "onetwo"


async def test_a_call_in_a_history_may_have_no_arguments() -> None:
    async with deployed() as stack:
        function = {"name": "f", "arguments": None}
        calls = [{"id": "c", "type": "function", "function": function}]
        history = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
        answer = await stack.chat(messages=history)
        assert answer.status_code == 200, answer.text
        (prepared,) = stack.tokenizer.prepared
        assert prepared.conversation.messages[1].tool_calls[0].arguments_json == "{}"


async def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    async with deployed() as stack:
        body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":3.0,"n":%b}'
        answer = await stack.http.post("/v1/chat/completions", content=body % b"1e0")
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        refused = await stack.http.post("/v1/chat/completions", content=body % b"1.5")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


async def test_beside_such_a_number_all_else_is_what_was_written() -> None:
    async with deployed() as stack:
        schema = b'{"enum":[1.0,12345678901234567890.123,100000000000000000000001]}'
        format_ = b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}' % schema
        body = (
            b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":3.0,"response_format":%b'
            b',"seed":9007199254740993.0,"logit_bias":{"7":1.5}}'
        )
        answer = await stack.http.post("/v1/chat/completions", content=body % format_)
        assert answer.status_code == 200, answer.text
        (prepared,) = stack.tokenizer.prepared
        assert prepared.response_format.json_schema.schema_json.encode() == schema
        (submitted,) = stack.engines[0].submissions
        assert submitted.sampling.seed == 2**53 + 1


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ('"logit_bias": {"5": 1, "007": 1}', "logit_bias: key '007' is not a token id"),
        ('"logit_bias": {"0": 1, "-0": 2}', "logit_bias: key '-0' is not a token id"),
        ('"logit_bias": {"5": 1, "7": "x"}', "logit_bias: key '7': Expected `float`, got `str`"),
        ('"metadata": {"a": "b", "c": 1}', "metadata: key 'c': Expected `str`, got `int`"),
        ('"metadata": {"a": null}', "metadata: key 'a': Expected `str`, got `null`"),
        ('"logit_bias": {"7": 1e400}', "logit_bias: Number out of range"),
    ],
)
async def test_a_refused_entry_is_named_by_its_key(field: str, said: str) -> None:
    async with deployed() as stack:
        body = '{"model":"tiny","messages":[{"role":"user","content":"hi"}],%s}' % field  # noqa: UP031
        answer = await stack.http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(said)
        assert error["param"] == field[1 : field.index('"', 1)]


async def test_what_changes_nothing_is_known_by_its_value() -> None:
    async with deployed() as stack:
        body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],%b}'
        for extra, status in (
            (b'"modalities": [ "text" ], "priority": 0.0, "store": false', 200),
            (b'"store": 0', 400),
            (b'"priority": false', 400),
            (b'"priority": 1e999', 400),
            (b'"n": 1.0, "priority": 1e999999999999999999999', 400),
        ):
            answer = await stack.http.post("/v1/chat/completions", content=body % extra)
            assert answer.status_code == status, (extra, answer.text)


async def test_a_schema_may_have_a_description_which_is_named_as_unread() -> None:
    async with deployed() as stack:
        schema = {"name": "person", "description": "A person.", "schema": {"type": "object"}}
        format_ = {"type": "json_schema", "json_schema": schema}
        answer = await stack.chat(response_format=format_, max_tokens=2)
        assert answer.status_code == 200, answer.text
        assert "response_format.json_schema.description" in answer.headers["x-millrace-warning"]
