"""Bodies of requests as OpenAI declares them, with the extensions that vLLM made common, to domain
requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from contract.chat import (
    ChoiceFormat,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    Prompt,
    RegexFormat,
    ResponseFormat,
)
from contract.errors import invalid, unsupported
from contract.sampling import CommonOptions, SamplingOptions
from gateway.faces.options import labels
from gateway.faces.retention import RetentionBody, retention
from gateway.pipeline.validate import check_metadata
from gateway.types.deliberation import Deliberation
from gateway.types.request import GenerationRequest

# A token id as a key of a JSON object is written.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    # Usage so far on every chunk, as vLLM has it.
    continuous_usage_stats: bool | None = None
    # Padding against traffic analysis: false is what happens anyway.
    include_obfuscation: bool | None = None


class JsonSchemaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: str = ""
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class ResponseFormatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response_format`. `regex`, `choice`, `lark` and `ebnf` are extensions."""

    type: str
    json_schema: JsonSchemaBody | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; exactly one of them."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class CommonBody(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    # Extensions.
    cache_salt: str | None = None
    # -1: to what the model has room for beside the answer.
    truncate_prompt_tokens: int | None = None
    # What the answer may forget.
    kv: RetentionBody | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # False: refused under load rather than answered by a cheaper model.
    allow_fallback: bool | None = None
    # Report the parts of the time to the first token in usage.
    include_timing: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def check_common(body: CommonBody) -> None:
    """Raises for combinations that only this face can see."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options", "it is only allowed with stream true")
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "leave it out or send false")
    check_metadata(body.metadata or {})
    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids", "it is empty, so nothing could follow; leave it out")


def yielding(body: CommonBody) -> list[str]:
    """Warnings for fields that something else in the body overrules, or that nobody reads."""
    warnings = []
    if body.response_format is not None and getattr(body.response_format.json_schema, "description", None):
        name = "response_format.json_schema.description"
        warnings.append(f"{name} has no effect: the model does not see it; describe the answer in a message")
    choice = getattr(body, "tool_choice", None)
    choice = getattr(getattr(choice, "allowed_tools", None), "mode", choice)
    is_forced = choice is not None and choice not in ("none", "auto")
    if body.min_tokens and (is_forced or response_format(body)[0] is not None):
        warnings.append("min_tokens has no effect where the constraint leaves nothing but the answer's end")
    return warnings


def generation_request(
    body: CommonBody,
    prompt: Prompt,
    options: SamplingOptions,
    *,
    names: Mapping[str, str] = {},
    echo: bool = False,
    num_prompts: int = 1,
    safety_identifier: str | None = None,
    test_time: Deliberation | None = None,
) -> GenerationRequest:
    """The domain request; `names` are our fields' in this body."""
    format_, format_field = response_format(body)
    return GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=options,
        response_format=format_,
        service_tier=body.service_tier or "",
        prompt_cache_key=body.prompt_cache_key or "",
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        retention=retention(body.kv) if body.kv else None,
        metadata=labels(body.metadata, user=body.user, safety_identifier=safety_identifier),
        allow_fallback=body.allow_fallback is not False,
        test_time=test_time,
        echo=echo,
        num_prompts=num_prompts,
        streaming=bool(body.stream),
        face="http",
        field_names={**names, "response_format": format_field},
    )


def sampling(
    body: CommonBody, *, max_tokens: int | None, logprobs: int | None, max_thinking_tokens: int | None = None
) -> SamplingOptions:
    """Sampling options of a body."""
    common = {name: getattr(body, name) for name in CommonOptions.__struct_fields__}
    if body.top_k == -1:
        # vLLM's way to keep all tokens.
        common["top_k"] = 0
    return SamplingOptions(
        logit_bias=_biases(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        max_tokens=max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        max_thinking_tokens=max_thinking_tokens,
        **common,
    )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            problem = f"key {key[:80]!r} is not a token id; write it in digits, without leading zeros"
            raise invalid("logit_bias", problem)
    return {int(key): bias for key, bias in given.items()}


def response_format(body: CommonBody) -> tuple[ResponseFormat | None, str]:
    """The one constraint that the body asks for, by whichever of its names; and that name."""
    found = [
        (name, format_)
        for name, format_ in (
            _openai(body.response_format),
            _structured(body.structured_outputs),
            *_by_kind(body, "guided_"),
        )
        if format_ is not None
    ]
    if len(found) > 1:
        raise invalid(found[1][0], f"{found[0][0]} constrains the answer already; give one of them")
    return (found[0][1], found[0][0]) if found else (None, "response_format")


def _openai(body: ResponseFormatBody | None) -> tuple[str, ResponseFormat | None]:
    if body is None:
        return "", None
    if body.type not in FORMATS:
        raise invalid("response_format.type", f"{body.type!r} is not one of {', '.join(FORMATS)}")
    part, make = FORMATS[body.type]
    for name in ("json_schema", "regex", "choice", "grammar"):
        if name != part and getattr(body, name) is not None:
            raise invalid(f"response_format.{name}", f"type {body.type!r} does not take it; leave it out")
    if not part:
        return "response_format", make()
    name, given = f"response_format.{part}", getattr(body, part)
    if given is None:
        raise invalid(name, "it is required with this type")
    return name, make(given)


def _schema(given: JsonSchemaBody) -> JsonSchemaFormat:
    if not bytes(given.schema):
        raise invalid("response_format.json_schema.schema", "it is required")
    return JsonSchemaFormat(bytes(given.schema).decode(), given.name, given.strict or False)


# Types of response_format, the field that belongs to each, and what makes a constraint of it.
FORMATS: Mapping[str, tuple[str, Callable[..., ResponseFormat | None]]] = {
    "text": ("", lambda: None),
    "json_object": ("", JsonObjectFormat),
    "json_schema": ("json_schema", _schema),
    "regex": ("regex", RegexFormat),
    "choice": ("choice", lambda options: ChoiceFormat(tuple(options))),
    "lark": ("grammar", LarkFormat),
    "ebnf": ("grammar", EbnfFormat),
}


def _structured(body: StructuredOutputs | None) -> tuple[str, ResponseFormat | None]:
    if body is None:
        return "", None
    given = _by_kind(body, "", "structured_outputs.")
    if body.json_object:
        given.append(("structured_outputs.json_object", JsonObjectFormat()))
    if len(given) != 1:
        raise invalid("structured_outputs", "give exactly one of json, json_object, regex, choice, grammar")
    return given[0]


def _by_kind(body: msgspec.Struct, prefix: str, path: str = "") -> list[tuple[str, ResponseFormat]]:
    """vLLM's constraints, of fields that begin with `prefix`, by their names below `path`."""
    found: list[tuple[str, ResponseFormat]] = []
    for kind, make in KINDS.items():
        given, name = getattr(body, f"{prefix}{kind}"), f"{path}{prefix}{kind}"
        # A Raw is empty where nothing was said.
        if given is not None and given not in _NOTHING:
            found.append((name, make(name, given)))
    return found


def _json_format(field: str, raw: msgspec.Raw) -> JsonSchemaFormat:
    text = bytes(raw)
    if text.startswith(b'"'):
        # The schema as JSON text inside a string.
        return JsonSchemaFormat(msgspec.json.decode(text, type=str), strict=False)
    if not text.startswith(b"{"):
        raise invalid(field, "a JSON Schema is an object, or a string that holds one")
    return JsonSchemaFormat(text.decode(), strict=False)


def _grammar(_: str, text: str) -> ResponseFormat:
    # GBNF defines rules with "::=", Lark with ":".
    return EbnfFormat(text) if "::=" in text else LarkFormat(text)


_NOTHING = (msgspec.Raw(), msgspec.Raw(b"null"))
KINDS: Mapping[str, Callable[[str, Any], ResponseFormat]] = {
    "json": _json_format,
    "regex": lambda _, pattern: RegexFormat(pattern),
    "choice": lambda _, options: ChoiceFormat(tuple(options)),
    "grammar": _grammar,
}
# vLLM's older fields of a body, for the same constraints.
GUIDED = tuple(f"guided_{kind}" for kind in KINDS)
