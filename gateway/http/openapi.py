"""The OpenAPI document of the HTTP face, made from the types that requests are decoded with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec

from contract.errors import Reason
from contract.sampling import RANGES
from gateway.auth.authorizer import API_KEY_HEADERS
from gateway.http.chat import ChatBody
from gateway.http.completions import CompletionBody
from gateway.http.inspect import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_INTEGER = {"type": "integer", "minimum": 0}
_STRING = {"type": "string"}
_NULLABLE_STRING = {"type": ["string", "null"]}

# Reasons by which a request may be refused, per endpoint. The edge has its own for every path: what is no
# valid HTTP, headers beyond its limit, too many connections, too slow a client, no gateway.
_EDGE = (
    Reason.MALFORMED_BODY,
    Reason.REQUEST_TOO_LARGE,
    Reason.QUEUE_LIMIT_EXCEEDED,
    Reason.ENGINE_UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED,
)
_ALWAYS = (
    *_EDGE,
    Reason.MISSING_CREDENTIALS,
    Reason.INVALID_CREDENTIALS,
    # Of tokens whose claims name a tenant or tier that is not there.
    Reason.TENANT_NOT_ALLOWED,
    Reason.TIER_NOT_ALLOWED,
    Reason.REQUEST_RATE_EXCEEDED,
    Reason.LIMITS_UNAVAILABLE,
    Reason.TOKENIZER_UNAVAILABLE,
    Reason.INTERNAL,
)
_WITH_MODEL = (*_ALWAYS, Reason.MODEL_NOT_FOUND, Reason.MODEL_NOT_ALLOWED)
_WITH_BODY = (*_WITH_MODEL, Reason.INVALID_ARGUMENT, Reason.GATEWAY_FULL)
_GENERATES = (*_WITH_BODY, Reason.ENGINE_LOST, Reason.CANCELLED)


# Headers of responses: statuses that may have them (none means all), what they say, and how.
_COUNTED = ("200", "400", "403", "404", "413", "429", "499", "500", "503", "504")
_HEADERS: Mapping[str, tuple[tuple[str, ...], str, Mapping[str, Any]]] = {
    "x-request-id": ((), "Id of the request in logs, traces and the ledger.", _STRING),
    "openai-processing-ms": ((), "Milliseconds from the request's head to the response's.", _INTEGER),
    "retry-after": (("429", "503"), "Seconds after which another try may help.", _INTEGER),
    "www-authenticate": (("401",), "The scheme that is asked for.", _STRING),
    "x-millrace-warning": (("200",), "A field that has no effect, or less than it says.", _STRING),
    **{
        f"x-ratelimit-{part}-{unit}": (
            _COUNTED,
            f"{meaning} {unit} per minute, where they are limited.",
            schema,
        )
        for unit in ("requests", "tokens")
        for part, meaning, schema in (
            ("limit", "Most", _INTEGER),
            ("remaining", "What is left of", _INTEGER),
            ("reset", "Time, as 1m0s, until all are there again of", _STRING),
        )
    },
}


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
        "security": [{"key": []}, *({name: []} for name in API_KEY_HEADERS)],
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
            "/tokenize": {"post": _operation("tokenize", _json("Tokens"), _WITH_BODY, "TokenizeBody")},
            "/detokenize": {"post": _operation("detokenize", _json("Text"), _WITH_BODY, "DetokenizeBody")},
            "/health": {"get": _health()},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                **{name: {"type": "apiKey", "in": "header", "name": name} for name in API_KEY_HEADERS},
            },
        },
    }


def _describe_options(schema: dict[str, Any]) -> None:
    """Writes the limits of numbers in."""
    for name, limits in RANGES.items():
        for branch in schema["properties"].get(name, {}).get("anyOf", ()):
            if branch.get("type") in ("integer", "number"):
                branch["minimum"], branch["maximum"] = limits.minimum, limits.maximum


def _generate(operation: str, body: str, answer: str) -> dict[str, Any]:
    content = {**_json(answer), "text/event-stream": {"schema": _STRING}}
    return _operation(operation, content, _GENERATES, body)


def _health() -> dict[str, Any]:
    health = _operation("health", _json("Health"), _EDGE)
    health["responses"]["200"]["description"] = "Requests are served."
    missing = _response("503", "Something is missing, or no gateway answers.", _json("Health", "Error"))
    return {**health, "security": [], "responses": {**health["responses"], "503": missing}}


def _operation(
    operation: str, content: dict[str, Any], reasons: Iterable[Reason], body: str = ""
) -> dict[str, Any]:
    responses = {"200": _response("200", "The answer.", content), **_refusals(reasons)}
    described: dict[str, Any] = {"operationId": operation, "responses": responses}
    if body:
        described["requestBody"] = {"required": True, "content": _json(body)}
    return described


def _refusals(reasons: Iterable[Reason]) -> dict[str, Any]:
    statuses: dict[str, list[str]] = {}
    for reason in reasons:
        statuses.setdefault(str(reason.mapping.http_status), []).append(reason.value)
    return {
        status: _response(status, ", ".join(names) + " and others of this status", _json("Error"))
        for status, names in sorted(statuses.items())
    }


def _response(status: str, description: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {
        name: {"description": meaning, "schema": schema}
        for name, (statuses, meaning, schema) in _HEADERS.items()
        if not statuses or status in statuses
    }
    return {"description": description, "headers": headers, "content": content}


def _json(*names: str) -> dict[str, Any]:
    schemas = [{"$ref": _REF.format(name=name)} for name in names]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def _object(properties: Mapping[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _strings(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _STRING)


def _integers(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _INTEGER)


_LENGTH = {"max_model_len": {"type": ["integer", "null"]}}
_CHOICE = {
    "index": _INTEGER,
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": _NULLABLE_STRING,
    "logprobs": {"type": ["object", "null"]},
    # Only of complete answers whose schema was not enforced wholly.
    "verdict": _object(
        {"valid": {"type": "boolean"}, **_strings("keyword", "schema_path", "instance_path", "message")}
    ),
}
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _NULLABLE_STRING,
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list({"type": "object"}),
    },
    optional=("reasoning_content", "tool_calls"),
)
_MODEL = _object({**_strings("id", "owned_by"), "object": {"const": "model"}, "created": _INTEGER, **_LENGTH})


def _completion(**said: Any) -> dict[str, Any]:
    usage = {"$ref": _REF.format(name="Usage")}
    choices = _list(_object({**_CHOICE, **said}, optional=("verdict",)))
    told = _strings("id", "object", "model", "service_tier")
    return _object({**told, "created": _INTEGER, "usage": usage, "choices": choices})


_ERROR = {
    **_strings("message", "type"),
    "param": _NULLABLE_STRING,
    "code": {"enum": sorted({reason.openai_code for reason in Reason})},
    "reason": {"enum": [reason.value for reason in Reason]},
    "metadata": {"type": "object", "additionalProperties": _STRING},
}
_USAGE = {
    **_integers("prompt_tokens", "completion_tokens", "total_tokens"),
    "prompt_tokens_details": _object(_integers("cached_tokens")),
    "completion_tokens_details": _object(_integers("reasoning_tokens")),
    "time_to_first_token": {"type": "object", "additionalProperties": {"type": "number"}},
}
_TOKENS = {"count": _INTEGER, **_LENGTH, "tokens": _list(_INTEGER), "token_strs": _list(_STRING)}
_ANSWERS: Mapping[str, Any] = {
    "Error": _object({"error": _object(_ERROR, optional=("metadata",))}),
    "Usage": _object(_USAGE, optional=("time_to_first_token",)),
    "ChatCompletion": _completion(message=_MESSAGE),
    "Completion": _completion(text=_STRING),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object(_TOKENS, optional=("token_strs",)),
    "Text": _object(_strings("prompt")),
    "Health": _object({"status": {"enum": ["ok", "unavailable"]}, "missing": _STRING}, optional=("missing",)),
}
