"""Bodies of the Responses API, to domain requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.chat import Conversation, JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from contract.errors import invalid, unsupported
from contract.sampling import SamplingOptions
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.faces.bodies import Tolerance
from gateway.faces.options import effort_options, json_text, labels
from gateway.faces.responses.fields import FIELDS
from gateway.faces.responses.items import ITEM_TOLERANCE, InputItem, Open, conversation_size, messages_of
from gateway.faces.responses.tools import (
    MAX_JOINED_NAME,
    TOOL_TOLERANCE,
    OfferedTool,
    Toolbox,
    ToolSelection,
    chosen,
    count_tools,
    field_parts,
    toolbox,
)
from gateway.faces.retention import RetentionBody, retention
from gateway.faces.test_time import DeliberationBody, deliberation
from gateway.pipeline.validate import check_counts, check_metadata
from gateway.types.request import FITTING, GenerationRequest

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# Parts of answers that OpenAI gives when they are included, of items that are not made here.
_ABSENT_PARTS = (
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
INCLUDES = (ENCRYPTED_REASONING, LOGPROBS, *_ABSENT_PARTS)
SUMMARIES = ("auto", "concise", "detailed")
TRUNCATIONS = ("disabled", "auto")
# The names that fields of a domain request have in a body.
FIELD_NAMES: Mapping[str, str] = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "template_options": "reasoning",
}


class TextFormatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text.format`."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormatBody | None = None
    verbosity: str | None = None


class ReasoningBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reasoning`; `generate_summary` is OpenAI's older name of `summary`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`; padding against traffic analysis is not made."""

    include_obfuscation: bool | None = None


class ConversationRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`conversation`, where it is not its id alone."""

    id: str


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes a prompt: the whole body of /v1/responses/input_tokens."""

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: str | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    truncation: str | None = None
    # What is stored and comes before the input.
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None


class ResponseBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses."""

    include: list[str] | None = None
    max_output_tokens: int | None = None
    # Extension: most tokens of thoughts.
    max_thinking_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Extensions, as in /v1/chat/completions.
    cache_salt: str | None = None
    include_timing: bool | None = None
    include_reasoning: bool | None = None
    test_time: DeliberationBody | None = None
    kv: RetentionBody | None = None

    def includes(self, part: str) -> bool:
        """Whether a part of answers was asked for that is not always in them."""
        return part in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens have their log-probabilities."""
        return self.includes(LOGPROBS) or bool(self.top_logprobs)


class CompactBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses/compact."""

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


TOLERANCE = Tolerance(
    {**ITEM_TOLERANCE.fields, **TOOL_TOLERANCE.fields}, {**ITEM_TOLERANCE.inside, **TOOL_TOLERANCE.inside}
)
RESPONSE_DECODER = msgspec.json.Decoder(FIELDS.declared_in(ResponseBody))
PROMPT_DECODER = msgspec.json.Decoder(FIELDS.declared_in(PromptBody))
COMPACT_DECODER = msgspec.json.Decoder(FIELDS.declared_in(CompactBody))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A body as it is understood: the domain request, the tools that stand behind its functions, and warnings
    for what has less effect than it says.
    """

    request: GenerationRequest
    tools: Toolbox
    warnings: tuple[str, ...]


def asked(
    body: ResponseBody,
    *,
    reasons: Callable[[str], bool],
    unseal: Open,
    limits: RequestConfig = DEFAULT_REQUEST_LIMITS,
) -> Asked:
    """The domain request. `reasons` says whether the model of a name can think; `unseal` opens what the
    caller was given in `encrypted_content`.
    """
    warnings = [*FIELDS.check(body), *_check_response(body)]
    conversation, box = conversation_of(body, reasons=reasons, unseal=unseal, limits=limits)
    format_, more = _format(body.text)
    sampling = SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        max_tokens=body.max_output_tokens,
        max_thinking_tokens=body.max_thinking_tokens,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    request = GenerationRequest(
        model=body.model,
        prompt=conversation,
        sampling=sampling,
        response_format=format_,
        service_tier=body.service_tier or "",
        prompt_cache_key=body.prompt_cache_key or "",
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=cut_to(body),
        test_time=deliberation(body.test_time) if body.test_time else None,
        retention=retention(body.kv) if body.kv else None,
        metadata=labels(body.metadata, user=body.user, safety_identifier=body.safety_identifier),
        streaming=bool(body.stream),
        max_tool_name=MAX_JOINED_NAME,
        field_names=FIELD_NAMES,
        field_parts=field_parts(conversation.tools, box),
    )
    return Asked(request=request, tools=box, warnings=(*warnings, *more, *box.warnings))


def cut_to(body: PromptBody) -> int | None:
    """Tokens that the prompt is cut to where it is longer."""
    return FITTING if body.truncation == "auto" else None


def conversation_of(
    body: PromptBody, *, reasons: Callable[[str], bool], unseal: Open, limits: RequestConfig
) -> tuple[Conversation, Toolbox]:
    """The conversation that the template renders, and the tools behind its functions."""
    if body.input is None:
        raise invalid("input", "it is required: a text, or a list of items")
    if body.truncation not in (None, *TRUNCATIONS):
        raise invalid("truncation", f"{body.truncation!r} is not one of {', '.join(TRUNCATIONS)}")
    offered = body.tools or []
    check_counts(conversation_size(body.input, count_tools(offered)), limits, _field)
    box = toolbox(offered)
    tools, choice = chosen(box, body.tool_choice)
    effort = None if body.reasoning is None else body.reasoning.effort
    conversation = Conversation(
        messages=messages_of(body.input, body.instructions, unseal),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_options=effort_options(
            effort, "reasoning.effort", body.model, reasons=effort is not None and reasons(body.model)
        ),
    )
    return conversation, box


def _field(name: str) -> str:
    return FIELD_NAMES.get(name, name)


def _check_response(body: ResponseBody) -> list[str]:
    """Warnings; raises for what is no value of a field, or is not served."""
    warnings = []
    check_metadata(body.metadata or {})
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is only allowed with stream true")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "leave it out or send false")
    for index, part in enumerate(body.include or ()):
        if part not in INCLUDES:
            raise invalid(f"include[{index}]", f"{part!r} is not one of {', '.join(INCLUDES)}")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        remedy = "the served models have no such switch; ask for it in the instructions"
        raise unsupported("text.verbosity", remedy, f"{body.text.verbosity!r} is not supported")
    reasoning = body.reasoning or ReasoningBody()
    for name in ("summary", "generate_summary"):
        value = getattr(reasoning, name)
        if value is None:
            continue
        if value not in SUMMARIES:
            raise invalid(f"reasoning.{name}", f"{value!r} is not one of {', '.join(SUMMARIES)}")
        warnings.append(f"reasoning.{name} has no effect: thoughts are not summarised but given as they are")
    return warnings


def _format(text: TextBody | None) -> tuple[ResponseFormat | None, list[str]]:
    """What constrains the answer, and warnings."""
    form = None if text is None else text.format
    if form is None:
        return None, []
    if form.type != "json_schema":
        for name in ("name", "description", "schema", "strict"):
            if getattr(form, name) is not None:
                raise invalid(f"text.format.{name}", f"type {form.type!r} does not take it; leave it out")
    match form.type:
        case "text":
            return None, []
        case "json_object":
            return JsonObjectFormat(), []
        case "json_schema":
            if form.schema is None:
                raise invalid("text.format.schema", "it is required with this type")
            warnings = []
            if form.description:
                problem = "the model does not see it; describe the answer in instructions"
                warnings.append(f"text.format.description has no effect: {problem}")
            return JsonSchemaFormat(json_text(form.schema), form.name or "", bool(form.strict)), warnings
        case kind:
            raise invalid("text.format.type", f"{kind!r} is not one of text, json_object, json_schema")
