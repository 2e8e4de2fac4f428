"""Bodies of Anthropic's API to domain requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from contract.chat import (
    MESSAGE_ID,
    Conversation,
    JsonSchemaFormat,
    Message,
    Role,
    Tool,
    ToolChoice,
    ToolChoiceMode,
)
from contract.efforts import EFFORTS as ALL_EFFORTS
from contract.efforts import NO_EFFORT
from contract.errors import invalid, unsupported
from contract.sampling import SamplingOptions
from gateway.config import RequestConfig
from gateway.faces.anthropic.bodies import (
    ContentBlock,
    CountTokensBody,
    MessagesBody,
    OutputFormat,
    ToolChoiceOption,
    ToolDefinition,
)
from gateway.faces.anthropic.fields import FIELDS
from gateway.faces.anthropic.thoughts import Thoughts
from gateway.faces.anthropic.turns import TurnReader, content_text, unanswered
from gateway.faces.options import thinking_options
from gateway.faces.retention import retention
from gateway.faces.test_time import deliberation
from gateway.pipeline.validate import MAX_METADATA_VALUE, SizedConversation, check_counts
from gateway.types.request import GenerationRequest

_CHOICES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.NAMED,
    "none": ToolChoiceMode.NONE,
}
# The API ends thinking by `thinking` and has no word for little of it.
EFFORTS = tuple(each for each in ALL_EFFORTS if each not in (NO_EFFORT, "minimal"))
THINKING = ("enabled", "adaptive", "disabled")
# Words of service_tier that leave the tier to the caller's own.
OWN_TIER = ("auto", "standard_only")
MAX_TOOL_NAME = 128
_FIELD_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "template_options": "thinking",
    "max_thinking_tokens": "thinking.budget_tokens",
    "continue_final_message": "messages",
}
_FIELD_PARTS = {
    ".function.name": ".name",
    ".function.parameters": ".input_schema",
    ".enable_thinking": "",
    ".thinking": "",
    ".reasoning_effort": "",
}


class MessageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A domain request, and what of its body was said otherwise than the API means it."""

    request: GenerationRequest
    conversation: Conversation
    warnings: list[str]


def message_request(
    body: CountTokensBody,
    *,
    reasons: Callable[[str], bool],
    thoughts: Thoughts,
    limits: RequestConfig,
) -> MessageRequest:
    """The request of a body. `reasons` says whether the model of a name can think, `thoughts` are the
    caller's. Raises INVALID_ARGUMENT and UNSUPPORTED_FIELD.
    """
    check_counts(_sized(body), limits)
    warnings = FIELDS.check(body)
    options, thinking_warnings = _thinking(body, reasons=reasons)
    conversation, turn_warnings = _conversation(body, options, thoughts)
    format_, format_field = _response_format(body)
    warnings += [*thinking_warnings, *turn_warnings]
    request = GenerationRequest(
        model=body.model,
        prompt=conversation,
        response_format=format_,
        fills_context=True,
        id_prefix=MESSAGE_ID,
        face="http",
        max_tool_name=MAX_TOOL_NAME,
        field_names={**_FIELD_NAMES, "response_format": format_field},
        field_parts=_FIELD_PARTS,
    )
    if isinstance(body, MessagesBody):
        request = msgspec.structs.replace(
            request,
            sampling=_sampling(body, thinks=reasons(body.model)),
            service_tier="" if body.service_tier in OWN_TIER else body.service_tier or "",
            cache_salt=body.cache_salt,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            test_time=deliberation(body.test_time) if body.test_time else None,
            retention=retention(body.kv) if body.kv else None,
            metadata=_labels(body),
            streaming=bool(body.stream),
        )
    return MessageRequest(request=request, conversation=conversation, warnings=warnings)


def eager_tools(body: CountTokensBody) -> frozenset[str]:
    """Tools whose arguments are sent as they come."""
    return frozenset(tool.name for tool in body.tools or () if tool.eager_input_streaming)


def _sized(body: CountTokensBody) -> SizedConversation:
    blocks = [block for turn in body.messages for block in _blocks(turn.content)]
    return SizedConversation(
        num_messages=len(body.messages),
        num_parts=len(blocks) + len(_blocks(body.system)),
        num_tool_calls=sum(block.type == "tool_use" for block in blocks),
        num_tools=len(body.tools or ()),
    )


def _blocks(content: str | Sequence[ContentBlock] | None) -> Sequence[ContentBlock]:
    if content is None or isinstance(content, str):
        return ()
    return [*content, *(inner for block in content for inner in _blocks(block.content))]


def _conversation(
    body: CountTokensBody, options: dict[str, Any], thoughts: Thoughts
) -> tuple[Conversation, list[str]]:
    messages = []
    if body.system:
        messages.append(Message(role=Role.SYSTEM, content=content_text(body.system, "system")))
    reader = TurnReader(thoughts)
    if not body.messages:
        raise invalid("messages", "it is empty; give at least one message")
    messages += reader.messages(body.messages)
    if (error := unanswered(messages)) is not None:
        raise error
    choice = body.tool_choice or ToolChoiceOption("auto")
    return (
        Conversation(
            messages=tuple(messages),
            tools=tuple(_tools(body.tools or ())),
            tool_choice=_choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            template_options=options,
            # An answer that was begun is continued.
            continue_final_message=bool(messages) and messages[-1].role is Role.ASSISTANT,
        ),
        reader.warnings,
    )


def _tools(tools: Sequence[ToolDefinition]) -> Iterator[Tool]:
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            problem = f"{tool.type!r} is a tool of Anthropic's servers, which is not run here"
            raise unsupported(
                f"{field}.type", "describe a tool of your own with name and input_schema", problem
            )
        if not tool.name:
            raise invalid(f"{field}.name", "it is required")
        schema = bytes(tool.input_schema)
        if not schema.startswith(b"{"):
            raise invalid(f"{field}.input_schema", "it is required: a JSON Schema, which is an object")
        yield Tool(
            name=tool.name,
            description=tool.description or "",
            parameters_json=schema.decode(),
            strict=bool(tool.strict),
        )


def _choice(choice: ToolChoiceOption) -> ToolChoice:
    mode = _CHOICES.get(choice.type)
    if mode is None:
        problem = f"{choice.type[:80]!r} is not one of {', '.join(_CHOICES)}"
        raise invalid("tool_choice.type", problem)
    if (choice.name is not None) is not (mode is ToolChoiceMode.NAMED):
        problem = "type 'tool' names a tool" if choice.name is None else f"type {choice.type!r} has none"
        raise invalid("tool_choice.name", problem)
    return ToolChoice(mode, choice.name or "")


def _thinking(body: CountTokensBody, *, reasons: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
    """What the template is told of thinking, and warnings; nothing where it is left to the model."""
    config = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and effort not in EFFORTS:
        raise invalid("output_config.effort", f"{effort[:80]!r} is not one of {', '.join(EFFORTS)}")
    if config is not None:
        _check_thinking(body, config.type, config.budget_tokens)
        if config.display not in (None, "summarized", "omitted"):
            problem = f"{str(config.display)[:80]!r} is not one of summarized, omitted"
            raise invalid("thinking.display", problem)
    asked = config is not None and config.type != "disabled"
    if config is None and effort is None:
        return {}, []
    if not reasons(body.model):
        field = "thinking" if asked else "output_config.effort"
        why = f"{field} has no effect: model {body.model[:80]!r} does not reason"
        return {}, [why] if asked or effort is not None else []
    if config is not None and not asked:
        return thinking_options(False, NO_EFFORT), (
            ["output_config.effort has no effect: thinking is disabled"] if effort else []
        )
    return thinking_options(True, effort or ""), []


def _check_thinking(body: CountTokensBody, kind: str, budget: int | None) -> None:
    if kind not in THINKING:
        raise unsupported(
            "thinking.type", f"use one of {', '.join(THINKING)}", f"{kind[:80]!r} is not supported"
        )
    if kind != "enabled":
        if budget is not None:
            raise invalid("thinking.budget_tokens", f"type {kind!r} has none; leave it out")
        return
    if budget is None:
        raise invalid("thinking.budget_tokens", "it is required with type 'enabled'")
    if budget < 1:
        raise invalid("thinking.budget_tokens", f"{budget} is less than 1; send type 'disabled' instead")
    if isinstance(body, MessagesBody) and budget >= body.max_tokens:
        problem = f"{budget} is not less than max_tokens {body.max_tokens}, of which the answer needs some"
        raise invalid("thinking.budget_tokens", problem)


def _response_format(body: CountTokensBody) -> tuple[JsonSchemaFormat | None, str]:
    """The schema of the answer, and the field that has it."""
    found: list[tuple[str, OutputFormat]] = []
    if body.output_config is not None and body.output_config.format is not None:
        found.append(("output_config.format", body.output_config.format))
    if body.output_format is not None:
        found.append(("output_format", body.output_format))
    if not found:
        return None, "output_config.format"
    if len(found) > 1:
        raise invalid("output_format", "output_config.format says it already; give one of them")
    field, given = found[0]
    if given.type != "json_schema":
        raise invalid(f"{field}.type", f"{given.type[:80]!r} is not json_schema")
    if not bytes(given.schema).startswith(b"{"):
        raise invalid(f"{field}.schema", "it is required: a JSON Schema, which is an object")
    # The API promises answers that follow it: what cannot be enforced wholly is refused.
    return JsonSchemaFormat(bytes(given.schema).decode(), strict=True), field


def _sampling(body: MessagesBody, *, thinks: bool) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=body.max_tokens,
        max_thinking_tokens=body.thinking.budget_tokens if body.thinking is not None and thinks else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=tuple(body.stop_sequences or ()),
    )


def _labels(body: MessagesBody) -> dict[str, str]:
    user_id = body.metadata and body.metadata.user_id
    if not user_id:
        return {}
    if len(user_id) > MAX_METADATA_VALUE:
        raise invalid("metadata.user_id", f"{len(user_id)} characters; the limit is {MAX_METADATA_VALUE}")
    return {"user_id": user_id}
