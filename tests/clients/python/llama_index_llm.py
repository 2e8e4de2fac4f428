"""LlamaIndex with a server that speaks OpenAI's API."""

from __future__ import annotations

import json

import openai
import pooled
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from person import Person
from report import (
    ANSWER,
    API_KEY,
    BASE_URL,
    CITIES,
    LIMITED_KEY,
    MODEL,
    PERSON,
    QUESTION,
    RESULT,
    TOO_LONG,
    question_of,
    refused,
    works,
)


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return json.dumps({**RESULT, "city": city})


def model(key: str = API_KEY, name: str = MODEL, **options: object) -> OpenAILike:
    """A model of this stack."""
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, **options}
    return OpenAILike(
        model=name, api_base=BASE_URL, api_key=key, temperature=0, max_tokens=60, max_retries=0, **options
    )


TOOL = FunctionTool.from_defaults(get_weather)


def five_turns() -> None:
    """Messages of the framework's own."""
    llm, messages = model(), []
    for city in CITIES:
        messages.append(ChatMessage(role=MessageRole.USER, content=question_of(city)))
        called = llm.chat_with_tools([TOOL], chat_history=messages, tool_required=True)
        (call, *_) = llm.get_tool_calls_from_response(called)
        messages.append(called.message)
        messages.append(
            ChatMessage(
                role=MessageRole.TOOL,
                content=get_weather(**call.tool_kwargs),
                additional_kwargs={"tool_call_id": call.tool_id},
            )
        )
        messages.append(llm.chat(messages).message)
    assert len(messages) == 4 * len(CITIES)


USER = [ChatMessage(role=MessageRole.USER, content=QUESTION)]
with works("answer"):
    assert ANSWER in model().chat(USER).message.content
with works("stream"):
    assert ANSWER in [each.message.content for each in model().stream_chat(USER)][-1]
with works("completions"):
    assert model(is_chat_model=False).complete("Once upon a time").text
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    *_, last = model().stream_chat_with_tools([TOOL], user_msg=question_of("Paris"))
    assert model().get_tool_calls_from_response(last)[0].tool_kwargs == {"city": "Paris"}
with works("structured output by tools"):
    found = model().structured_predict(Person, PromptTemplate("{text}"), text=PERSON)
    assert found.age == 34, found
with works("structured output by json_schema"):
    llm = model(should_use_structured_outputs=True)
    assert isinstance(llm.structured_predict(Person, PromptTemplate("{text}"), text=PERSON), Person)
with refused("context too long", openai.BadRequestError, "context_length_exceeded"):
    model().chat([ChatMessage(role=MessageRole.USER, content=TOO_LONG)])
with refused("unknown model", openai.NotFoundError, "model_not_found"):
    model(name="nobody").chat(USER)
with refused("wrong key", openai.AuthenticationError, "invalid_api_key"):
    model("mr-wrong").chat(USER)
with refused("too many requests", openai.RateLimitError, "rate_limit_exceeded"):
    for _ in range(2):
        model(LIMITED_KEY).chat(USER)
with works("embeddings"):
    embedder = OpenAILikeEmbedding(
        model_name="embed", api_base=f"{pooled.URL}/v1", api_key=pooled.KEY, max_retries=0
    )
    for index, vector in enumerate(embedder.get_text_embedding_batch(pooled.TEXTS)):
        pooled.check_embedding(vector, index)
    pooled.check_embedding(embedder.get_query_embedding(pooled.TEXTS[0]), 0)
