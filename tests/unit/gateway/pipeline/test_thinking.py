"""Budgets of thoughts at the gateway: what engines are told, what is refused, what clients see and pay."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from millrace.common.v1 import sampling_pb2
from millrace.inference.v1 import inference_pb2

from contract.proto.status import from_rpc_error
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, TOKENS, encode

OPEN, CLOSE, BREAK = TOKENS.index(b"<think>"), TOKENS.index(b"</think>"), 10
THOUGHT = [*encode("\nhm?!\n"), CLOSE]
ANSWER = [*encode("\n\nyes! and more"), END_ID]
BOUND = {"tier": {"max_thinking_tokens": 20}}


async def told(stack: Deployment, **body: Any) -> Any:
    """What the engine is told of a request that is answered."""
    response = await stack.chat(**body)
    assert response.status_code == 200, response.text
    return stack.engines[0].submissions[-1]


async def test_a_budget_travels_with_the_tags_of_the_model() -> None:
    async with deployed() as stack:
        submit = await told(stack, max_thinking_tokens=9)
        assert submit.sampling.max_thinking_tokens == 9
        tags = submit.thinking
        assert (tags.open_id, tags.close_id, tags.opened) == (OPEN, CLOSE, False)
        assert (list(tags.line_breaks), list(tags.blank_line)) == ([BREAK], [BREAK, BREAK])
        stack.tokenizer.assistant_prefix = "<think>\n"
        assert (await told(stack, max_thinking_tokens=9)).thinking.opened
        free = await told(stack)
        assert not free.HasField("thinking")
        assert not free.sampling.HasField("max_thinking_tokens")


@pytest.mark.parametrize(
    ("body", "held"),
    [
        # The tier's bound holds where nothing is asked for, and where more is.
        ({}, 20),
        ({"max_thinking_tokens": 99}, 20),
        ({"max_thinking_tokens": 7}, 7),
        # What is asked for leaves room for the answer, a bound alone takes none.
        ({"max_thinking_tokens": 18, "max_tokens": 20}, 15),
        ({"max_thinking_tokens": 19, "max_tokens": 1}, 2),
        ({"max_tokens": 5}, 20),
        ({"service_tier": "fast"}, None),
        ({"service_tier": "fast", "max_thinking_tokens": 4000, "max_tokens": 4000}, 3000),
        # A thought that these could never begin needs no bound.
        ({"allowed_token_ids": encode("ab")}, None),
    ],
)
async def test_the_smallest_of_all_bounds_holds(body: dict[str, Any], held: int | None) -> None:
    async with deployed(tables=BOUND) as stack:
        submit = await told(stack, **body)
        found = submit.sampling.max_thinking_tokens if submit.HasField("thinking") else None
        assert found == held
        assert submit.sampling.HasField("max_thinking_tokens") is (held is not None)


@pytest.mark.parametrize(
    ("body", "held"),
    [
        # A share of the tier's bound, or of what max_tokens leave beside the answer.
        ({"reasoning_effort": "minimal"}, 2),
        ({"reasoning_effort": "low"}, 4),
        ({"reasoning_effort": "medium"}, 10),
        ({"reasoning_effort": "high"}, 16),
        ({"reasoning_effort": "xhigh"}, 19),
        ({"reasoning_effort": "max"}, 20),
        ({"reasoning_effort": "high", "max_tokens": 12}, 7),
        ({"reasoning_effort": "max", "max_tokens": 12}, 9),
        ({"reasoning_effort": "medium", "service_tier": "fast", "max_tokens": 4000}, 1500),
        # Of any effort enough to close a thought.
        ({"reasoning_effort": "minimal", "max_tokens": 4}, 2),
        # What was asked for in tokens holds.
        ({"reasoning_effort": "low", "max_thinking_tokens": 13}, 13),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, 4),
    ],
)
async def test_an_effort_is_a_budget_where_the_template_does_not_take_it(
    body: dict[str, Any], held: int
) -> None:
    async with deployed(tables=BOUND) as stack:
        assert (await told(stack, **body)).sampling.max_thinking_tokens == held
        none = await told(stack, reasoning_effort="none", service_tier="fast")
        assert not none.sampling.HasField("max_thinking_tokens")
        switch = {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
        assert dict(stack.tokenizer.prepared[-1].conversation.template_options) == switch


async def test_an_effort_is_told_where_the_template_takes_it_and_is_no_budget() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.takes_effort = True
    async with deployed(tokenizer=tokenizer, tables=BOUND) as stack:
        assert (await told(stack, reasoning_effort="max")).sampling.max_thinking_tokens == 20
        free = await told(stack, reasoning_effort="low", service_tier="fast")
        assert not free.sampling.HasField("max_thinking_tokens")
        assert tokenizer.prepared[-1].conversation.template_options["reasoning_effort"] == "low"
        # The template may know words of its own.
        assert await told(stack, chat_template_kwargs={"reasoning_effort": "vast"})


async def test_all_apis_have_the_same_efforts_and_the_configuration_says_what_they_are() -> None:
    efforts = {"gateway": {"efforts": {"low": 0.5}}}
    async with deployed(tables={**BOUND, **efforts}) as stack:
        say = [{"role": "user", "content": "hi"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": say, "reasoning_effort": "low"}),
            ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}),
            ("/v1/messages", {"messages": say, "max_tokens": 99, "output_config": {"effort": "low"}}),
        ):
            response = await stack.http.post(path, json={"model": "tiny", **body})
            assert response.status_code == 200, response.text
            assert stack.engines[0].submissions[-1].sampling.max_thinking_tokens == 10, path
        budget = {"type": "enabled", "budget_tokens": 13}
        body = {"messages": say, "max_tokens": 99, "thinking": budget, "output_config": {"effort": "low"}}
        assert (await stack.http.post("/v1/messages", json={"model": "tiny", **body})).status_code == 200
        assert stack.engines[0].submissions[-1].sampling.max_thinking_tokens == 13
        refused = await stack.chat(chat_template_kwargs={"reasoning_effort": "vast"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template_kwargs.reasoning_effort"
        assert "'vast' is not one of none, minimal" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"max_thinking_tokens": 1}, "max_thinking_tokens", "less than the 2 tokens that end a thought"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens", "not between 0 and"),
        ({"thinking_token_budget": 9}, "thinking_token_budget", "use max_thinking_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking", "use max_thinking_tokens"),
        ({"include_reasoning": False, "logprobs": True}, "include_reasoning", "logprobs would show"),
        (
            {"max_thinking_tokens": 9, "allowed_token_ids": [OPEN, BREAK]},
            "allowed_token_ids",
            f"a thought could not end without {CLOSE}; add them",
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(body: dict[str, Any], param: str, says: str) -> None:
    async with deployed() as stack:
        response = await stack.chat(**body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert says in error["message"]
        assert not stack.engines[0].submissions


async def test_there_is_no_budget_outside_of_conversations() -> None:
    async with deployed(tables=BOUND) as stack:
        body = {"model": "tiny", "prompt": "x"}
        response = await stack.http.post("/v1/completions", json={**body, "max_thinking_tokens": 9})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_thinking_tokens")
        request = inference_pb2.GenerateRequest(
            model="tiny", text="x", sampling=sampling_pb2.SamplingOptions(max_thinking_tokens=9)
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stack.inference.Generate(request, metadata=((CONTEXT_HEADER, signed_context()),)):
                pass
        assert from_rpc_error(failure.value).field == "sampling.max_thinking_tokens"
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        assert not stack.engines[0].submissions[-1].HasField("thinking")


async def test_a_model_that_does_not_reason_refuses_it_as_it_does_an_effort() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.reasoning_format = ""
    async with deployed(tokenizer=tokenizer, tables=BOUND) as stack:
        refused = {}
        for name, value in (("max_thinking_tokens", 9), ("reasoning_effort", "high")):
            response = await stack.chat(**{name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            refused[name] = error["message"].replace(name, "")
        assert "does not reason" in refused["max_thinking_tokens"]
        assert "does not reason" in refused["reasoning_effort"]
        assert not (await told(stack)).HasField("thinking"), "the tier bounds nothing"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
@pytest.mark.parametrize("opened", [True, False])
async def test_thoughts_are_counted_exactly_and_can_be_hidden(tokens_per_step: int, opened: bool) -> None:
    output = [*([] if opened else [OPEN]), *THOUGHT, *ANSWER]
    engine = ScriptedEngine(reply=lambda _s, _c: output)
    engine.tokens_per_step = tokens_per_step
    async with deployed(engine) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n" if opened else ""
        for shown in (True, False):
            body = {"include_reasoning": shown, "stop": ["!"]}
            whole = (await stack.chat(**body)).json()
            message = whole["choices"][0]["message"]
            # The stop string in the thought ends nothing.
            assert message["content"] == "yes"
            assert message.get("reasoning_content") == ("hm?!" if shown else None)
            events = await stack.events(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "hi"}],
                stream_options={"include_usage": True},
                **body,
            )
            deltas = [event["choices"][0] for event in events[:-1]]
            thoughts = "".join(each["delta"].get("reasoning_content", "") for each in deltas)
            assert thoughts == ("hm?!" if shown else "")
            assert "".join(each["delta"].get("content", "") for each in deltas) == "yes"
            assert all(each["delta"] or each["finish_reason"] for each in deltas)
            for usage in (whole["usage"], events[-1]["usage"]):
                assert usage["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT)}
                assert usage["completion_tokens"] >= len(THOUGHT) + len("\n\nyes")


async def test_a_budget_goes_on_at_another_engine() -> None:
    first = ScriptedEngine(name="a", reply=lambda _s, _c: [*THOUGHT, *ANSWER], dies_after_tokens=3)
    second = ScriptedEngine(name="b", reply=first.reply)
    async with deployed(first, second) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        for _ in range(2):
            response = await stack.chat(max_thinking_tokens=9)
            assert response.status_code == 200, response.text
        submits = [each for engine in stack.engines for each in engine.submissions]
        continued = [each for each in submits if each.output_token_ids]
        assert continued, "an engine was lost on the way"
        assert all(each.thinking == submits[0].thinking for each in submits)
        assert all(each.sampling.max_thinking_tokens == 9 for each in submits)
        assert all(each.prompt_token_ids == submits[0].prompt_token_ids for each in continued)
