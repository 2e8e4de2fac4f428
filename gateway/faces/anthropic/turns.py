"""Turns of content blocks to the messages that a template renders."""

from __future__ import annotations

from collections.abc import Sequence

from contract.chat import Message, Role, ToolCall
from contract.errors import MillraceError, invalid, unsupported
from gateway.faces.anthropic.bodies import ContentBlock, TurnBody
from gateway.faces.anthropic.thoughts import Thoughts

# A block with the name of its field.
Placed = tuple[str, ContentBlock]

# Beginning of the ids of tool calls at this API; the model's own id follows.
TOOL_ID = "toolu_"
# Blocks that a warning names.
_NAMED = 8
_SERVED = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_BY_ROLE = {
    Role.SYSTEM: ("text",),
    Role.USER: ("text", "tool_result"),
    Role.ASSISTANT: ("text", "tool_use", "thinking", "redacted_thinking"),
}


class TurnReader:
    """Reads turns one after another. Consecutive ones of one role are one, as the API has it."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._call_ids: set[str] = set()
        # Blocks of other servers.
        self._unread: list[str] = []

    @property
    def warnings(self) -> list[str]:
        """What was not read of the turns so far."""
        if not self._unread:
            return []
        more = len(self._unread) - _NAMED
        named = ", ".join(self._unread[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return [f"thinking that this deployment has not signed has no effect: {named}"]

    def messages(self, turns: Sequence[TurnBody]) -> list[Message]:
        """The messages; raises INVALID_ARGUMENT or UNSUPPORTED_FIELD for the first block that is at fault."""
        found: list[Message] = []
        for role, blocks in _merged(turns):
            if role is Role.ASSISTANT:
                found.append(self._assistant(blocks))
            else:
                found += self._others(role, blocks)
        return found

    def _others(self, role: Role, blocks: Sequence[Placed]) -> list[Message]:
        """What the user or the system says, and the results of tools, in their order."""
        found: list[Message] = []
        texts: list[str] = []
        for field, block in blocks:
            _check_type(role, field, block)
            if block.type == "text":
                texts.append(_given(block.text, f"{field}.text"))
                continue
            if texts:
                found.append(Message(role=role, content=_paragraphs(texts)))
                texts = []
            found.append(self._result(field, block))
        if texts:
            found.append(Message(role=role, content=_paragraphs(texts)))
        return found

    def _result(self, field: str, block: ContentBlock) -> Message:
        call_id = _given(block.tool_use_id, f"{field}.tool_use_id")
        if call_id not in self._call_ids:
            problem = f"no tool_use block before it has the id {call_id[:80]!r}; send the call, too"
            raise invalid(f"{field}.tool_use_id", problem)
        text = content_text(block.content or "", f"{field}.content")
        if block.is_error:
            text = f"Error: {text}"
        return Message(role=Role.TOOL, content=text, tool_call_id=_own_id(call_id))

    def _assistant(self, blocks: Sequence[Placed]) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for field, block in blocks:
            _check_type(Role.ASSISTANT, field, block)
            match block.type:
                case "text":
                    texts.append(_given(block.text, f"{field}.text"))
                case "tool_use":
                    calls.append(self._call(field, block))
                case "thinking":
                    thoughts.append(self._thought(field, block))
                case _:
                    self._unread.append(field)
        return Message(
            role=Role.ASSISTANT,
            content="".join(texts),
            tool_calls=tuple(calls),
            reasoning=_paragraphs(list(filter(None, thoughts))),
        )

    def _call(self, field: str, block: ContentBlock) -> ToolCall:
        call_id, name = _given(block.id, f"{field}.id"), _given(block.name, f"{field}.name")
        arguments = bytes(block.input)
        if not arguments.startswith(b"{"):
            raise invalid(f"{field}.input", "it is an object with the call's arguments")
        self._call_ids.add(call_id)
        return ToolCall(_own_id(call_id), name, arguments.decode())

    def _thought(self, field: str, block: ContentBlock) -> str:
        if block.thinking is None:
            raise invalid(f"{field}.thinking", "it is required")
        thought = self._thoughts.read(block.thinking, block.signature or "", f"{field}.signature")
        if thought is None:
            self._unread.append(field)
        return thought or ""


def content_text(content: str | Sequence[ContentBlock], field: str) -> str:
    """Text of content that may have nothing else."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        _check_type(Role.SYSTEM, f"{field}[{index}]", block)
        texts.append(_given(block.text, f"{field}[{index}].text"))
    return _paragraphs(texts)


def _merged(turns: Sequence[TurnBody]) -> list[tuple[Role, list[Placed]]]:
    found: list[tuple[Role, list[Placed]]] = []
    for index, turn in enumerate(turns):
        field = f"messages[{index}]"
        if turn.role not in _BY_ROLE:
            problem = f"{turn.role[:80]!r} is not one of user, assistant, system"
            raise invalid(f"{field}.role", problem)
        role, content = Role(turn.role), turn.content
        if isinstance(content, str):
            blocks = [(f"{field}.content", ContentBlock("text", content))]
        else:
            blocks = [(f"{field}.content[{number}]", block) for number, block in enumerate(content)]
        if not blocks:
            # An answer may have none, and is then sent back without.
            if role is Role.ASSISTANT:
                continue
            raise invalid(f"{field}.content", "it has no blocks; give at least one")
        if found and found[-1][0] is role:
            found[-1][1].extend(blocks)
        else:
            found.append((role, blocks))
    return found


def _check_type(role: Role, field: str, block: ContentBlock) -> None:
    if block.type in _BY_ROLE[role]:
        return
    problem = f"{block.type[:80]!r} is not supported"
    remedy = "the model reads text only"
    if block.type in _SERVED:
        problem, remedy = f"{block.type!r} has no place here", f"use {', '.join(_BY_ROLE[role])}"
    raise unsupported(f"{field}.type", remedy, problem)


def _given(value: str | None, field: str) -> str:
    if value is None or (not value and not field.endswith(".text")):
        raise invalid(field, "it is required")
    return value


def _paragraphs(texts: Sequence[str]) -> str:
    """Blocks are apart: a word that ends one and a word that begins the next are two."""
    return "\n\n".join(texts)


def _own_id(call_id: str) -> str:
    """The id that the model's template knows: some take no other than those that its calls have."""
    return call_id.removeprefix(TOOL_ID)


def unanswered(messages: Sequence[Message]) -> MillraceError | None:
    """What is wrong with a conversation that ends with calls whose results are missing."""
    if messages and messages[-1].tool_calls:
        problem = "the last message calls tools; send their tool_result blocks in a user message"
        return invalid("messages", problem)
    return None
