"""`/v1/chat/completions`: the request's body to a domain request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from contract.chat import Conversation, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode
from contract.errors import invalid, unsupported
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.faces.bodies import Tolerance
from gateway.faces.openai.fields import FIELDS
from gateway.faces.openai.requests import CommonBody, check_common, generation_request, sampling
from gateway.faces.options import effort_options, json_text, tool_mode
from gateway.faces.test_time import DeliberationBody, deliberation
from gateway.pipeline.validate import SizedConversation, check_counts
from gateway.types.request import GenerationRequest


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content. Those of other types than text are decoded to be refused by type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    input_audio: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    video_url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    file: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class FunctionCallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The called function, with its arguments as JSON."""

    name: str
    # What is no JSON stays what the model wrote; null is none.
    arguments: str | None = "{}"


class ToolCallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant message."""

    function: FunctionCallBody | None = None
    id: str = ""
    type: str = "function"
    index: int | None = None


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # SDKs copy these from answers; nothing else than null is accepted.
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class FunctionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool."""

    type: str
    function: FunctionBody | None = None
    # Tools of the type "custom" have it, and are refused by their type.
    custom: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a function."""

    name: str


class AllowedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a tool."""

    type: str
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some of the tools."""

    mode: str
    tools: list[AllowedTool]


class ToolChoiceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool choice that names a function, or some."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    custom: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ChatBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat completion request."""

    messages: list[MessageBody]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    max_thinking_tokens: int | None = None
    # One answer is chosen among several samples.
    test_time: DeliberationBody | None = None
    # False: what the model thinks is counted, and not shown.
    include_reasoning: bool | None = None
    safety_identifier: str | None = None
    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    template_name: str | None = None


# Strange keys of messages, parts, tool calls and tools are ignored.
TOLERANCE = Tolerance(
    {"messages": MessageBody, "tools": ToolBody},
    {
        MessageBody: {"content": ContentPart, "tool_calls": ToolCallBody},
        ToolCallBody: {"function": FunctionCallBody},
        ToolBody: {"function": FunctionBody},
    },
)
DECODER = msgspec.json.Decoder(FIELDS.declared_in(ChatBody))
# The names that fields of a conversation have in a body.
CONVERSATION_NAMES: Mapping[str, str] = {"prompt": "messages", "template_options": "chat_template_kwargs"}


def chat_request(
    body: ChatBody, *, reasons: Callable[[str], bool], limits: RequestConfig = DEFAULT_REQUEST_LIMITS
) -> GenerationRequest:
    """The domain request. `reasons` says whether the model of a name can think, for reasoning_effort."""
    check_common(body)
    max_tokens, max_field = _max_tokens(body)
    if body.include_reasoning is False and body.logprobs:
        raise invalid("include_reasoning", "logprobs would show the thoughts; leave one of them out")
    return generation_request(
        body,
        conversation(body, reasons=reasons(body.model), limits=limits),
        sampling(
            body,
            max_tokens=max_tokens,
            logprobs=_logprobs(body),
            max_thinking_tokens=body.max_thinking_tokens,
        ),
        names={**CONVERSATION_NAMES, "max_tokens": max_field, "logprobs": "top_logprobs"},
        safety_identifier=body.safety_identifier,
        test_time=deliberation(body.test_time) if body.test_time else None,
    )


def _sized(messages: Sequence[MessageBody], tools: Sequence[ToolBody] | None) -> SizedConversation:
    return SizedConversation(
        num_messages=len(messages),
        num_parts=sum(len(each.content) for each in messages if isinstance(each.content, list)),
        num_tool_calls=sum(len(each.tool_calls) for each in messages if each.tool_calls),
        num_tools=len(tools or ()),
    )


def conversation(body: ChatBody, *, reasons: bool, limits: RequestConfig) -> Conversation:
    """The conversation that the template renders."""
    check_counts(_sized(body.messages, body.tools), limits)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    tools, tool_choice = _chosen(tools, body.tool_choice)
    return Conversation(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_options=effort_options(
            body.reasoning_effort,
            "reasoning_effort",
            body.model,
            reasons=reasons,
            given=body.chat_template_kwargs or {},
        ),
        documents=tuple(body.documents or ()),
        template_name=body.template_name or "",
        continue_final_message=bool(body.continue_final_message),
    )


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid("max_tokens", "it differs from max_completion_tokens; give one of them")
    return body.max_completion_tokens, "max_completion_tokens"


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "it needs logprobs true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _message(body: MessageBody, field: str) -> Message:
    if body.content is None and body.role is not Role.ASSISTANT:
        raise invalid(f"{field}.content", "it is required")
    if body.refusal and (body.content or body.role is not Role.ASSISTANT):
        raise invalid(f"{field}.refusal", "only an assistant message without content has one; leave it out")
    for name in ("reasoning_content", "reasoning"):
        if getattr(body, name) and body.role is not Role.ASSISTANT:
            raise invalid(f"{field}.{name}", "only assistant messages reason; leave it out")
    if body.reasoning and body.reasoning_content not in (None, body.reasoning):
        raise invalid(f"{field}.reasoning", "it differs from reasoning_content; give one of them")
    return Message(
        role=body.role,
        content=_content(body.content, f"{field}.content") or body.refusal or "",
        name=body.name or "",
        tool_calls=tuple(
            _tool_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(body.tool_calls or ())
        ),
        tool_call_id=body.tool_call_id or "",
        reasoning=body.reasoning_content or body.reasoning or "",
    )


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not content:
        raise invalid(field, "it has no parts; give at least one")
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "refusal", "input_text"):
            problem = f"{part.type!r} is not supported"
            raise unsupported(f"{field}[{index}].type", "the model reads text only", problem)
        for name in ("image_url", "input_audio", "video_url", "file"):
            if bytes(getattr(part, name)) not in (b"", b"null"):
                raise invalid(f"{field}[{index}].{name}", f"a part of type {part.type!r} has none")
        name, other = ("refusal", "text") if part.type == "refusal" else ("text", "refusal")
        text = getattr(part, name)
        if text is None:
            raise invalid(f"{field}[{index}].{name}", "it is required")
        if getattr(part, other) is not None:
            raise invalid(f"{field}[{index}].{other}", f"a part of type {part.type!r} has none")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: ToolCallBody, field: str) -> ToolCall:
    if call.type != "function":
        raise invalid(f"{field}.type", f"{call.type!r} is not supported; use function")
    if call.function is None:
        raise invalid(f"{field}.function", "it is required: an object with name and arguments")
    return ToolCall(call.id, call.function.name, call.function.arguments or "{}")


def _tool(tool: ToolBody, field: str) -> Tool:
    if tool.type != "function":
        problem = f"{tool.type!r} is not supported"
        raise unsupported(f"{field}.type", "use function, with its name and parameters", problem)
    if tool.function is None:
        raise invalid(f"{field}.function", "it is required: an object with name and parameters")
    function = tool.function
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters_json=json_text(function.parameters),
        strict=bool(function.strict),
    )


def _chosen(
    tools: tuple[Tool, ...], choice: str | ToolChoiceBody | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, which are those that the model sees, and whether one must be."""
    if choice is None:
        return tools, ToolChoice()
    if isinstance(choice, str):
        return tools, ToolChoice(tool_mode(choice, "tool_choice"))
    for name in ("function", "allowed_tools"):
        if name != choice.type and getattr(choice, name) is not None:
            raise invalid(f"tool_choice.{name}", f"a choice of type {choice.type!r} has none")
    if choice.allowed_tools is not None:
        return _allowed(tools, choice.allowed_tools)
    if choice.type not in ("function", "allowed_tools"):
        raise unsupported("tool_choice.type", "name a function", f"{choice.type!r} is not supported")
    if choice.function is None:
        raise invalid(f"tool_choice.{choice.type}", "it is required with this type")
    return tools, ToolChoice(ToolChoiceMode.NAMED, choice.function.name)


def _allowed(tools: tuple[Tool, ...], allowed: AllowedTools) -> tuple[tuple[Tool, ...], ToolChoice]:
    field = "tool_choice.allowed_tools"
    mode = tool_mode(allowed.mode, f"{field}.mode", ("auto", "required"))
    known = {tool.name for tool in tools}
    for index, each in enumerate(allowed.tools):
        if each.type != "function":
            raise unsupported(
                f"{field}.tools[{index}].type", "use function", f"{each.type!r} is not supported"
            )
        if each.function.name not in known:
            problem = f"{each.function.name!r} is none of the tools; declare it there, too"
            raise invalid(f"{field}.tools[{index}].function.name", problem)
    if not allowed.tools:
        raise invalid(f"{field}.tools", "it is empty; send tool_choice none where no tool may be called")
    names = {each.function.name for each in allowed.tools}
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(mode)
