"""Guided decoding end to end: what comes out matches, whatever the model would have liked to say."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import openai
import pytest

from tests.e2e.stack import Stack

ASK = [{"role": "user", "content": "Describe a person."}]

SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", None, 3]},
    "nested": {
        "type": "object",
        "properties": {
            "inner": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        },
        "required": ["inner"],
        "additionalProperties": False,
    },
}


def response_format(schema: object, **options: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **options}}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", [0, 1])
def test_json_schema_holds(client: openai.OpenAI, stack: Stack, name: str, seed: int) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=ASK,
        max_tokens=1500,
        temperature=1.0,
        seed=seed,
        response_format=response_format(SCHEMAS[name], strict=True),
    )
    assert answer.choices[0].finish_reason == "stop", answer
    jsonschema_rs.validate(SCHEMAS[name], json.loads(answer.choices[0].message.content))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_small_limit_ends_an_unbounded_answer_validly(
    client: openai.OpenAI, stack: Stack, seed: int
) -> None:
    text = {"type": "string", "minLength": 20}
    schema = {
        "type": "object",
        "properties": {"story": text, "morals": {"type": "array", "items": text, "minItems": 2}},
        "required": ["story", "morals"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "Tell a long story."}],
        max_tokens=60,
        temperature=1.5,
        seed=seed,
        response_format=response_format(schema, strict=True),
    )
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 60
    jsonschema_rs.validate(schema, json.loads(answer.choices[0].message.content or ""))


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_schema_enforces_in_parts_is_judged(client: openai.OpenAI, stack: Stack, stream: bool) -> None:
    # Three of two numbers: uniqueItems has no grammar, and never holds.
    bit = {"type": "integer", "minimum": 0, "maximum": 1}
    schema = {"type": "array", "items": bit, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    answer = client.chat.completions.create(
        model=stack.model,
        messages=ASK,
        max_tokens=100,
        response_format=response_format(schema, strict=False),
        stream=stream,
    )
    last = [chunk for chunk in answer if chunk.choices][-1] if stream else answer
    choice = last.choices[0].to_dict()
    assert choice["finish_reason"] == "stop"
    assert choice["verdict"]["valid"] is False
    assert choice["verdict"]["schema_path"] == "/uniqueItems"


def test_json_object_is_an_object(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=ASK,
        max_tokens=1500,
        temperature=0,
        response_format={"type": "json_object"},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[0-9]{4}", r"(yes|no), (sir|madam)", r"[A-F]{8}"])
def test_regex_holds(client: openai.OpenAI, stack: Stack, pattern: str) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=ASK,
        max_tokens=64,
        temperature=1.0,
        seed=3,
        extra_body={"guided_regex": pattern},
    )
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "schema",
    [{"type": "strin"}, {"type": "object", "properties": 3}, {"$ref": "#/nowhere"}],
    ids=["type", "properties", "ref"],
)
def test_bad_schema_is_refused_with_its_fault(client: openai.OpenAI, stack: Stack, schema: object) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model=stack.model, messages=ASK, response_format=response_format(schema, strict=True)
        )
    error = raised.value.response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "response_format" in (error["param"] or "") + error["message"]


def test_bad_regex_is_refused(client: openai.OpenAI, stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=stack.model, messages=ASK, extra_body={"guided_regex": "(unclosed"}
        )
