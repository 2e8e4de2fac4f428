"""Chat templates: the checkpoint's own Jinja, in a sandbox, rendering what `transformers` renders."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2 import meta, nodes

from contract.chat import Conversation, Message, Role, Tool, ToolCall
from contract.efforts import EFFORT
from contract.errors import MillraceError, Reason
from contract.formats import REASONING, ReasoningForm
from runtime.errors import ConfigError
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.refusals import invalid
from tokenizer_svc.text import sandbox
from tokenizer_svc.text.checkpoint import DEFAULT_TEMPLATE
from tokenizer_svc.text.encoding import ControlTokens
from tokenizer_svc.text.tool_values import call_arguments, completed, resolved, tool_value, with_naming_ids
from tokenizer_svc.text.turns import Turns, absent, all_written, missing, other_ways

# Names under which templates look for an assistant turn's reasoning.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TOOL_TEMPLATE = "tool_use"
# Names under which templates look for whether, and how much, the model thinks. Gateways set all of them.
_THINKING = ("enable_thinking", "thinking", EFFORT)
_WITHOUT_THINKING = (False, "none")
_OPENINGS = tuple(form.open.rstrip() for form in REASONING.values())
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# Templates write far less than this after the last control token.
_TAIL_CHARACTERS = 4096


def without_thinking(options: Mapping[str, Any]) -> bool:
    """Whether template options ask for an answer without thoughts."""
    return any(options.get(key, True) in _WITHOUT_THINKING for key in _THINKING)


class TemplateRefusal(MillraceError):
    """A template does not take a conversation, or leaves a part of it out: another form of it may do."""


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How a template wants calls, their arguments, and the missing content of turns with them."""

    writes_calls: bool = True
    arguments_as_text: bool = False
    objects_only: bool = False
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
        environment = sandbox.environment()
        self._templates: dict[str, jinja2.Template] = {}
        # Variables that each template reads.
        self._read: dict[str, frozenset[str]] = {}
        # Templates that tell developers from others.
        self._developers: set[str] = set()
        for name, source in templates.items():
            try:
                template = environment.from_string(source)
                # Jinja keeps them as a ChainMap and copies that for each rendering, name by name in Python.
                template.globals = dict(template.globals)
                self._templates[name] = template
                tree = environment.parse(source)
                self._read[name] = frozenset(meta.find_undeclared_variables(tree))
                if _compares_with(tree, "developer"):
                    self._developers.add(name)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}; correct it, or give "
                    "another one with --chat-template FILE (model.chat_template)"
                ) from error
        self._special_tokens = dict(special_tokens)
        self._control = control
        self._limits = limits
        source = "\n".join(templates.values())
        self._reasons = any(form.close in source for form in REASONING.values())
        self._shape = self._find_shape()
        self._names_by_id = self._find_ids()
        # Templates that write tools field by field and not as JSON.
        self._reading_fields = frozenset(name for name in templates if not self._dumps_tools(name))
        # Roles of messages whose name each template does not write, as far as a trial shows.
        self._nameless = {name: self._find_nameless(name) for name in self._templates}
        # Whether the model thinks only where a client asks for it: then the template opens the thoughts.
        self.thinks_when_asked = self._find_switch()
        # Whether the default template writes what users say as it is, as far as a trial shows.
        self.writes_user_turns = self._find_user_turns()

    def render(self, conversation: Conversation) -> str:
        """The prompt as text, with markers (see `control`) in what the client wrote.

        Raises TEMPLATE_FAILED when there is no such template or it refuses the conversation.
        """
        name = self._choose(conversation)
        self._refuse_unread(conversation, self._read[name])
        self._refuse_names(conversation, self._nameless[name])
        rendering = _Rendering(
            self._templates[name],
            [self._message(each, self._shape, name) for each in self._known_calls(conversation.messages)],
            self._variables(conversation, reading_fields=name in self._reading_fields),
            self._run,
            time.monotonic() + self._limits.max_render_s,
        )
        if conversation.continue_final_message:
            rendering.tag = self._control.mark * 2 + " "
        return rendering.prompt()

    def _known_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        called = self._names_by_id and any(message.tool_calls for message in messages)
        return with_naming_ids(messages) if called else messages

    def _find_ids(self) -> bool:
        """Whether the default template writes a call's id and not its name."""
        call = ToolCall(id="abcdefghi", name="probe_name", arguments_json="{}")
        turns = (Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, tool_calls=(call,)))
        template = self._templates.get(_TOOL_TEMPLATE, self._templates.get(DEFAULT_TEMPLATE))
        variables = self._variables(Conversation(messages=turns))
        text = self._tried(template, turns, self._shape, variables) if template is not None else ""
        return "abcdefghi" in (text or "") and "probe_name" not in (text or "")

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
                text = self._tried(template, messages, shape, variables)
                if text and '"probe_key": "probe_value"' in text and "None" not in text:
                    return self._with_odd_arguments(template, messages, shape, variables)
        shape = _Shape()
        text = self._tried(template, messages, shape, variables)
        if text is None or "probe_name" in text:
            return self._with_odd_arguments(template, messages, shape, variables)
        return _Shape(writes_calls=False)

    def _with_odd_arguments(
        self, template: jinja2.Template, messages: Sequence[Message], shape: _Shape, variables: dict[str, Any]
    ) -> _Shape:
        """The shape, with objects only where the template refuses or loses arguments that are none."""
        question, calling, *rest = messages
        lost = False
        for odd in ('"odd_probe"', '["odd_probe"]', "70707", "null"):
            call = msgspec.structs.replace(calling.tool_calls[0], arguments_json=odd)
            tried = (question, msgspec.structs.replace(calling, tool_calls=(call,)), *rest)
            text = self._tried(template, tried, shape, variables)
            lost = lost or text is None or (odd != "null" and odd.strip('[]"') not in text)
        return msgspec.structs.replace(shape, objects_only=lost and not shape.arguments_as_text)

    def _tried(
        self,
        template: jinja2.Template,
        messages: Sequence[Message],
        shape: _Shape,
        variables: dict[str, Any],
    ) -> str | None:
        """What the template makes of a trial; None when it refuses it."""
        try:
            return self._run(template, [self._message(each, shape) for each in messages], variables)
        except MillraceError:
            return None

    def _dumps_tools(self, name: str) -> bool:
        """Whether the template writes a tool's schema whole, so that the model reads what is referred to."""
        schema = (
            '{"type": "object", "properties": {"probe": {"$ref": "#/$defs/probe_type"}}, '
            '"$defs": {"probe_type": {"type": "integer", "description": "probe_text"}}}'
        )
        question = (Message(role=Role.USER, content="q"),)
        tool = Tool(name="probe_name", description="d", parameters_json=schema)
        variables = self._variables(Conversation(messages=question, tools=(tool,)))
        written = self._tried(self._templates[name], question, self._shape, variables)
        return written is not None and "probe_text" in written

    def _find_switch(self) -> bool:
        template = self._templates.get(DEFAULT_TEMPLATE)
        if template is None:
            return False
        question = (Message(role=Role.USER, content="q"),)
        variables = self._variables(Conversation(messages=question))
        plain = self._tried(template, question, self._shape, variables) or ""
        switches = {"enable_thinking": True, "thinking": True}
        asked = self._tried(template, question, self._shape, variables | switches) or ""
        return asked != plain and asked.rstrip().endswith(_OPENINGS)

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
            rendered = self._tried(self._templates[template], messages, self._shape, variables)
            # None: not a conversation for this template, so nothing is known.
            if rendered and "probe" in rendered and "probe_name" not in rendered:
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

    def _variables(self, conversation: Conversation, *, reading_fields: bool = False) -> dict[str, Any]:
        for key in conversation.template_options:
            if key in _RESERVED_OPTIONS:
                raise invalid(
                    f"template option {key!r} is set by the service; remove it",
                    f"conversation.template_options.{key}",
                )
        protect = self._control.protect_value
        options = protect(conversation.template_options, allow_markup=False)
        tools = [tool_value(tool, index) for index, tool in enumerate(conversation.tools)]
        if reading_fields:
            tools = [resolved(tool) for tool in tools]
        tools = [protect(tool, allow_markup=False) for tool in tools]
        documents = [protect(document, allow_markup=False) for document in conversation.documents]
        return {
            **self._special_tokens,
            **options,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": not conversation.continue_final_message,
        }

    def _message(self, message: Message, shape: _Shape, template: str = DEFAULT_TEMPLATE) -> dict[str, Any]:
        # Past output legitimately carries markup such as <think>; what users and tools say does not.
        allow_markup = message.role in (Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER)
        protect = self._control.protect
        role = message.role
        if role is Role.DEVELOPER and template not in self._developers:
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
        if message.tool_calls and not shape.writes_calls:
            calls = [self._call_as_text(call) for call in message.tool_calls]
            value["content"] = "\n".join([value["content"], *calls]).lstrip("\n")
        elif message.tool_calls:
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

    def _call_as_text(self, call: ToolCall) -> str:
        """A call for templates that write none: the form that most models know."""
        arguments = call_arguments(call.arguments_json, objects_only=False)
        value = self._control.protect_value({"name": call.name, "arguments": arguments}, allow_markup=False)
        return f"<tool_call>\n{sandbox.to_json(value)}\n</tool_call>"

    def _arguments(self, arguments_json: str, shape: _Shape) -> Any:
        if shape.arguments_as_text:
            return self._control.protect(arguments_json, allow_markup=False)
        arguments = call_arguments(arguments_json, objects_only=shape.objects_only)
        return self._control.protect_value(arguments, allow_markup=False)

    def _run(
        self,
        template: jinja2.Template,
        turns: Turns,
        variables: dict[str, Any],
        deadline_s: float | None = None,
    ) -> str:
        limits = self._limits
        deadline_s = deadline_s or time.monotonic() + limits.max_render_s
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(messages=turns, **variables):
                pieces.append(piece)
                size += len(piece)
                if size > limits.max_rendered_bytes:
                    most = f"writes more than {limits.max_rendered_bytes} bytes"
                    raise _failed(f"the chat template {most}; shorten the conversation")
                if time.monotonic() > deadline_s:
                    most = f"takes longer than {limits.max_render_s:g} s"
                    raise _failed(f"the chat template {most}; shorten the conversation")
        except MillraceError:
            raise
        except Exception as error:
            text = str(error).replace(self._control.mark, "") or type(error).__name__
            message = f"the model's chat template refuses this conversation: {text}"
            raise TemplateRefusal(Reason.TEMPLATE_FAILED, message, field="messages") from error
        text = "".join(pieces)
        # JSON inside of texts, as of a call that was cut off, can spell half a pair. No encoding has that.
        return text if text.isascii() else _HALF_PAIR.sub("\ufffd", text)


class _Rendering:
    """One conversation on its way through one template."""

    # Follows the final message's text where that is to be continued.
    tag = ""

    def __init__(
        self,
        template: jinja2.Template,
        turns: Turns,
        variables: dict[str, Any],
        run: Callable[[jinja2.Template, Turns, dict[str, Any], float], str],
        deadline_s: float,
    ) -> None:
        self._template = template
        self._turns = turns
        self._variables = variables
        self._run = run
        self._deadline_s = deadline_s

    def prompt(self) -> str:
        """The first form of the conversation that the template writes with all that is said in it. Raises why
        it does not write the conversation as it is, when there is none.
        """
        try:
            return self._written(self._turns)
        except TemplateRefusal as error:
            refusal = error
        for turns in self._other_ways():
            with contextlib.suppress(TemplateRefusal):
                return self._written(turns)
        raise refusal

    def _other_ways(self) -> Iterator[Turns]:
        tools = self._variables["tools"]
        if tools:
            self._variables["tools"] = [completed(tool) for tool in tools]
            yield self._turns
        yield from other_ways(self._turns)

    def _written(self, turns: Turns) -> str:
        text = self._text(turns)
        if all_written(turns, text):
            return text
        try:
            unwritten = missing(turns, self._text)
        except TemplateRefusal:
            # It reads what texts say: another text shows nothing.
            unwritten = absent(turns, text)
        if unwritten:
            index, role = unwritten[0], turns[unwritten[0]]["role"]
            raise TemplateRefusal(
                Reason.TEMPLATE_FAILED,
                f"messages[{index}]: the model's chat template leaves out what this {role} message says; "
                "remove the message, or put its text into a user message",
                field=f"messages[{index}]",
            )
        return text

    def _text(self, turns: Turns) -> str:
        if not self.tag:
            return self._run(self._template, turns, self._variables, self._deadline_s)
        # The tag shows where the last message ends in the output; white space after the tag shows whether the
        # template trims messages.
        if not turns:
            raise invalid("there is no final message to continue", "messages")
        final = turns[-1] | {"content": (turns[-1]["content"] or "") + self.tag}
        rendered = self._run(self._template, [*turns[:-1], final], self._variables, self._deadline_s)
        found = rendered.rfind(self.tag.strip())
        if found < 0:
            raise _failed(
                "the model's chat template does not write the final message as it is, so it cannot be "
                "continued; unset continue_final_message",
                "conversation.continue_final_message",
            )
        kept = rendered[:found]
        return kept if rendered[found:].startswith(self.tag) else kept.rstrip()


def _compares_with(source: nodes.Template, text: str) -> bool:
    """Whether a template has the text outside of what it writes and of its comments."""
    return any(text == each.value for each in source.find_all(nodes.Const))


def _failed(message: str, field: str = "messages") -> MillraceError:
    return MillraceError(Reason.TEMPLATE_FAILED, message, field=field)


def _unread(field: str, problem: str) -> MillraceError:
    name = f"conversation.{field}"
    return MillraceError(Reason.UNSUPPORTED_FIELD, f"{name}: the model's chat template {problem}", field=name)


def assistant_prefix(rendered: str, control_tokens: Collection[str], tags: ReasoningForm) -> str:
    """What the template wrote of the assistant's turn from the reasoning tag on, for output parsers.

    Only the text after the last control token counts, which is the template's own. Where a template has no
    control tokens, the tag must be the very end.
    """
    tail, opens = rendered[-_TAIL_CHARACTERS:], tags.open.rstrip()
    if opens not in tail:
        return ""
    # Tags of thoughts may be control tokens themselves.
    last = (token for token in control_tokens if token in tail and token not in opens + tags.close)
    start = max((tail.rfind(token) + len(token) for token in last), default=-1)
    if start < 0:
        start = len(tail) - len(opens) - 1 if tail.rstrip().endswith(opens) else len(tail)
    found = tail.find(opens, start)
    return tail[found:] if found >= 0 else ""
