"""The OpenAPI document of the HTTP face, made from the types that requests are decoded with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import msgspec

from gateway.http.chat import ChatBody
from gateway.http.completions import CompletionBody
from gateway.http.fields import Unserved
from gateway.http.inspect import DetokenizeBody, TokenizeBody
from gateway.pipeline.validate import RANGES
from services.errors import TABLE, Reason

_REF = "#/components/schemas/{name}"
_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_INTEGER = {"type": "integer", "minimum": 0}
_STRING = {"type": "string"}
_NULLABLE_STRING = {"type": ["string", "null"]}

# Reasons by which a request may be refused, per endpoint.
_ALWAYS = (
    Reason.MISSING_CREDENTIALS,
    Reason.INVALID_CREDENTIALS,
    Reason.REQUEST_RATE_EXCEEDED,
    Reason.TOKENIZER_UNAVAILABLE,
    Reason.INTERNAL,
)
_WITH_MODEL = (*_ALWAYS, Reason.MODEL_NOT_FOUND, Reason.MODEL_NOT_ALLOWED)
_WITH_BODY = (*_WITH_MODEL, Reason.INVALID_ARGUMENT, Reason.MALFORMED_BODY, Reason.REQUEST_TOO_LARGE)
_GENERATES = (*_WITH_BODY, Reason.TIER_NOT_ALLOWED, Reason.ENGINE_LOST, Reason.DEADLINE_EXCEEDED)


def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    for name in ("ChatBody", "CompletionBody"):
        _describe_options(schemas[name])
    schemas.update(_ANSWERS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": metadata.version("millrace"),
            "description": "OpenAI-compatible. A field that is not listed is refused by name.",
        },
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generate("createChatCompletion", "ChatBody", "ChatCompletion")},
            "/v1/completions": {"post": _generate("createCompletion", "CompletionBody", "Completion")},
            "/v1/models": {"get": _operation("listModels", _json("ModelList"), _ALWAYS)},
            "/v1/models/{model}": {
                "get": {
                    **_operation("retrieveModel", _json("Model"), _WITH_MODEL),
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": _STRING}],
                }
            },
            "/tokenize": {"post": _post("tokenize", "TokenizeBody", "Tokens")},
            "/detokenize": {"post": _post("detokenize", "DetokenizeBody", "Text")},
            "/health": {
                "get": {
                    "operationId": "health",
                    "security": [],
                    "responses": {
                        "200": {"description": "Requests are served.", "content": _json("Health")},
                        "503": {"description": "Something is missing.", "content": _json("Health")},
                    },
                }
            },
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_options(schema: dict[str, Any]) -> None:
    """Takes out what is declared only to be refused, and writes the limits of numbers in."""
    properties: dict[str, Any] = schema["properties"]
    for name in Unserved.__struct_fields__:
        properties.pop(name, None)
    for name, (lowest, highest) in RANGES.items():
        for branch in properties.get(name, {}).get("anyOf", ()):
            if branch.get("type") in ("integer", "number"):
                branch["minimum"], branch["maximum"] = lowest, highest


def _generate(operation: str, body: str, answer: str) -> dict[str, Any]:
    content = {**_json(answer), "text/event-stream": {"schema": _STRING}}
    return {**_operation(operation, content, _GENERATES), "requestBody": _body(body)}


def _post(operation: str, body: str, answer: str) -> dict[str, Any]:
    return {**_operation(operation, _json(answer), _WITH_BODY), "requestBody": _body(body)}


def _operation(operation: str, content: dict[str, Any], reasons: tuple[Reason, ...]) -> dict[str, Any]:
    statuses: dict[str, list[str]] = {}
    for reason in reasons:
        statuses.setdefault(str(TABLE[reason].http_status), []).append(reason.value)
    refusals = {
        status: {"description": ", ".join(names) + " and others of this status", "content": _json("Error")}
        for status, names in sorted(statuses.items())
    }
    return {
        "operationId": operation,
        "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _body(name: str) -> dict[str, Any]:
    return {"required": True, "content": _json(name)}


def _object(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_CHOICE = {
    "index": _INTEGER,
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": _NULLABLE_STRING,
    "logprobs": {"type": ["object", "null"]},
    # Only of complete answers whose schema was not enforced wholly.
    "verdict": _object(
        {
            "valid": {"type": "boolean"},
            "keyword": _STRING,
            "schema_path": _STRING,
            "instance_path": _STRING,
            "message": _STRING,
        }
    ),
}
_HEAD = {
    "id": _STRING,
    "object": _STRING,
    "created": _INTEGER,
    "model": _STRING,
    "service_tier": _STRING,
    "usage": {"$ref": _REF.format(name="Usage")},
}
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _NULLABLE_STRING,
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list({"type": "object"}),
    },
    "reasoning_content",
    "tool_calls",
)
_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "max_model_len": {"type": ["integer", "null"]},
    }
)
_ANSWERS: Mapping[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": _NULLABLE_STRING,
                    "code": {"enum": [reason.value for reason in Reason]},
                    "metadata": {"type": "object", "additionalProperties": _STRING},
                },
                "metadata",
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
            "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
            "time_to_first_token": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "time_to_first_token",
    ),
    "ChatCompletion": _object(
        {**_HEAD, "choices": _list(_object({**_CHOICE, "message": _MESSAGE}, "verdict"))}
    ),
    "Completion": _object({**_HEAD, "choices": _list(_object({**_CHOICE, "text": _STRING}, "verdict"))}),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object(
        {
            "count": _INTEGER,
            "max_model_len": {"type": ["integer", "null"]},
            "tokens": _list(_INTEGER),
            "token_strs": _list(_STRING),
        },
        "token_strs",
    ),
    "Text": _object({"prompt": _STRING}),
    "Health": _object({"status": {"enum": ["ok", "unavailable"]}, "missing": _STRING}, "missing"),
}
