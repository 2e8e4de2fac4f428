"""JSON Schemas of request bodies: what their types say, and what is refused beyond that.

A body that its schema allows is refused for what BEYOND lists alone; one that it does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from contract.chat import Role
from contract.efforts import EFFORTS
from contract.errors import Reason
from contract.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    OPTIONS,
)
from gateway.faces import retention, test_time
from gateway.faces.openai import chat, completions
from gateway.faces.openai.adapters import LoadBody, UnloadBody
from gateway.faces.openai.chat import TOLERANCE
from gateway.faces.openai.fields import FIELDS
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
from gateway.faces.schemas import (
    BEYOND_CUT,
    CUT,
    NULL,
    REF,
    TEXT,
    bound_options,
    list_of,
    object_of,
    or_null,
    ref,
    text,
)
from gateway.models.catalog import MAX_MODEL_NAME
from gateway.pipeline.validate import (
    MAX_CACHE_SALT,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PROMPT_CACHE_KEY,
    NAME,
)
from gateway.types.request import MAX_METADATA

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
    r"max_thinking_tokens": "it is for models that reason, and is no less than what ends a thought",
    **test_time.BEYOND,
    **retention.BEYOND,
    r"include_reasoning": "logprobs show what is thought, so one of them is left out",
    **BEYOND_CUT,
    r"(documents|chat_template_kwargs)([.\[].*)?": "the template reads it, and reasoning_effort agrees",
    r"messages\[\d+\]\.name": "the checkpoint's template writes names of this role",
    r"(lora_)?(name|path)": "the name is model:adapter, and engines find an adapter at the path",
    r"(continue_final_message|template_name)": "the last message and the checkpoint's templates allow it",
}

Struct: TypeAlias = type[msgspec.Struct]

_NO_TEXT = {"enum": [None, ""]}
_NO_ITEMS = {"anyOf": [{"type": "array", "maxItems": 0}, NULL]}
_NOT_SET = {"enum": [None, False]}
_GIVEN = {"not": NULL}
_ID = {"type": "integer", "minimum": 0}


_NAMED = {**TEXT, "pattern": f"^{NAME.pattern}$"}
_NON_EMPTY = text(least=1)
_STOP = text(MAX_STOP_CHARACTERS, 1)
_SCHEMA_OR_TEXT = or_null({"type": "object"}, TEXT)
_CONTENT = {"anyOf": [TEXT, list_of(ref(chat.ContentPart))]}
_PROMPT = {"anyOf": [_NON_EMPTY, list_of(_ID)]}
_MESSAGES, _TOOLS = list_of(ref(chat.MessageBody)), list_of(ref(chat.ToolBody))
_bias, _logprobs = OPTIONS["logit_bias"].limits, OPTIONS["logprobs"].limits
_LOGIT_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^(-?0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", "minimum": _bias.minimum, "maximum": _bias.maximum},
    "maxProperties": MAX_LOGIT_BIAS,
}
_METADATA = {
    "type": "object",
    "additionalProperties": text(MAX_METADATA_VALUE),
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "maxProperties": MAX_METADATA,
}

# --- fields that say less by their type than is demanded of them -------------------------------------------

_COMMON: Mapping[str, Any] = {
    "model": text(MAX_MODEL_NAME),
    "stop": or_null(_STOP, list_of(_STOP, 0, MAX_STOP_STRINGS)),
    "user": or_null(text(MAX_METADATA_VALUE)),
    "metadata": or_null(_METADATA),
    "prompt_cache_key": or_null(text(MAX_PROMPT_CACHE_KEY)),
    "cache_salt": or_null(text(MAX_CACHE_SALT, 1)),
    "truncate_prompt_tokens": CUT,
    "stop_token_ids": or_null(list_of(_ID, 0)),
    "allowed_token_ids": or_null(list_of(_ID)),
    "logit_bias": or_null(_LOGIT_BIAS),
    "guided_json": _SCHEMA_OR_TEXT,
    "guided_choice": or_null(list_of(_NON_EMPTY)),
}
_FIELDS: Mapping[Struct, Mapping[str, Any]] = {
    chat.ChatBody: {
        **_COMMON,
        "messages": _MESSAGES,
        "top_logprobs": or_null({**_ID, "maximum": _logprobs.maximum}),
        "safety_identifier": or_null(text(MAX_METADATA_VALUE)),
        "reasoning_effort": {"enum": [*EFFORTS, None]},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, ref(chat.ToolChoiceBody)]},
    },
    completions.CompletionBody: {
        **_COMMON,
        "prompt": {"anyOf": [*_PROMPT["anyOf"], list_of(_PROMPT, 1, completions.MAX_PROMPTS)]},
        "max_tokens": or_null({**_ID, "maximum": OPTIONS["max_tokens"].limits.maximum}),
    },
    TokenizeBody: {"model": or_null(text(MAX_MODEL_NAME)), "truncate_prompt_tokens": CUT},
    DetokenizeBody: {"model": or_null(text(MAX_MODEL_NAME)), "tokens": list_of(_ID, 0)},
    StreamOptions: {"include_obfuscation": _NOT_SET},
    **test_time.SCHEMAS,
    **retention.SCHEMAS,
    JsonSchemaBody: {
        "name": {"anyOf": [_NAMED, {"const": ""}]},
        "schema": {"type": ["object", "boolean"]},
    },
    StructuredOutputs: {"json": _SCHEMA_OR_TEXT, "choice": or_null(list_of(_NON_EMPTY))},
    chat.FunctionCallBody: {"name": _NON_EMPTY},
    chat.ToolCallBody: {"type": {"const": "function"}, "function": ref(chat.FunctionCallBody)},
    chat.FunctionBody: {"name": _NAMED},
    chat.ToolBody: {"type": {"const": "function"}, "function": ref(chat.FunctionBody)},
    chat.AllowedTools: {"mode": {"enum": ["auto", "required"]}, "tools": list_of(ref(chat.AllowedTool))},
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
    return object_of(*required.split(), role=role, **fields)


_ASSISTANT: Mapping[str, Any] = {
    "tool_calls": or_null(list_of(ref(chat.ToolCallBody), 0)),
    "reasoning_content": or_null(TEXT),
    "reasoning": or_null(TEXT),
}
_BY_ROLE = [
    _of_role("role content", {"enum": [Role.SYSTEM, Role.DEVELOPER, Role.USER]}),
    _of_role("role content tool_call_id", {"const": Role.TOOL}, tool_call_id=_NON_EMPTY),
    _of_role("role", {"const": Role.ASSISTANT}, content=or_null(_CONTENT), **_ASSISTANT),
    _of_role("role", {"const": Role.ASSISTANT}, content=_NO_TEXT, refusal=TEXT, **_ASSISTANT),
]
_MEDIA = dict.fromkeys(("image_url", "input_audio", "video_url", "file"), NULL)
_PARTS = [
    object_of("type", "text", type={"enum": ["text", "input_text"]}, text=TEXT, refusal=NULL, **_MEDIA),
    object_of("type", "refusal", type={"const": "refusal"}, text=NULL, refusal=TEXT, **_MEDIA),
]
_CHOICES = [
    object_of(
        "type",
        kind,
        type={"const": kind},
        **{"function": NULL, "allowed_tools": NULL, kind: ref(struct)},
    )
    for kind, struct in (("function", chat.NamedFunction), ("allowed_tools", chat.AllowedTools))
]
_FORMAT_PARTS: Mapping[str, Any] = {
    "json_schema": ref(JsonSchemaBody),
    "regex": TEXT,
    "choice": list_of(_NON_EMPTY),
    "grammar": TEXT,
}
_BY_FORMAT = [
    object_of(
        *filter(None, ("type", part)),
        type={"const": type_},
        **{name: schema if name == part else NULL for name, schema in _FORMAT_PARTS.items()},
    )
    for type_, (part, _) in FORMATS.items()
]
_STRUCTURES = {**dict.fromkeys(KINDS, NULL), "json_object": _NOT_SET}
_STRUCTURED = [
    object_of(name, **{**_STRUCTURES, name: {"const": True} if name == "json_object" else _GIVEN})
    for name in _STRUCTURES
]
_OF_PROMPT = dict.fromkeys(("messages", "tools", "chat_template_kwargs", "continue_final_message"), NULL)
_TOKENIZED = [
    object_of("prompt", prompt=TEXT, **_OF_PROMPT),
    object_of("messages", messages=_MESSAGES, prompt=NULL, add_special_tokens=NULL),
]
# By reference: its product with the other rules is more than generators of requests unfold.
_STREAMED = {"$ref": "#/components/schemas/Streamed"}
_STREAMED_WAYS = [object_of(stream_options=NULL), object_of("stream", stream={"const": True})]

_FREE = or_null({"type": "object", **object_of("type", type={"const": "text"})})
_BOUND = {"type": "object", **object_of("type", type={"enum": [each for each in FORMATS if each != "text"]})}
_CONSTRAINTS = ("response_format", "structured_outputs", *GUIDED)
_NO_CONSTRAINT = {name: _FREE if name == "response_format" else NULL for name in _CONSTRAINTS}
_MAY_CALL = {
    "anyOf": [
        {"enum": ["none", "auto", None]},
        {
            "type": "object",
            **object_of("allowed_tools", allowed_tools=object_of("mode", mode={"const": "auto"})),
        },
    ]
}


def _ways(**unforced: Any) -> list[dict[str, Any]]:
    """Without a constraint, or with one, which says alone where the answer ends."""
    return [
        object_of(**_NO_CONSTRAINT, **unforced),
        *(
            object_of(
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
_CALLED = object_of("tools", **_NO_CONSTRAINT, ignore_eos=_NOT_SET, tools=_TOOLS)
_TOGETHER: Mapping[Struct, list[dict[str, Any]]] = {
    chat.ChatBody: [{"anyOf": [_CALLED, *_ways(tool_choice=_MAY_CALL)]}, _STREAMED],
    completions.CompletionBody: [{"anyOf": _ways()}, _STREAMED],
    TokenizeBody: [{"anyOf": _TOKENIZED}],
    chat.MessageBody: [{"anyOf": _BY_ROLE}],
    chat.ContentPart: [{"anyOf": _PARTS}],
    chat.ToolChoiceBody: [{"anyOf": _CHOICES}],
    ResponseFormatBody: [{"anyOf": _BY_FORMAT}],
    StructuredOutputs: [{"anyOf": _STRUCTURED}],
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
        found[kind.__name__]["allOf"] = groups
    found["Streamed"] = {"anyOf": _STREAMED_WAYS}
    for kind in (chat.ChatBody, completions.CompletionBody):
        _describe_options(found[kind.__name__]["properties"])
        _describe_unserved(found[kind.__name__]["properties"])
    return found


def _with_strange_keys(kinds: Iterable[Struct]) -> Iterator[Struct]:
    for kind in kinds:
        yield kind
        yield from _with_strange_keys(TOLERANCE.inside.get(kind, {}).values())


def _describe_options(properties: dict[str, Any]) -> None:
    bound_options(properties)
    # vLLM's way to keep all tokens.
    properties["top_k"]["anyOf"][0]["minimum"] = -1


def _describe_unserved(properties: dict[str, Any]) -> None:
    for name in FIELDS.names:
        # A body that serves it says so itself: what is not served has no type.
        if "anyOf" in properties.get(name, {}):
            continue
        properties[name] = FIELDS.described(name)
