"""Extensions of the Responses API: thoughts that are not shown, and where the time went."""

from __future__ import annotations

import json

from openresponses_types import types as spec

from tests.unit.gateway.faces_responses.test_responses import THINKS, events, post, serving, without_moments


async def test_thoughts_that_are_not_shown_can_go_back_sealed() -> None:
    hidden = {"include_reasoning": False}
    async with serving(THINKS) as stack:
        plain = await post(stack, **hidden)
        sealed = (await post(stack, **hidden, include=["reasoning.encrypted_content"])).json()
        streamed = await events(stack, **hidden, include=["reasoning.encrypted_content"])
        assert "easy" not in plain.text + json.dumps([sealed, streamed])
        thought, message = plain.json()["output"]
        assert (thought["type"], thought["content"]) == ("reasoning", [])
        assert "encrypted_content" not in thought
        assert message["content"][0]["text"] == "It is 4."
        assert plain.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert without_moments(streamed[-1]["response"])["output"][1] == without_moments(sealed)["output"][1]
        for response in (sealed, streamed[-1]["response"]):
            await post(stack, input=[{"role": "user", "content": "hi"}, *response["output"]])
            turns = stack.tokenizer.prepared[-1].conversation.messages
            assert turns[-1].reasoning == "It is easy."
        assert "It is easy." in (await post(stack)).text


async def test_timing_is_told_in_the_words_of_chat_where_it_is_asked_for() -> None:
    async with serving() as stack:
        chat = await stack.chat(include_timing=True)
        whole = (await post(stack, include_timing=True)).json()
        streamed = await events(stack, include_timing=True)
        assert whole["timing"].keys() == chat.json()["usage"]["timings"].keys()
        assert whole["timing"]["first_token_ms"] > 0
        assert whole["timing"]["cached_tokens"] == whole["usage"]["input_tokens_details"]["cached_tokens"]
        assert streamed[-1]["response"]["timing"].keys() == whole["timing"].keys()
        assert "timing" not in streamed[0]["response"]
        left_out = (await post(stack)).json()
        assert "timing" not in left_out
        spec.ResponseResource.model_validate(left_out)
