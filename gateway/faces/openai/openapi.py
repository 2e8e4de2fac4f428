"""The OpenAPI document of the HTTP face, made from the types that requests are decoded with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason
from gateway.faces.bodies import IGNORED_HEADER
from gateway.faces.openai import answer_types as answers
from gateway.faces.openai.errors import ERRORS
from gateway.faces.openai.openapi_bodies import BEYOND, BEYOND_REASONS, body_schemas
from gateway.faces.schemas import REF, answer_schemas, by_status, framed, told
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.application import HealthPage

PATH = "/openapi.json"
_STRING, _INTEGER = {"type": "string"}, {"type": "integer", "minimum": 0}

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
    # Raised for tokens whose claims name a tenant or tier that is not there.
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
    ERRORS.elapsed_header: ((), "Milliseconds from the request's head to the response's.", _INTEGER),
    "retry-after": (("429", "503"), "Seconds after which another try may help.", _INTEGER),
    "retry-after-ms": (("429", "503"), "The same in milliseconds.", _INTEGER),
    "www-authenticate": (("401",), "The scheme that is asked for.", _STRING),
    WARNING_HEADER: (("200",), "A field that has no effect, or less than it says.", _STRING),
    IGNORED_HEADER: ((), "Unknown keys of messages and tools, which were ignored.", _STRING),
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

_ABOUT = """OpenAI-compatible. Unknown keys inside of messages and tools are ignored, and named in
`x-millrace-ignored`; any other field that is not listed is refused by name.

A body that its schema allows is served, or refused for what no schema can say: limits, names that are not
there, and

""" + "\n".join(f"- `{name}`: {rule}" for name, rule in (*BEYOND_REASONS.items(), *BEYOND.items()))
_TAGS = {
    "generation": "Text and tool calls, whole or as server-sent events.",
    "models": "What the key may use.",
    "adapters": "LoRA adapters, for the tenants that operate the service.",
    "tokens": "Texts to token ids and back.",
    "operation": "Whether requests are served.",
}
_SUMMARIES: Mapping[str, tuple[str, str]] = {
    "createChatCompletion": ("generation", "Answer a conversation"),
    "createCompletion": ("generation", "Continue texts or token ids"),
    "listModels": ("models", "List the models that the key may use"),
    "retrieveModel": ("models", "Describe one model"),
    "listAdapters": ("adapters", "List the adapters that are served"),
    "loadAdapter": ("adapters", "Serve an adapter"),
    "unloadAdapter": ("adapters", "Serve an adapter no longer"),
    "tokenize": ("tokens", "Show the tokens of a text or a conversation"),
    "detokenize": ("tokens", "Show the text of token ids"),
    "health": ("operation", "Tell whether requests are served"),
    "describe": ("operation", "Show this document"),
}
_MODEL, _HELLO = {"model": "millrace-nano"}, [{"role": "user", "content": "Hello!"}]
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# Bodies that the bundled model's stack answers, by operation and what they show.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "createChatCompletion": {
        "whole": {**_MODEL, "messages": _HELLO},
        "stream": {
            **_MODEL,
            "messages": _HELLO,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "tools": {
            **_MODEL,
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": _WEATHER}],
            "tool_choice": "required",
        },
        "schema": {
            **_MODEL,
            "messages": [{"role": "user", "content": "Extract: Anna, 34, lives in Oslo."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": _PERSON},
            },
        },
    },
    "createCompletion": {
        "text": {**_MODEL, "prompt": "Once upon a time"},
        "stream": {**_MODEL, "prompt": "Once upon a time", "stream": True, "logprobs": 2},
    },
    "tokenize": {"text": {"prompt": "Hello!"}, "conversation": {"messages": _HELLO}},
    "detokenize": {"ids": {"tokens": [300, 301]}},
    "loadAdapter": {"adapter": {"lora_name": "millrace-nano:pirate", "lora_path": "/adapters/pirate"}},
    "unloadAdapter": {"adapter": {"lora_name": "millrace-nano:pirate"}},
}


@cache
def document() -> bytes:
    """The document as JSON."""
    return framed(
        "Millrace",
        _ABOUT,
        tags=[{"name": name, "description": about} for name, about in _TAGS.items()],
        paths=_paths(),
        components={
            "schemas": {**body_schemas(), **answer_schemas((*answers.ANSWERS, HealthPage))},
            "examples": {reason.value: {"value": _example(reason)} for reason in _GENERATES},
        },
        beyond_reasons=BEYOND_REASONS,
        beyond=BEYOND,
    )


def _paths() -> dict[str, Any]:
    model = {"name": "model", "in": "path", "required": True, "schema": _STRING, "example": "millrace-nano"}
    tokenize = _operation("tokenize", _json("Tokens"), _WITH_BODY, "TokenizeBody")
    detokenize = _operation("detokenize", _json("DetokenizedText"), _WITH_BODY, "DetokenizeBody")
    retrieve = _operation("retrieveModel", _json("ModelCard"), _WITH_MODEL)
    itself = _operation("describe", {"application/json": {"schema": {"type": "object"}}}, _EDGE)
    return {
        "/v1/chat/completions": {"post": _generate("createChatCompletion", "ChatBody", "ChatCompletion")},
        "/v1/completions": {"post": _generate("createCompletion", "CompletionBody", "Completion")},
        "/v1/lora_adapters": {"get": _operation("listAdapters", _json("AdapterList"), _ALWAYS)},
        "/v1/load_lora_adapter": {"post": _operation("loadAdapter", _json("Done"), _WITH_BODY, "LoadBody")},
        "/v1/unload_lora_adapter": {
            "post": _operation("unloadAdapter", _json("Done"), _WITH_BODY, "UnloadBody")
        },
        "/v1/models": {"get": _operation("listModels", _json("ModelList"), _ALWAYS)},
        "/v1/models/{model}": {"get": {**retrieve, "parameters": [model]}},
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": detokenize},
        "/health": {"get": _health()},
        PATH: {"get": {**itself, "security": []}},
    }


def _generate(operation: str, body: str, answer: str) -> dict[str, Any]:
    """Events have the answer's chunks or an error as JSON in their data."""
    chunks = _json(f"{answer}Chunk", "Error")["application/json"]["schema"]
    piece = {**_STRING, "contentMediaType": "application/json", "contentSchema": chunks}
    data = {
        "description": "The last event's is [DONE], unless an error ended the stream.",
        "anyOf": [{"const": "[DONE]"}, piece],
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    events = {"text/event-stream": {"schema": {"description": "One event.", **event}}}
    return _operation(operation, {**_json(answer), **events}, _GENERATES, body)


def _health() -> dict[str, Any]:
    health = _operation("health", _json("HealthPage"), _EDGE)
    health["responses"]["200"]["description"] = "Requests are served."
    missing = _response("503", "Something is missing, or no gateway answers.", _json("HealthPage", "Error"))
    return {**health, "security": [], "responses": {**health["responses"], "503": missing}}


def _operation(
    operation: str, content: dict[str, Any], reasons: Iterable[Reason], body: str = ""
) -> dict[str, Any]:
    responses = {"200": _response("200", "The answer.", content), **_refusals(reasons)}
    tag, summary = _SUMMARIES[operation]
    described: dict[str, Any] = {
        "operationId": operation,
        "tags": [tag],
        "summary": summary,
        "responses": responses,
    }
    if body:
        examples = {name: {"value": value} for name, value in EXAMPLES[operation].items()}
        content = {"schema": {"$ref": REF.format(name=body)}, "examples": examples}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _refusals(reasons: Iterable[Reason]) -> dict[str, Any]:
    statuses = by_status(reasons, lambda reason: reason.mapping.http_status)
    return {status: _refusal(status, those) for status, those in statuses.items()}


def _refusal(status: str, reasons: Iterable[Reason]) -> dict[str, Any]:
    content = _json("Error")
    content["application/json"]["examples"] = {
        reason.value: {"$ref": f"#/components/examples/{reason.value}"} for reason in reasons
    }
    return _response(status, told(reasons), content)


def _example(reason: Reason) -> dict[str, Any]:
    error = MillraceError(reason, "What happened, the limit, and the remedy.")
    example: dict[str, Any] = msgspec.json.decode(ERRORS.body(error))
    return example


def _response(status: str, description: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {
        name: {"description": meaning, "schema": schema}
        for name, (statuses, meaning, schema) in _HEADERS.items()
        if not statuses or status in statuses
    }
    return {"description": description, "headers": headers, "content": content}


def _json(*names: str) -> dict[str, Any]:
    schemas = [{"$ref": REF.format(name=name)} for name in names]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
