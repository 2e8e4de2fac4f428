"""The OpenAPI document of the Responses API, made from the types that requests are decoded with.

A body that its schema allows is refused for what BEYOND lists alone; one that it does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from contract.efforts import EFFORTS
from contract.errors import Reason
from contract.sampling import OPTIONS
from gateway.faces import retention, test_time
from gateway.faces.responses import answer_types as answers
from gateway.faces.responses import requests as bodies
from gateway.faces.responses import tools
from gateway.faces.responses.fields import FIELDS
from gateway.faces.responses.items import InputItem, ItemPart
from gateway.faces.responses.stored_openapi import stored_paths
from gateway.faces.schemas import (
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
from gateway.pipeline.validate import (
    MAX_CACHE_SALT,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PROMPT_CACHE_KEY,
)
from gateway.types.request import MAX_METADATA

PATH = "/v1/responses/openapi.json"
# Rules that no schema can state: by the error's reason, and by its `param` as a regular expression.
BEYOND_REASONS: Mapping[Reason, str] = {
    Reason.CONTEXT_LENGTH_EXCEEDED: "prompt and answer fit into the model's context",
    Reason.NEVER_FITS: "they fit into the engines' memory",
    Reason.STORED_NOT_FOUND: "what is named is kept, and the caller's",
    Reason.GRAMMAR_REFUSED: "a schema compiles, and is enforced exactly where it is strict",
    Reason.TEMPLATE_FAILED: "the checkpoint's template renders the conversation",
}
BEYOND: Mapping[str, str] = {
    r"(input|items)(\[\d+\].*)?": "an item has the fields of its type, and what was sealed was sealed here",
    r"tools\[\d+\].*": "a tool has the fields of its type, and a name of its own",
    r"tool_choice.*": "it names tools; a call that is forced leaves no room for a schema",
    r"text\.format\..*": "a format has the fields of its type",
    r"reasoning\.effort": "the model reasons",
    r"max_thinking_tokens": "it is for models that reason, and is no less than what ends a thought",
    r"stream_options|starting_after": "stream is true",
    **test_time.BEYOND,
    **retention.BEYOND,
    r"background|store|previous_response_id|conversation": "the operator lets what is asked for be kept, and "
    "it is there; a conversation is given or a previous response, not both",
    r"metadata\.(user|safety_identifier)": "it is what the field of that name says, where both are given",
}
_ABOUT = """OpenAI's Responses API, after the Open Responses specification of 2026-04-24. Unknown keys of
items, parts and tools are ignored, and named in `x-millrace-ignored`; any other field that is not listed is
refused by name, and fields without effect are named in `x-millrace-warning`.

`/v1/responses` is also a WebSocket (`GET` with `Upgrade: websocket` and the same credentials). A client
sends text frames of JSON: `{"type": "response.create", ...}` with the fields of `ResponseBody` but for
`stream`, `stream_options` and `background`, which may only say what happens anyway; and `generate`, of
which false makes the prompt ready, answers without output, and can be continued. Each is answered by the
events of a stream, a `ResponseEvent` a frame, without `[DONE]`, one response after the other in the order
of the requests. What is refused is an event `{"type": "error", "status", "error": {type, code, message,
param}, "headers"}`; the connection stays. `previous_response_id` may name the connection's last response,
which need not be stored: code `previous_response_not_found` says that it is not there any more.
`websocket_connection_limit_reached` comes before a connection is closed for its age. `warnings` of a
response says what HTTP says in `x-millrace-warning`.

A body that its schema allows is served, or refused for what no schema can say: limits, names that are not
there, and

""" + "\n".join(f"- `{name}`: {rule}" for name, rule in (*BEYOND_REASONS.items(), *BEYOND.items()))
_OBJECT = {"type": "object"}
_MODES = {"enum": ["none", "auto", "required", None]}
_METADATA = {
    "type": "object",
    "additionalProperties": text(MAX_METADATA_VALUE),
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "maxProperties": MAX_METADATA,
}
_PROMPT: Mapping[str, Any] = {
    "model": text(MAX_MODEL_NAME),
    "input": {"anyOf": [TEXT, list_of(ref(InputItem))]},
    "tool_choice": {"anyOf": [_MODES, ref(tools.ToolSelection)]},
    "truncation": {"enum": [*bodies.TRUNCATIONS, None]},
    "previous_response_id": or_null({"type": "string", "minLength": 1}),
}
_max_tokens, _logprobs = OPTIONS["max_tokens"].limits, OPTIONS["logprobs"].limits
_FIELDS: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    bodies.PromptBody: _PROMPT,
    bodies.ResponseBody: {
        **_PROMPT,
        "include": or_null(list_of({"enum": list(bodies.INCLUDES)}, 0)),
        "max_output_tokens": or_null(
            {"type": "integer", "minimum": _max_tokens.minimum, "maximum": _max_tokens.maximum}
        ),
        "top_logprobs": or_null({"type": "integer", "minimum": 0, "maximum": _logprobs.maximum}),
        "metadata": or_null(_METADATA),
        "user": or_null(text(MAX_METADATA_VALUE)),
        "safety_identifier": or_null(text(MAX_METADATA_VALUE)),
        "prompt_cache_key": or_null(text(MAX_PROMPT_CACHE_KEY)),
        "cache_salt": or_null(text(MAX_CACHE_SALT, 1)),
    },
    bodies.CompactBody: {
        **{name: _PROMPT[name] for name in ("model", "input", "previous_response_id")},
        "prompt_cache_key": or_null(text(MAX_PROMPT_CACHE_KEY)),
        "cache_salt": or_null(text(MAX_CACHE_SALT, 1)),
    },
    **test_time.SCHEMAS,
    **retention.SCHEMAS,
    bodies.TextBody: {"verbosity": {"enum": ["medium", None]}},
    bodies.TextFormatBody: {"type": {"enum": ["text", "json_object", "json_schema"]}},
    bodies.ReasoningBody: {
        "effort": {"enum": [*EFFORTS, None]},
        "summary": {"enum": [*bodies.SUMMARIES, None]},
        "generate_summary": {"enum": [*bodies.SUMMARIES, None]},
    },
    bodies.ConversationRef: {"id": {"type": "string", "minLength": 1}},
    bodies.ResponseStreamOptions: {"include_obfuscation": {"enum": [None, False]}},
}
_BODIES = (bodies.ResponseBody, bodies.PromptBody, bodies.CompactBody)
_STRANGE_KEYS = (InputItem, ItemPart, tools.OfferedTool)
_MODEL = {"model": "millrace-nano"}
_HELLO: Mapping[str, Any] = {**_MODEL, "input": "Hello!"}
_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# Bodies that the bundled model's stack answers, by operation and what they show.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "createResponse": {
        "whole": _HELLO,
        "stream": {**_HELLO, "stream": True},
        "tools": {
            **_MODEL,
            "input": "What is the weather in Paris?",
            "tools": [_WEATHER],
            "tool_choice": "required",
        },
    },
    "countInputTokens": {"text": _HELLO},
    "compactResponse": {"text": _HELLO},
}
_OPERATIONS: Mapping[str, tuple[str, str, type[msgspec.Struct], type[msgspec.Struct]]] = {
    "/v1/responses": ("createResponse", "Answer a conversation", bodies.ResponseBody, answers.Response),
    "/v1/responses/input_tokens": (
        "countInputTokens",
        "Count the tokens of a prompt",
        bodies.PromptBody,
        answers.InputTokens,
    ),
    "/v1/responses/compact": (
        "compactResponse",
        "Make a conversation short",
        bodies.CompactBody,
        answers.CompactedResponse,
    ),
}


class OpenAiError(msgspec.Struct, frozen=True):
    """`error` has message, type, param, code and reason, as in /openapi.json."""

    error: dict[str, Any]


@cache
def document() -> bytes:
    """The document as JSON."""
    paths: dict[str, Any] = {path: {"post": _operation(*each)} for path, each in _OPERATIONS.items()}
    responses = {"200": _answered({"application/json": {"schema": _OBJECT}}), **_refusals()}
    itself = {"operationId": "describeResponses", "summary": "Show this document", "responses": responses}
    kinds = (answers.Response, answers.ResponseEvent, answers.InputTokens, answers.CompactedResponse)
    return framed(
        "Millrace: Responses",
        _ABOUT,
        paths={**paths, **stored_paths(_METADATA, _refusals()), PATH: {"get": {**itself, "security": []}}},
        components={"schemas": {**_body_schemas(), **answer_schemas((*kinds, OpenAiError))}},
        beyond_reasons=BEYOND_REASONS,
        beyond=BEYOND,
    )


def _operation(
    name: str, summary: str, body: type[msgspec.Struct], answer: type[msgspec.Struct]
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": ref(answer)}}
    if answer is answers.Response:
        said = {"contentMediaType": "application/json", "contentSchema": ref(answers.ResponseEvent)}
        data = {"anyOf": [{"const": "[DONE]"}, {**TEXT, **said}]}
        event = {"type": "object", **object_of("data", event=TEXT, data=data)}
        content["text/event-stream"] = {"schema": {"description": "One event; the last is [DONE].", **event}}
    examples = {each: {"value": value} for each, value in EXAMPLES[name].items()}
    given = {"application/json": {"schema": ref(body), "examples": examples}}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": given},
        "responses": {"200": _answered(content), **_refusals()},
    }


def _answered(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": "The answer.", "content": content}


def _refusals() -> dict[str, Any]:
    content = {"application/json": {"schema": ref(OpenAiError)}}
    statuses = by_status((*REASONS, Reason.STORED_NOT_FOUND), lambda reason: reason.mapping.http_status)
    return {
        status: {"description": told(reasons), "content": content} for status, reasons in statuses.items()
    }


def _body_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every type that a body is made of, by the type's name."""
    _, found = msgspec.json.schema_components(_BODIES, ref_template=REF)
    for kind, fields in _FIELDS.items():
        found[kind.__name__]["properties"].update(fields)
    for kind in _STRANGE_KEYS:
        del found[kind.__name__]["additionalProperties"]
    for body in _BODIES:
        schema = found[body.__name__]
        schema["required"] = ["model", "input"]
        for name in FIELDS.names:
            schema["properties"][name] = FIELDS.described(name)
    bound_options(found["ResponseBody"]["properties"])
    return found
