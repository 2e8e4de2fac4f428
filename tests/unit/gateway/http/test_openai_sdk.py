"""Every field of OpenAI's API through the official SDK: served, warned about, or refused by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from millrace.common.v1 import context_pb2
from millrace.engine.v1 import engine_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from gateway.faces.openai.fields import REFUSED, WITHOUT_EFFECT
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

HI: Any = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}


@asynccontextmanager
async def sdk(*engines: ScriptedEngine, **rig: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Deployment]]:
    async with (
        deployed(*engines, **rig) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.http.base_url}/v1",
            api_key="checked at the edge",
            default_headers={CONTEXT_HEADER: signed_context()},
            max_retries=0,
        ) as client,
    ):
        yield client, stack


Look = Callable[[engine_pb2.Submit, tokenizer_pb2.PrepareRequest], object]

# Field, value, where it arrives, as what.
SERVED: list[tuple[str, Any, Look, object]] = [
    ("temperature", 0.5, lambda s, p: s.sampling.temperature, 0.5),
    ("top_p", 0.25, lambda s, p: s.sampling.top_p, 0.25),
    ("seed", 7, lambda s, p: s.sampling.seed, 7),
    ("presence_penalty", 0.5, lambda s, p: s.sampling.presence_penalty, 0.5),
    ("frequency_penalty", -0.5, lambda s, p: s.sampling.frequency_penalty, -0.5),
    ("logit_bias", {"97": -100}, lambda s, p: dict(s.sampling.logit_bias), {97: -100.0}),
    ("max_tokens", 5, lambda s, p: s.sampling.max_tokens, 5),
    ("max_completion_tokens", 6, lambda s, p: s.sampling.max_tokens, 6),
    ("n", 2, lambda s, p: s.sampling.n, 2),
    ("logprobs", True, lambda s, p: s.sampling.HasField("logprobs"), True),
    ("service_tier", "fast", lambda s, p: tier_of(s), "fast"),
    ("service_tier", "auto", lambda s, p: tier_of(s), "standard"),
    ("response_format", {"type": "text"}, lambda s, p: s.HasField("grammar"), False),
    ("response_format", {"type": "json_object"}, lambda s, p: s.grammar.payload, b"grammar"),
    ("response_format", SCHEMA, lambda s, p: p.response_format.json_schema.strict, True),
    ("tools", [TOOL], lambda s, p: p.conversation.tools[0].name, "add"),
    ("parallel_tool_calls", False, lambda s, p: p.conversation.parallel_tool_calls, False),
    ("reasoning_effort", "high", lambda s, p: option(p, "reasoning_effort"), "high"),
    ("reasoning_effort", "none", lambda s, p: option(p, "enable_thinking"), False),
    ("reasoning_effort", "low", lambda s, p: option(p, "thinking"), True),
]


def tier_of(submit: engine_pb2.Submit) -> str:
    return context_pb2.RequestContext.FromString(submit.context.payload).tier


def option(prepared: tokenizer_pb2.PrepareRequest, name: str) -> object:
    return prepared.conversation.template_options[name]


@pytest.mark.parametrize(("field", "value", "look", "expected"), SERVED)
async def test_field_reaches_those_who_serve_it(field: str, value: Any, look: Look, expected: object) -> None:
    async with sdk() as (client, stack):
        response = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, **{field: value}
        )
        assert look(stack.engines[0].submissions[0], stack.tokenizer.prepared[0]) == expected
        assert "x-millrace-warning" not in response.headers
        answer = response.parse()
        assert answer.object == "chat.completion"
        assert answer.service_tier == tier_of(stack.engines[0].submissions[0])


async def test_labels_are_taken_and_tool_choice_is_kept() -> None:
    async with sdk() as (client, stack):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=HI,
            metadata={"team": "a"},
            user="u1",
            safety_identifier="s1",
            store=False,
            modalities=["text"],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "add"}},
        )
        assert answer.choices[0].message.content == "hello 0"
        assert stack.tokenizer.prepared[0].conversation.tool_choice.name == "add"


async def test_streams_of_several_choices_with_logprobs_and_usage() -> None:
    async with sdk() as (client, _):
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="tiny",
                messages=HI,
                n=3,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
                top_logprobs=2,
                service_tier="auto",
            )
        ]
        texts, reasons, tokens = ["", "", ""], ["", "", ""], ["", "", ""]
        for chunk in chunks[:-1]:
            assert chunk.service_tier == "standard"
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] += choice.finish_reason or ""
                for each in (choice.logprobs.content or []) if choice.logprobs else []:
                    assert each.logprob == -0.5
                    tokens[choice.index] += each.token
        assert texts == ["hello 0", "hello 1", "hello 2"]
        assert reasons == ["stop"] * 3
        assert [each.removesuffix("<|end|>") for each in tokens] == texts
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 3 * 8


async def test_echo_with_logprobs_covers_prompt_and_answer() -> None:
    async with sdk() as (client, _):
        answer = await client.completions.create(
            model="tiny", prompt="abcd", echo=True, logprobs=1, max_tokens=3, stop=["zzz"]
        )
        choice = answer.choices[0]
        assert choice.text == "abcdhel"
        assert choice.logprobs.tokens == list("abcdhel")
        assert choice.logprobs.token_logprobs == [None, *[-0.25] * 3, *[-0.5] * 3]
        assert choice.logprobs.text_offset == list(range(7))


@pytest.mark.parametrize("field", sorted(REFUSED))
async def test_what_is_not_served_is_refused_by_name(field: str) -> None:
    async with sdk() as (client, _):
        value: Any = {"a": 1}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="x", extra_body={field: value})
        assert refused.value.param == field
        assert refused.value.code == "unsupported_parameter"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HI, extra_body={field: value})
        # What chat alone serves has fields of its own.
        assert refused.value.param.partition(".")[0] == field


@pytest.mark.parametrize("field", sorted(WITHOUT_EFFECT))
async def test_what_has_no_effect_is_listed_in_a_header(field: str) -> None:
    async with sdk() as (client, _):
        response = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, extra_body={field: {"a": 1}}
        )
        assert field in response.headers["x-millrace-warning"]


async def test_embeddings_of_a_model_that_generates_are_refused_with_the_remedy() -> None:
    async with sdk() as (client, _):
        with pytest.raises(openai.BadRequestError, match="cannot embed"):
            await client.embeddings.create(model="tiny", input="x")


async def test_headers_of_answers_and_of_refusals() -> None:
    tenant = {"tokens_per_minute": 120}
    async with sdk(tables={"tenant": tenant}) as (client, _):
        response = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, max_tokens=20
        )
        headers = response.headers
        assert headers["x-request-id"] == "request-1"
        assert int(headers["openai-processing-ms"]) >= 0
        assert headers["x-ratelimit-limit-tokens"] == "120"
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 120
        assert headers["x-ratelimit-reset-tokens"]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=HI, max_tokens=110)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.response.headers["x-request-id"] == "request-1"


@pytest.mark.parametrize(
    ("theirs", "asked", "ours"),
    [
        ("sampling.best_of", {}, "best_of"),
        ("sampling.max_tokens", {"max_completion_tokens": 9}, "max_completion_tokens"),
        ("sampling.max_tokens", {"max_tokens": 9}, "max_tokens"),
        ("max_tokens", {"max_completion_tokens": 9}, "max_completion_tokens"),
        ("sampling.logprobs", {}, "top_logprobs"),
        ("sampling.allowed_token_ids", {}, "allowed_token_ids"),
        ("prompt_token_ids", {}, "messages"),
        ("grammar", {}, "response_format"),
    ],
)
async def test_an_engines_refusal_names_the_callers_field(
    theirs: str, asked: dict[str, Any], ours: str
) -> None:
    engine = ScriptedEngine(
        refusal=MillraceError(Reason.INVALID_ARGUMENT, f"{theirs} is wrong", field=theirs)
    )
    async with sdk(engine) as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="tiny", messages=HI, stream=stream, **asked)
            assert refused.value.param == ours
            assert refused.value.body["message"] == f"{ours} is wrong"


async def test_prompt_cache_key_leads_to_one_engine() -> None:
    engines = [ScriptedEngine(name=str(number)) for number in range(3)]
    async with sdk(*engines) as (client, stack):
        for number in range(6):
            different: Any = [{"role": "user", "content": str(number) * 40}]
            await client.chat.completions.create(model="tiny", messages=different, prompt_cache_key="k")
        assert sorted(len(engine.submissions) for engine in engines) == [0, 0, 6]
        assert 'reason="affinity"' in (await stack.http.get("/metrics")).text
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HI, prompt_cache_key="k" * 300)
        assert refused.value.param == "prompt_cache_key"


async def test_answer_that_is_cut_by_tools_and_stop_strings_reads_as_the_sdk_expects() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("one two STOP three") * 4)
    async with sdk(engine) as (client, _):
        answer = await client.chat.completions.create(model="tiny", messages=HI, stop=" STOP")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two", "stop")
