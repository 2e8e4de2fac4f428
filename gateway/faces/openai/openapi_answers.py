"""JSON Schemas of what the HTTP face answers, whole and event by event, with examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from contract.errors import Reason
from gateway.faces.openai.openapi_bodies import REF

STRING = {"type": "string"}
INTEGER = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_NULLABLE_STRING = {"type": ["string", "null"]}


def _object(properties: Mapping[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _strings(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, STRING)


def _integers(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, INTEGER)


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REF.format(name=name)}


_LENGTH = {"max_model_len": {"type": ["integer", "null"]}}
_TOKEN = {"token": STRING, "logprob": _NUMBER, "bytes": _list(INTEGER)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(STRING),
        "token_logprobs": _list({"type": ["number", "null"]}),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _list(INTEGER),
    }
)
_ENDS = {"enum": ["stop", "length", "tool_calls"]}
# Only of complete answers whose schema was not enforced wholly.
_VERDICT = _object({"valid": _BOOLEAN, **_strings("keyword", "schema_path", "instance_path", "message")})
_CALL = {"id": STRING, "type": {"const": "function"}, "function": _object(_strings("name", "arguments"))}
# Id, type and name come first; pieces of the arguments follow.
_CALL_PIECE = {
    "index": INTEGER,
    **_CALL,
    "function": _object(_strings("name", "arguments"), optional=("name",)),
}
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _NULLABLE_STRING,
        "refusal": {"type": "null"},
        "reasoning_content": STRING,
        "tool_calls": _list(_object(_CALL)),
    },
    optional=("reasoning_content", "tool_calls"),
)
_DELTA_FIELDS = {
    "role": {"const": "assistant"},
    **_strings("content", "reasoning_content"),
    "tool_calls": _list(_object(_CALL_PIECE, optional=("id", "type"))),
}
_DELTA = _object(_DELTA_FIELDS, optional=_DELTA_FIELDS)
_KEYWORDS = _list(_object(_strings("keyword", "path", "note")))
_ENFORCEMENT = _object({"approximated": _KEYWORDS, "unenforced": _KEYWORDS})
_MODEL = _object({**_strings("id", "owned_by"), "object": {"const": "model"}, "created": INTEGER, **_LENGTH})


def _whole(kind: str, logprobs: Mapping[str, Any], **said: Any) -> dict[str, Any]:
    choice = {
        "index": INTEGER,
        **said,
        "logprobs": _or_null(logprobs),
        "finish_reason": _ENDS,
        "stop_reason": _NULLABLE_STRING,
        "verdict": _VERDICT,
    }
    return _answer(kind, _object(choice, optional=("verdict",)), _ref("Usage"), optional=("enforcement",))


def _piece(kind: str, logprobs: Mapping[str, Any], **said: Any) -> dict[str, Any]:
    choice = {
        "index": INTEGER,
        **said,
        "logprobs": _or_null(logprobs),
        "finish_reason": _or_null(_ENDS),
        "stop_reason": STRING,
        "verdict": _VERDICT,
    }
    choices = _object(choice, optional=("stop_reason", "verdict"))
    return _answer(kind, choices, _or_null(_ref("Usage")), optional=("enforcement", "usage"))


def _answer(
    kind: str, choice: Mapping[str, Any], usage: Mapping[str, Any], optional: Iterable[str]
) -> dict[str, Any]:
    told = {**_strings("id", "model", "service_tier"), "object": {"const": kind}, "created": INTEGER}
    more = {"choices": _list(choice), "usage": usage, "enforcement": _ENFORCEMENT}
    return _object({**told, **more}, optional=optional)


_ERROR = {
    **_strings("message", "type"),
    "param": _NULLABLE_STRING,
    "code": {"enum": sorted({reason.openai_code for reason in Reason})},
    "reason": {"enum": [reason.value for reason in Reason]},
    "metadata": {"type": "object", "additionalProperties": STRING},
}
_USAGE = {
    **_integers("prompt_tokens", "completion_tokens", "total_tokens"),
    "prompt_tokens_details": _object(_integers("cached_tokens")),
    "completion_tokens_details": _object(_integers("reasoning_tokens")),
    "time_to_first_token": {"type": "object", "additionalProperties": _NUMBER},
}
_TOKENS = {"count": INTEGER, **_LENGTH, "tokens": _list(INTEGER), "token_strs": _list(STRING)}
ANSWERS: Mapping[str, Any] = {
    "Error": _object({"error": _object(_ERROR, optional=("metadata",))}),
    "Usage": _object(_USAGE, optional=("time_to_first_token",)),
    "ChatCompletion": _whole("chat.completion", _CHAT_LOGPROBS, message=_MESSAGE),
    "ChatCompletionChunk": _piece("chat.completion.chunk", _CHAT_LOGPROBS, delta=_DELTA),
    "Completion": _whole("text_completion", _COMPLETION_LOGPROBS, text=STRING),
    "CompletionChunk": _piece("text_completion", _COMPLETION_LOGPROBS, text=STRING),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object(_TOKENS, optional=("token_strs",)),
    "Text": _object(_strings("prompt")),
    "Health": _object({"status": {"enum": ["ok", "unavailable"]}, "missing": STRING}, optional=("missing",)),
}


def events(name: str) -> dict[str, Any]:
    """A stream's content: each event's data is JSON of the schema with this name, or of Error."""
    content = {"anyOf": [_ref(name), _ref("Error")]}
    piece = {**STRING, "contentMediaType": "application/json", "contentSchema": content}
    data = {
        "description": "The last event's is [DONE], unless an error ended the stream.",
        "anyOf": [{"const": "[DONE]"}, piece],
    }
    return {"text/event-stream": {"schema": {"description": "One event.", **_object({"data": data})}}}
