"""LangChain's chat model for OpenAI's API."""

from __future__ import annotations

import json

import openai
import pooled
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
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

OPTIONS = {"base_url": BASE_URL, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(model=MODEL, api_key=API_KEY, **OPTIONS)


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return json.dumps({**RESULT, "city": city})


def five_turns() -> None:
    """Messages of the framework's own."""
    messages: list = []
    must, may_not = (model.bind_tools([get_weather], tool_choice=each) for each in ("required", "none"))
    for city in CITIES:
        messages.append(HumanMessage(question_of(city)))
        messages.append(must.invoke(messages))
        (call, *_) = messages[-1].tool_calls
        messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
        messages.append(may_not.invoke(messages))
        assert messages[-1].content
    assert len(messages) == 4 * len(CITIES)


with works("answer"):
    assert ANSWER in model.invoke(QUESTION).content
with works("stream"):
    assert ANSWER in "".join(each.content for each in model.stream(QUESTION))
with works("usage of a stream"):
    counted = ChatOpenAI(model=MODEL, api_key=API_KEY, stream_usage=True, **OPTIONS)
    usages = [each.usage_metadata for each in counted.stream(QUESTION) if each.usage_metadata]
    assert usages[-1]["output_tokens"] > 0
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    chunks = list(model.bind_tools([get_weather]).stream(question_of("Paris")))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}, whole
for method in ("json_schema", "function_calling", "json_mode"):
    with works(f"structured output by {method}"):
        extracted = model.with_structured_output(Person if method != "json_mode" else None, method=method)
        found = extracted.invoke(PERSON + (" Answer in JSON." if method == "json_mode" else ""))
        # In JSON mode the fields are the model's own.
        assert isinstance(found, dict) if method == "json_mode" else found.age == 34, found
with works("log-probabilities"):
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"]
with works("several at once"):
    assert all(ANSWER in each.content for each in model.batch([QUESTION] * 4))
with works("completions"):
    assert OpenAI(model=MODEL, api_key=API_KEY, max_tokens=5, **OPTIONS).invoke("Once upon a time")
with refused("images", openai.BadRequestError, "messages[0].content[0].type"):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    model.invoke([HumanMessage([part])])
with refused("context too long", ContextOverflowError, "maximum context length"):
    model.invoke(TOO_LONG)
with refused("unknown model", openai.NotFoundError, "model_not_found"):
    ChatOpenAI(model="nobody", api_key=API_KEY, **OPTIONS).invoke(QUESTION)
with refused("wrong key", openai.AuthenticationError, "invalid_api_key"):
    ChatOpenAI(model=MODEL, api_key="mr-wrong", **OPTIONS).invoke(QUESTION)
with refused("too many requests", openai.RateLimitError, "rate_limit_exceeded"):
    for _ in range(2):
        ChatOpenAI(model=MODEL, api_key=LIMITED_KEY, **OPTIONS).invoke(QUESTION)
with works("responses"):
    speaks_responses = ChatOpenAI(model=MODEL, api_key=API_KEY, use_responses_api=True, **OPTIONS)
    assert speaks_responses.invoke(QUESTION).content
with works("embeddings"):
    embedder = OpenAIEmbeddings(
        model="embed", base_url=f"{pooled.URL}/v1", api_key=pooled.KEY, check_embedding_ctx_length=False
    )
    for index, vector in enumerate(embedder.embed_documents(pooled.TEXTS)):
        pooled.check_embedding(vector, index)
    pooled.check_embedding(embedder.embed_query(pooled.TEXTS[0]), 0)
with refused("embeddings of a model that generates", openai.BadRequestError, "cannot embed"):
    OpenAIEmbeddings(
        model=MODEL, base_url=BASE_URL, api_key=API_KEY, check_embedding_ctx_length=False, max_retries=0
    ).embed_query("hi")
