"""JSON Schemas of request bodies: what their types say, and what is refused beyond that.

A body that its schema allows is refused for what BEYOND lists alone; one that it does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from contract.chat import Role
from contract.errors import Reason
from contract.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    OPTIONS,
    RANGES,
)
from gateway.faces.openai import chat, completions
from gateway.faces.openai.adapters import LoadBody, UnloadBody
from gateway.faces.openai.chat import TOLERANCE
from gateway.faces.openai.fields import HARMLESS_VALUES, UNSERVED, WITHOUT_EFFECT
from gateway.faces.openai.inspect import DetokenizeBody, TokenizeBody
from gateway.faces.openai.requests import (
    FORMATS,
    GUIDED,
    KINDS,
    JsonSchemaBody,
    ResponseFormatBody,
    StreamOptions,
    StructuredOutputs,
)
from gateway.faces.options import EFFORTS
from gateway.models.catalog import MAX_MODEL_NAME
from gateway.pipeline.validate import (
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PROMPT_CACHE_KEY,
    NAME,
)
from gateway.types.request import MAX_METADATA

REF = "#/components/schemas/{name}"
_BODIES = (chat.ChatBody, completions.CompletionBody, TokenizeBody, DetokenizeBody, LoadBody, UnloadBody)

# Rules that no schema can state: by the error's reason, and by its `param` as a regular expression.
BEYOND_REASONS: Mapping[Reason, str] = {
    Reason.CONTEXT_LENGTH_EXCEEDED: "prompt and answer fit into the model's context",
    Reason.NEVER_FITS: "they fit into the engines' memory",
    Reason.GRAMMAR_REFUSED: "a schema, pattern or grammar compiles, and what is strict is enforced exactly",
    Reason.TEMPLATE_FAILED: "the checkpoint's template renders the conversation",
}
BEYOND: Mapping[str, str] = {
    r"(max_tokens|max_completion_tokens)": "they are equal where both are given; 0 needs echo",
    r"top_logprobs": "logprobs is true",
    r"min_tokens": "it is not more than max_tokens",
    r"n": "greedy answers are equal: with temperature 0 there is one, unless beam_width is more",
    r"(n|best_of)": "prompts times answers have a limit; best_of is at least n, and is not streamed",
    r"(beam_width|temperature|top_k|\w+_p|logit_bias|\w+_penalty)": "beams are at least n, and not drawn",
    r"(logit_bias|allowed_token_ids|stop_token_ids|prompt|tokens)(\[\d+\])*": "ids are the vocabulary's",
    r"tools\[\d+\]\.function\.name": "a name is there once",
    r"tool_choice(\.allowed_tools\.tools\[\d+\]\.function\.name)?": "it names one of the tools",
    r"messages\[\d+\]\.reasoning": "it is what reasoning_content says, where both are given",
    r"metadata\.(user|safety_identifier)": "it is what the field of that name says, where both are given",
    r"reasoning_effort": "it is for models that reason",
    r"(documents|chat_template_kwargs)([.\[].*)?": "the template reads it, and reasoning_effort agrees",
    r"messages\[\d+\]\.name": "the checkpoint's template writes names of this role",
    r"(lora_)?(name|path)": "the name is model:adapter, and engines find an adapter at the path",
    r"(continue_final_message|template_name)": "the last message and the checkpoint's templates allow it",
}

Struct: TypeAlias = type[msgspec.Struct]

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_NO_TEXT = {"enum": [None, ""]}
_NO_ITEMS = {"anyOf": [{"type": "array", "maxItems": 0}, _NULL]}
_NOT_SET = {"enum": [None, False]}
_GIVEN = {"not": _NULL}
_ID = {"type": "integer", "minimum": 0}


def _or_null(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schemas, _NULL]}


def _text(most: int | None = None, least: int = 0) -> dict[str, Any]:
    limits = {} if most is None else {"maxLength": most}
    return {**_TEXT, **({"minLength": least} if least else {}), **limits}


def _list(items: Mapping[str, Any], least: int = 1, most: int | None = None) -> dict[str, Any]:
    limits = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **limits}


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": REF.format(name=kind.__name__)}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"properties": properties, "required": list(required)}


_NAMED = {**_TEXT, "pattern": f"^{NAME.pattern}$"}
_NON_EMPTY = _text(least=1)
_STOP = _text(MAX_STOP_CHARACTERS, 1)
_SCHEMA_OR_TEXT = _or_null({"type": "object"}, _TEXT)
_CONTENT = {"anyOf": [_TEXT, _list(_ref(chat.ContentPart))]}
_PROMPT = {"anyOf": [_NON_EMPTY, _list(_ID)]}
_MESSAGES, _TOOLS = _list(_ref(chat.MessageBody)), _list(_ref(chat.ToolBody))
_bias, _logprobs = OPTIONS["logit_bias"].limits, OPTIONS["logprobs"].limits
_LOGIT_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^(-?0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", "minimum": _bias.minimum, "maximum": _bias.maximum},
    "maxProperties": MAX_LOGIT_BIAS,
}
_METADATA = {
    "type": "object",
    "additionalProperties": _text(MAX_METADATA_VALUE),
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "maxProperties": MAX_METADATA,
}

# --- fields that say less by their type than is demanded of them -------------------------------------------

_COMMON: Mapping[str, Any] = {
    "model": _text(MAX_MODEL_NAME),
    "stop": _or_null(_STOP, _list(_STOP, 0, MAX_STOP_STRINGS)),
    "user": _or_null(_text(MAX_METADATA_VALUE)),
    "metadata": _or_null(_METADATA),
    "prompt_cache_key": _or_null(_text(MAX_PROMPT_CACHE_KEY)),
    "stop_token_ids": _or_null(_list(_ID, 0)),
    "allowed_token_ids": _or_null(_list(_ID)),
    "logit_bias": _or_null(_LOGIT_BIAS),
    "guided_json": _SCHEMA_OR_TEXT,
    "guided_choice": _or_null(_list(_NON_EMPTY)),
}
_FIELDS: Mapping[Struct, Mapping[str, Any]] = {
    chat.ChatBody: {
        **_COMMON,
        "messages": _MESSAGES,
        "top_logprobs": _or_null({**_ID, "maximum": _logprobs.maximum}),
        "safety_identifier": _or_null(_text(MAX_METADATA_VALUE)),
        "reasoning_effort": {"enum": [*EFFORTS, None]},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, _ref(chat.ToolChoiceBody)]},
    },
    completions.CompletionBody: {
        **_COMMON,
        "prompt": {"anyOf": [*_PROMPT["anyOf"], _list(_PROMPT, 1, completions.MAX_PROMPTS)]},
        "max_tokens": _or_null({**_ID, "maximum": OPTIONS["max_tokens"].limits.maximum}),
    },
    TokenizeBody: {"model": _or_null(_text(MAX_MODEL_NAME))},
    DetokenizeBody: {"model": _or_null(_text(MAX_MODEL_NAME)), "tokens": _list(_ID, 0)},
    StreamOptions: {"include_obfuscation": _NOT_SET},
    JsonSchemaBody: {
        "name": {"anyOf": [_NAMED, {"const": ""}]},
        "schema": {"type": ["object", "boolean"]},
    },
    StructuredOutputs: {"json": _SCHEMA_OR_TEXT, "choice": _or_null(_list(_NON_EMPTY))},
    chat.FunctionCallBody: {"name": _NON_EMPTY},
    chat.ToolCallBody: {"type": {"const": "function"}, "function": _ref(chat.FunctionCallBody)},
    chat.FunctionBody: {"name": _NAMED},
    chat.ToolBody: {"type": {"const": "function"}, "function": _ref(chat.FunctionBody)},
    chat.AllowedTools: {"mode": {"enum": ["auto", "required"]}, "tools": _list(_ref(chat.AllowedTool))},
    chat.AllowedTool: {"type": {"const": "function"}},
}
_REQUIRED: Mapping[Struct, tuple[str, ...]] = {
    JsonSchemaBody: ("schema",),
    chat.ToolCallBody: ("function",),
    chat.ToolBody: ("type", "function"),
}

# --- what belongs together --------------------------------------------------------------------------------


def _of_role(required: str, role: Any, **said: Any) -> dict[str, Any]:
    """A message in which what belongs to other roles is not said."""
    others = dict.fromkeys(("tool_call_id", "reasoning_content", "reasoning", "refusal"), _NO_TEXT)
    fields = {"content": _CONTENT, "tool_calls": _NO_ITEMS, **others, **said}
    return _object(*required.split(), role=role, **fields)


_ASSISTANT: Mapping[str, Any] = {
    "tool_calls": _or_null(_list(_ref(chat.ToolCallBody), 0)),
    "reasoning_content": _or_null(_TEXT),
    "reasoning": _or_null(_TEXT),
}
_BY_ROLE = [
    _of_role("role content", {"enum": [Role.SYSTEM, Role.DEVELOPER, Role.USER]}),
    _of_role("role content tool_call_id", {"const": Role.TOOL}, tool_call_id=_NON_EMPTY),
    _of_role("role", {"const": Role.ASSISTANT}, content=_or_null(_CONTENT), **_ASSISTANT),
    _of_role("role", {"const": Role.ASSISTANT}, content=_NO_TEXT, refusal=_TEXT, **_ASSISTANT),
]
_MEDIA = dict.fromkeys(("image_url", "input_audio", "video_url", "file"), _NULL)
_PARTS = [
    _object("type", "text", type={"enum": ["text", "input_text"]}, text=_TEXT, refusal=_NULL, **_MEDIA),
    _object("type", "refusal", type={"const": "refusal"}, text=_NULL, refusal=_TEXT, **_MEDIA),
]
_CHOICES = [
    _object(
        "type",
        kind,
        type={"const": kind},
        **{"function": _NULL, "allowed_tools": _NULL, kind: _ref(struct)},
    )
    for kind, struct in (("function", chat.NamedFunction), ("allowed_tools", chat.AllowedTools))
]
_FORMAT_PARTS: Mapping[str, Any] = {
    "json_schema": _ref(JsonSchemaBody),
    "regex": _TEXT,
    "choice": _list(_NON_EMPTY),
    "grammar": _TEXT,
}
_BY_FORMAT = [
    _object(
        *filter(None, ("type", part)),
        type={"const": type_},
        **{name: schema if name == part else _NULL for name, schema in _FORMAT_PARTS.items()},
    )
    for type_, (part, _) in FORMATS.items()
]
_STRUCTURES = {**dict.fromkeys(KINDS, _NULL), "json_object": _NOT_SET}
_STRUCTURED = [
    _object(name, **{**_STRUCTURES, name: {"const": True} if name == "json_object" else _GIVEN})
    for name in _STRUCTURES
]
_OF_PROMPT = dict.fromkeys(("messages", "tools", "chat_template_kwargs", "continue_final_message"), _NULL)
_TOKENIZED = [
    _object("prompt", prompt=_TEXT, **_OF_PROMPT),
    _object("messages", messages=_MESSAGES, prompt=_NULL, add_special_tokens=_NULL),
]
_STREAMED = [_object(stream_options=_NULL), _object("stream", stream={"const": True})]

_FREE = _or_null({"type": "object", **_object("type", type={"const": "text"})})
_BOUND = {"type": "object", **_object("type", type={"enum": [each for each in FORMATS if each != "text"]})}
_CONSTRAINTS = ("response_format", "structured_outputs", *GUIDED)
_NO_CONSTRAINT = {name: _FREE if name == "response_format" else _NULL for name in _CONSTRAINTS}
_MAY_CALL = {
    "anyOf": [
        {"enum": ["none", "auto", None]},
        {
            "type": "object",
            **_object("allowed_tools", allowed_tools=_object("mode", mode={"const": "auto"})),
        },
    ]
}


def _ways(**unforced: Any) -> list[dict[str, Any]]:
    """Without a constraint, or with one, which says alone where the answer ends."""
    return [
        _object(**_NO_CONSTRAINT, **unforced),
        *(
            _object(
                name,
                **{
                    **_NO_CONSTRAINT,
                    name: _BOUND if name == "response_format" else _GIVEN,
                    "ignore_eos": _NOT_SET,
                    **unforced,
                },
            )
            for name in _CONSTRAINTS
        ),
    ]


# A call that is forced is a constraint, too.
_CALLED = _object("tools", **_NO_CONSTRAINT, ignore_eos=_NOT_SET, tools=_TOOLS)
_TOGETHER: Mapping[Struct, tuple[list[dict[str, Any]], ...]] = {
    chat.ChatBody: ([_CALLED, *_ways(tool_choice=_MAY_CALL)], _STREAMED),
    completions.CompletionBody: (_ways(), _STREAMED),
    TokenizeBody: (_TOKENIZED,),
    chat.MessageBody: (_BY_ROLE,),
    chat.ContentPart: (_PARTS,),
    chat.ToolChoiceBody: (_CHOICES,),
    ResponseFormatBody: (_BY_FORMAT,),
    StructuredOutputs: (_STRUCTURED,),
}


def body_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every type that a body is made of, by the type's name."""
    _, found = msgspec.json.schema_components(_BODIES, ref_template=REF)
    for kind, fields in _FIELDS.items():
        found[kind.__name__]["properties"].update(fields)
    for kind, names in _REQUIRED.items():
        found[kind.__name__]["required"] = list(names)
    for kind in _with_strange_keys(TOLERANCE.fields.values()):
        del found[kind.__name__]["additionalProperties"]
    for kind, groups in _TOGETHER.items():
        found[kind.__name__]["allOf"] = [{"anyOf": group} for group in groups]
    for kind in (chat.ChatBody, completions.CompletionBody):
        _describe_options(found[kind.__name__]["properties"])
        _describe_unserved(found[kind.__name__]["properties"])
    return found


def _with_strange_keys(kinds: Iterable[Struct]) -> Iterator[Struct]:
    for kind in kinds:
        yield kind
        yield from _with_strange_keys(TOLERANCE.inside.get(kind, {}).values())


def _describe_options(properties: dict[str, Any]) -> None:
    """Writes the limits of numbers in."""
    for name, limits in RANGES.items():
        for branch in properties.get(name, {}).get("anyOf", ()):
            if branch.get("type") in ("integer", "number") and "minimum" not in branch:
                branch["minimum"], branch["maximum"] = limits.minimum, limits.maximum
    # vLLM's way to keep all tokens.
    properties["top_k"]["anyOf"][0]["minimum"] = -1
    top_p = properties["top_p"]["anyOf"][0]
    top_p["exclusiveMinimum"] = top_p.pop("minimum")


def _describe_unserved(properties: dict[str, Any]) -> None:
    for name in UNSERVED.names:
        # A body that serves it says so itself: what is not served has no type.
        if "anyOf" in properties.get(name, {}):
            continue
        if name in WITHOUT_EFFECT:
            properties[name] = {"description": f"Without effect: {WITHOUT_EFFECT[name]}."}
        else:
            values = {"enum": [None, *HARMLESS_VALUES.get(name, ())]}
            properties[name] = {**values, "description": f"Not served: {UNSERVED.remedy(name)}."}
