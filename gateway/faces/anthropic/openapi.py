"""The OpenAPI document of Anthropic's API, made from the types that requests are decoded with.

A body that its schema allows is refused for what BEYOND lists alone; one that it does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason
from contract.sampling import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, OPTIONS
from gateway.faces import retention, test_time
from gateway.faces.anthropic import answer_types as answers
from gateway.faces.anthropic import bodies
from gateway.faces.anthropic.errors import ERRORS, ApiErrorBody
from gateway.faces.anthropic.fields import FIELDS
from gateway.faces.anthropic.requests import EFFORTS, MAX_TOOL_NAME
from gateway.faces.schemas import (
    BEYOND_CUT,
    CUT,
    NULL,
    REASONS,
    REF,
    TEXT,
    answer_schemas,
    bound_options,
    by_status,
    framed,
    list_of,
    object_of,
    or_null,
    ref,
    text,
    told,
)
from gateway.models.catalog import MAX_MODEL_NAME
from gateway.pipeline.validate import MAX_CACHE_SALT, MAX_METADATA_VALUE

PATH = "/v1/messages/openapi.json"
# Rules that no schema can state: by the error's reason, and by its field as a regular expression.
BEYOND_REASONS: Mapping[Reason, str] = {
    Reason.CONTEXT_LENGTH_EXCEEDED: "the prompt fits into the model's context",
    Reason.NEVER_FITS: "prompt and answer fit into the engines' memory",
    Reason.GRAMMAR_REFUSED: "a schema compiles, and is enforced exactly where it is strict",
    Reason.TEMPLATE_FAILED: "the checkpoint's template renders the conversation",
}
BEYOND: Mapping[str, str] = {
    r"thinking(\.budget_tokens)?": "a budget is less than max_tokens, and the model can do what is asked",
    r"tool_choice": "it names one of the tools; a call that is forced leaves no room for a schema",
    r"tools\[\d+\]\.name": "a name is there once",
    r"messages\[\d+\]\.content\[\d+\]\.tool_use_id": "a tool_use block before it has the id",
    r"messages\[\d+\]\.content\[\d+\]\.signature": "it is that of the thinking beside it, where it is ours",
    r"messages": "calls of the last message have results",
    **BEYOND_CUT,
    **test_time.BEYOND,
    **retention.BEYOND,
    r"output_format": "output_config.format does not say it as well",
}
_ABOUT = """Anthropic's Messages API. Unknown keys of messages, blocks and tools are ignored, and named in
`x-millrace-ignored`; any other field that is not listed is refused by name, and fields without effect are
named in `x-millrace-warning`.

A body that its schema allows is served, or refused for what no schema can say: limits, names that are not
there, and

""" + "\n".join(f"- `{name}`: {rule}" for name, rule in (*BEYOND_REASONS.items(), *BEYOND.items()))
_OBJECT = {"type": "object"}
_NAMED = {**TEXT, "pattern": f"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME}}}$"}
_GIVEN = text(least=1)
_STOP = text(MAX_STOP_CHARACTERS, 1)


def _block(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    said = object_of("type", *required, type={"const": kind}, **properties)
    return {"allOf": [ref(bodies.ContentBlock), said]}


def _content(*blocks: Mapping[str, Any], least: int = 1) -> dict[str, Any]:
    return {"anyOf": [TEXT, list_of({"anyOf": blocks}, least)]}


_TEXT = _block("text", "text", text=TEXT)
_SPOKEN = _content(_TEXT)
_RESULT = _block("tool_result", "tool_use_id", tool_use_id=_GIVEN, content=or_null(TEXT, list_of(_TEXT, 0)))
_CALL = _block("tool_use", "id", "name", "input", id=_GIVEN, name=_GIVEN, input=_OBJECT)
_THOUGHT = _block("thinking", "thinking", thinking=TEXT)
_ROLES = [
    object_of("role", "content", role={"const": role}, content=content)
    for role, content in (
        ("system", _SPOKEN),
        ("user", _content(_TEXT, _RESULT)),
        ("assistant", _content(_TEXT, _CALL, _THOUGHT, _block("redacted_thinking"), least=0)),
    )
]
_CHOICES = [
    object_of("type", "name", type={"const": "tool"}, name=TEXT),
    object_of("type", type={"enum": ["auto", "any", "none"]}, name=NULL),
]
_THINKING = [
    object_of(
        "type", "budget_tokens", type={"const": "enabled"}, budget_tokens={"type": "integer", "minimum": 1}
    ),
    object_of("type", type={"enum": ["adaptive", "disabled"]}, budget_tokens=NULL),
]
_max_tokens = OPTIONS["max_tokens"].limits
_PROMPT: Mapping[str, Any] = {
    "model": text(MAX_MODEL_NAME),
    "messages": list_of(ref(bodies.TurnBody)),
    "system": or_null(TEXT, list_of(_TEXT, 0)),
}
_FIELDS: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    bodies.CountTokensBody: _PROMPT,
    bodies.MessagesBody: {
        **_PROMPT,
        "max_tokens": {"type": "integer", "minimum": _max_tokens.minimum, "maximum": _max_tokens.maximum},
        "stop_sequences": or_null(list_of(_STOP, 0, MAX_STOP_STRINGS)),
        "cache_salt": or_null(text(MAX_CACHE_SALT, 1)),
        "truncate_prompt_tokens": CUT,
    },
    bodies.ToolDefinition: {"name": _NAMED, "type": {"enum": ["custom", None]}, "input_schema": _OBJECT},
    bodies.MessageMetadata: {"user_id": or_null(text(MAX_METADATA_VALUE))},
    bodies.OutputConfig: {"effort": {"enum": [*EFFORTS, None]}},
    bodies.OutputFormat: {"type": {"const": "json_schema"}, "schema": _OBJECT},
    **test_time.SCHEMAS,
    **retention.SCHEMAS,
    bodies.ThinkingConfig: {"display": {"enum": ["summarized", "omitted", None]}},
}
_REQUIRED = {"ToolDefinition": ["name", "input_schema"], "OutputFormat": ["type", "schema"]}
_TOGETHER = {"TurnBody": _ROLES, "ToolChoiceOption": _CHOICES, "ThinkingConfig": _THINKING}
_STRANGE_KEYS = (bodies.TurnBody, bodies.ContentBlock, bodies.ToolDefinition)

_MODEL, _HELLO = {"model": "millrace-nano", "max_tokens": 64}, [{"role": "user", "content": "Hello!"}]
_WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
# Bodies that the bundled model's stack answers, by operation and what they show.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "createMessage": {
        "whole": {**_MODEL, "messages": _HELLO},
        "stream": {**_MODEL, "messages": _HELLO, "stream": True},
        "tools": {**_MODEL, "messages": _ASKED, "tools": [_WEATHER], "tool_choice": {"type": "any"}},
    },
    "countMessageTokens": {"conversation": {"model": "millrace-nano", "messages": _HELLO}},
}


# Versions of the API are dates from 2023 on, and what they say of messages is the same in all that are known;
# SDKs send newer ones as they come, so none is refused for being new.
VERSION_PATTERN = "^20(2[3-9]|[3-9][0-9])-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"
# What curl is told to send.
USUAL_VERSION = "2023-06-01"
_VERSION = {
    "name": "anthropic-version",
    "in": "header",
    "schema": {"type": "string", "pattern": VERSION_PATTERN},
    "description": "A date from 2023 on. All mean the same here, and so does none.",
}


@cache
def document() -> bytes:
    """The document as JSON."""
    count = _operation("countMessageTokens", "Count the tokens of a prompt", answers.InputTokenCount)
    described = _operation("describeMessages", "Show this document")
    kinds = (answers.MessageAnswer, answers.MessageEvent, answers.InputTokenCount, ApiErrorBody)
    return framed(
        "Millrace: Messages",
        _ABOUT,
        paths={
            "/v1/messages": {"post": _create()},
            "/v1/messages/count_tokens": {"post": {**count, "requestBody": _body(bodies.CountTokensBody)}},
            PATH: {"get": {**described, "security": []}},
        },
        components={"schemas": {**_body_schemas(), **answer_schemas(kinds)}},
        beyond_reasons=BEYOND_REASONS,
        beyond=BEYOND,
    )


def _create() -> dict[str, Any]:
    created = _operation("createMessage", "Answer a conversation", answers.MessageAnswer)
    kinds = (*answers.EVENTS, ApiErrorBody)
    data = {**TEXT, "contentMediaType": "application/json", "contentSchema": {"anyOf": list(map(ref, kinds))}}
    event = {"type": "object", **object_of("event", "data", event=TEXT, data=data)}
    created["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    return {**created, "requestBody": _body(bodies.MessagesBody)}


def _operation(name: str, summary: str, answer: type | None = None) -> dict[str, Any]:
    schema = _OBJECT if answer is None else ref(answer)
    answered = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
    content = {"application/json": {"schema": ref(ApiErrorBody)}}
    statuses = by_status(REASONS, lambda reason: ERRORS.status(MillraceError(reason, "")))
    refusals = {
        status: {"description": told(reasons), "content": content} for status, reasons in statuses.items()
    }
    operation = {"operationId": name, "summary": summary, "responses": {"200": answered, **refusals}}
    return operation if answer is None else {**operation, "parameters": [_VERSION]}


def _body(kind: type) -> dict[str, Any]:
    of = "createMessage" if kind is bodies.MessagesBody else "countMessageTokens"
    examples = {name: {"value": value} for name, value in EXAMPLES[of].items()}
    return {"required": True, "content": {"application/json": {"schema": ref(kind), "examples": examples}}}


def _body_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every type that a body is made of, by the type's name."""
    kinds = (bodies.MessagesBody, bodies.CountTokensBody)
    _, found = msgspec.json.schema_components(kinds, ref_template=REF)
    for kind, fields in _FIELDS.items():
        found[kind.__name__]["properties"].update(fields)
    for name, required in _REQUIRED.items():
        found[name]["required"] = required
    for name, group in _TOGETHER.items():
        found[name]["allOf"] = [{"anyOf": group}]
    for kind in _STRANGE_KEYS:
        del found[kind.__name__]["additionalProperties"]
    for body in kinds:
        properties = found[body.__name__]["properties"]
        properties |= {name: FIELDS.described(name) for name in FIELDS.names}
    bound_options(found["MessagesBody"]["properties"])
    return found
