"""Chat templates: the checkpoint's own Jinja, in a sandbox, rendering what `transformers` renders."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.chat import Conversation, Message, Role, Tool, ToolCall
from contract.errors import MillraceError, Reason
from runtime.errors import ConfigError
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.refusals import invalid
from tokenizer_svc.text.checkpoint import DEFAULT_TEMPLATE
from tokenizer_svc.text.control import ControlTokens
from tokenizer_svc.text.formats import THINK_CLOSE

# Names under which templates look for an assistant turn's reasoning.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TOOL_TEMPLATE = "tool_use"
# Names under which templates look for whether, and how much, the model thinks. Gateways set all of them.
_THINKING = ("enable_thinking", "thinking", "reasoning_effort")
_WITHOUT_THINKING = (False, "none", "minimal")


def without_thinking(options: Mapping[str, Any]) -> bool:
    """Whether template options ask for an answer without thoughts."""
    return any(options.get(key, True) in _WITHOUT_THINKING for key in _THINKING)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore attributes, so that templates cannot reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the template sets a private attribute {name!r}")


class _Dict:
    """`dict(...)` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """dict.fromkeys."""
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what templates do most: `message.content` of a dictionary."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # A dictionary's own attributes come first, as in jinja2; what is no attribute is an item or nothing.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How a template wants the arguments and the missing content of turns with tool calls."""

    arguments_as_text: bool = False
    empty_content: str = "empty"

    def apply_empty_content(self, message: dict[str, Any]) -> None:
        """Writes the absence of content in the template's way."""
        if self.empty_content == "absent":
            del message["content"]
        elif self.empty_content == "null":
            message["content"] = None


class ChatTemplates:
    """The compiled templates of a checkpoint. `render` is safe to call from several threads."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        control: ControlTokens,
        limits: PromptLimitsConfig,
    ) -> None:
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        # Variables that each template reads.
        self._read: dict[str, frozenset[str]] = {}
        for name, source in templates.items():
            try:
                template = environment.from_string(source)
                # Jinja keeps them as a ChainMap and copies that for each rendering, name by name in Python.
                template.globals = dict(template.globals)
                self._templates[name] = template
                self._read[name] = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}; correct it, or give "
                    "another one with --chat-template FILE (model.chat_template)"
                ) from error
        self._special_tokens = dict(special_tokens)
        self._control = control
        self._limits = limits
        source = "\n".join(templates.values())
        self._knows_developer = "developer" in source
        self._reasons = THINK_CLOSE in source
        self._shape = self._find_shape()
        # Roles of messages whose name each template does not write, as far as a trial shows.
        self._nameless = {name: self._find_nameless(name) for name in self._templates}
        # Whether the default template writes what users say as it is, as far as a trial shows.
        self.writes_user_turns = self._find_user_turns()

    def render(self, conversation: Conversation) -> str:
        """The prompt as text, with markers (see `control`) in what the client wrote.

        Raises TEMPLATE_FAILED when there is no such template or it refuses the conversation.
        """
        name = self._choose(conversation)
        self._refuse_unread(conversation, self._read[name])
        self._refuse_names(conversation, self._nameless[name])
        template = self._templates[name]
        messages = [self._message(message, self._shape) for message in conversation.messages]
        variables = self._variables(conversation)
        if not conversation.continue_final_message:
            return self._run(template, messages, variables)
        return self._run_continuing(template, messages, variables)

    def _find_shape(self) -> _Shape:
        """Tries the ways on a small conversation; the first under which the call appears whole is taken."""
        call = ToolCall(id="abcdefghi", name="probe_name", arguments_json='{"probe_key": "probe_value"}')
        messages = (
            Message(role=Role.USER, content="q"),
            Message(role=Role.ASSISTANT, tool_calls=(call,)),
            Message(role=Role.TOOL, content="r", tool_call_id="abcdefghi", name="probe_name"),
        )
        tool = Tool(name="probe_name", parameters_json='{"type": "object", "properties": {}}')
        template = self._templates.get(_TOOL_TEMPLATE, self._templates.get(DEFAULT_TEMPLATE))
        if template is None:
            return _Shape()
        variables = self._variables(Conversation(messages=messages, tools=(tool,)))
        for empty_content in ("empty", "absent", "null"):
            for arguments_as_text in (False, True):
                shape = _Shape(arguments_as_text=arguments_as_text, empty_content=empty_content)
                try:
                    text = self._run(template, [self._message(each, shape) for each in messages], variables)
                except MillraceError:
                    continue
                if '"probe_key": "probe_value"' in text and "None" not in text:
                    return shape
        return _Shape()

    def _find_user_turns(self) -> bool:
        if set(self._templates) != {DEFAULT_TEMPLATE}:
            return False
        texts = ("first probe", "second probe", "third probe")
        turns: list[Message] = []
        for text in texts:
            turns += [Message(role=Role.USER, content=text), Message(role=Role.ASSISTANT, content="a")]
        try:
            written = self.render(Conversation(messages=tuple(turns[:-1])))
        except MillraceError:
            return False
        return all(text in written for text in texts)

    def _find_nameless(self, template: str) -> frozenset[Role]:
        nameless = set()
        for role in (Role.SYSTEM, Role.DEVELOPER, Role.USER, Role.ASSISTANT):
            named = Message(role=role, content="probe", name="probe_name")
            question = Message(role=Role.USER, content="q")
            messages = {
                Role.USER: (named,),
                Role.ASSISTANT: (question, named, question),
            }.get(role, (named, question))
            variables = self._variables(Conversation(messages=messages))
            turns = [self._message(each, self._shape) for each in messages]
            try:
                rendered = self._run(self._templates[template], turns, variables)
            except MillraceError:
                # Not a conversation for this template: nothing is known.
                continue
            if "probe" in rendered and "probe_name" not in rendered:
                nameless.add(role)
        return frozenset(nameless)

    def _choose(self, conversation: Conversation) -> str:
        name = conversation.template_name
        if not name:
            name = (
                _TOOL_TEMPLATE
                if conversation.tools and _TOOL_TEMPLATE in self._templates
                else DEFAULT_TEMPLATE
            )
        if name not in self._templates:
            known = ", ".join(sorted(self._templates)) or "none; send a prompt instead of messages"
            field = "conversation.template_name" if conversation.template_name else "messages"
            raise _failed(f"the model has no chat template {name!r}; templates: {known}", field)
        return name

    def _refuse_names(self, conversation: Conversation, nameless: frozenset[Role]) -> None:
        """Who speaks would stay unknown to the model. A tool's name says what its call's id says already."""
        for index, message in enumerate(conversation.messages):
            if message.name and message.role in nameless:
                raise _unread(
                    f"messages[{index}].name",
                    f"does not write the names of {message.role.value} messages; leave it out, or put the "
                    "name into the content",
                )

    def _refuse_unread(self, conversation: Conversation, read: frozenset[str]) -> None:
        """What the template does not read would have no effect. Tools have one: calls of them are parsed."""
        if conversation.documents and "documents" not in read:
            raise _unread("documents", "has no place for documents; put their text into a message")
        switched = bool(read.intersection(_THINKING))
        for key, value in conversation.template_options.items():
            if key in read or (key in _THINKING and switched) or key in _RESERVED_OPTIONS:
                continue
            if key not in _THINKING:
                raise _unread(f"template_options.{key}", "does not read it; leave it out")
            if (value not in _WITHOUT_THINKING) is not self._reasons:
                always = "always reasons" if self._reasons else "does not reason"
                raise _unread(
                    f"template_options.{key}",
                    f"has no switch for reasoning, and the model {always}; leave {', '.join(_THINKING)} out",
                )

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        for key in conversation.template_options:
            if key in _RESERVED_OPTIONS:
                raise invalid(
                    f"template option {key!r} is set by the service; remove it",
                    f"conversation.template_options.{key}",
                )
        protect = self._control.protect_value
        options = protect(conversation.template_options, allow_markup=False)
        tools = [
            protect(_tool_value(tool, index), allow_markup=False)
            for index, tool in enumerate(conversation.tools)
        ]
        documents = [protect(document, allow_markup=False) for document in conversation.documents]
        return {
            **self._special_tokens,
            **options,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": not conversation.continue_final_message,
        }

    def _message(self, message: Message, shape: _Shape) -> dict[str, Any]:
        # Past output legitimately carries markup such as <think>; what users and tools say does not.
        allow_markup = message.role in (Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER)
        protect = self._control.protect
        role = message.role
        if role is Role.DEVELOPER and not self._knows_developer:
            role = Role.SYSTEM
        value: dict[str, Any] = {
            "role": role.value,
            "content": protect(message.content, allow_markup=allow_markup),
        }
        if message.name:
            value["name"] = protect(message.name, allow_markup=False)
        if message.tool_call_id:
            value["tool_call_id"] = protect(message.tool_call_id, allow_markup=False)
        if message.reasoning:
            reasoning = protect(message.reasoning, allow_markup=True)
            value.update(dict.fromkeys(_REASONING_NAMES, reasoning))
        if message.tool_calls:
            value["tool_calls"] = [
                {
                    "id": protect(call.id, allow_markup=False),
                    "type": "function",
                    "function": {
                        "name": protect(call.name, allow_markup=False),
                        "arguments": self._arguments(call.arguments_json, shape),
                    },
                }
                for call in message.tool_calls
            ]
            if not message.content:
                shape.apply_empty_content(value)
        return value

    def _arguments(self, arguments_json: str, shape: _Shape) -> Any:
        if not shape.arguments_as_text:
            try:
                return self._control.protect_value(json.loads(arguments_json or "{}"), allow_markup=False)
            except ValueError:
                pass
        return self._control.protect(arguments_json, allow_markup=False)

    def _run(
        self, template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str:
        limits = self._limits
        deadline = time.monotonic() + limits.max_render_s
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(messages=messages, **variables):
                pieces.append(piece)
                size += len(piece)
                if size > limits.max_rendered_bytes:
                    most = f"writes more than {limits.max_rendered_bytes} bytes"
                    raise _failed(f"the chat template {most}; shorten the conversation")
                if time.monotonic() > deadline:
                    most = f"takes longer than {limits.max_render_s:g} s"
                    raise _failed(f"the chat template {most}; shorten the conversation")
        except MillraceError:
            raise
        except Exception as error:
            text = str(error).replace(self._control.mark, "") or type(error).__name__
            raise _failed(f"the model's chat template refuses this conversation: {text}") from error
        return "".join(pieces)

    def _run_continuing(
        self, template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str:
        # A tag after the last message shows where it ends in the output; white space after the tag shows
        # whether the template trims messages.
        tag = self._control.mark * 2 + " "
        if not messages:
            raise invalid("there is no final message to continue", "messages")
        messages[-1]["content"] = (messages[-1]["content"] or "") + tag
        rendered = self._run(template, messages, variables)
        found = rendered.rfind(tag.strip())
        if found < 0:
            raise _failed(
                "the model's chat template does not write the final message as it is, so it cannot be "
                "continued; unset continue_final_message",
                "conversation.continue_final_message",
            )
        kept = rendered[:found]
        return kept if rendered[found:].startswith(tag) else kept.rstrip()


def _failed(message: str, field: str = "messages") -> MillraceError:
    return MillraceError(Reason.TEMPLATE_FAILED, message, field=field)


def _unread(field: str, problem: str) -> MillraceError:
    name = f"conversation.{field}"
    return MillraceError(Reason.UNSUPPORTED_FIELD, f"{name}: the model's chat template {problem}", field=name)


def _tool_value(tool: Tool, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    parameters = _tool_parameters(tool, index)
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _tool_parameters(tool: Tool, index: int) -> dict[str, Any] | None:
    """The JSON Schema of a tool's arguments; raises INVALID_ARGUMENT for what is no JSON object."""
    if not tool.parameters_json:
        return None
    field, what = f"tools[{index}].function.parameters", f"the schema of tool {index}'s arguments"
    try:
        parameters = json.loads(tool.parameters_json)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is not JSON: {error}", field) from error
    if not isinstance(parameters, dict):
        raise invalid(f"{what} must be a JSON object", field)
    return parameters
