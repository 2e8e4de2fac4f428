"""What was said, for operators who want it on traces (`observability.capture_content`).

The form is that of the GenAI conventions: JSON lists of messages, each with a role and typed parts.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/

Each attribute is bounded: receivers refuse a batch beyond some MiB whole, with the spans of others in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from contract.chat import Conversation, Message, Prompt, PromptList, Role, TextPrompt
from contract.outputs import FinishReason
from gateway.pipeline.delta import ChoiceDelta
from gateway.text.delta import AnswerPart, TextPart, ThoughtPart, ToolCallDelta

# The conventions' own words; for other reasons our own names.
_FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.TOOL_CALLS: "tool_call",
    FinishReason.ERROR: "error",
}

# Longest attribute, as UTF-8.
MAX_BYTES = 64 * 1024
# Texts are cut to ever less; below this, messages and parts are left out.
_SHORTEST_TEXT = 128
_FEWEST_PARTS = 8


def asked(prompt: Prompt) -> str:
    """The prompt as `gen_ai.input.messages`; "" for token ids, which have no text here."""
    if isinstance(prompt, Conversation):
        return _json([{"role": message.role.value, "parts": _parts(message)} for message in prompt.messages])
    if isinstance(prompt, PromptList):
        texts = [each.text for each in prompt.prompts if isinstance(each, TextPrompt)]
        return _json([{"role": "user", "parts": [_text(text) for text in texts]}])
    if isinstance(prompt, TextPrompt):
        return _json([{"role": "user", "parts": [_text(prompt.text)]}])
    return ""


class Transcript:
    """The answers of one request, gathered from its deltas."""

    def __init__(self) -> None:
        self._choices: dict[int, ChoiceDelta] = {}

    def add(self, deltas: Iterable[ChoiceDelta]) -> None:
        """Takes in what is about to be sent."""
        for delta in deltas:
            said = self._choices.setdefault(delta.index, ChoiceDelta(index=delta.index))
            said.absorb_text(delta)
            said.finish_reason = delta.finish_reason

    def answered(self) -> str:
        """All choices as `gen_ai.output.messages`; one that was broken off ended with an error."""
        return _json(
            [
                {
                    "role": "assistant",
                    "parts": [_part(part) for part in said.runs()],
                    "finish_reason": _reason(said.finish_reason or FinishReason.ERROR),
                }
                for _, said in sorted(self._choices.items())
            ]
        )


def _reason(reason: FinishReason) -> str:
    return _FINISH_REASONS.get(reason, reason.name.lower())


def _parts(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
    calls = [
        ToolCallDelta(index, call.id, call.name, call.arguments_json)
        for index, call in enumerate(message.tool_calls)
    ]
    said: list[AnswerPart] = [ThoughtPart(message.reasoning), TextPart(message.content)]
    return [_part(part) for part in (*(each for each in said if each.text), *calls)]


def _part(part: AnswerPart) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return _text(text)
        case ThoughtPart(text):
            return {"type": "reasoning", "content": text}
        case ToolCallDelta():
            return {"type": "tool_call", "id": part.id, "name": part.name, "arguments": _arguments(part)}


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def _arguments(call: ToolCallDelta) -> Any:
    """As an object; as the text that the model wrote where that is no JSON."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


def _json(messages: list[dict[str, Any]]) -> str:
    """The messages in at most MAX_BYTES: long texts are cut first, then those in the middle are left out."""
    length = MAX_BYTES
    while length >= _SHORTEST_TEXT:
        cut = [_cut(message, length) for message in messages]
        text = json.dumps(cut, ensure_ascii=False)
        if _num_bytes(text) <= MAX_BYTES:
            return text
        length //= 2
    return json.dumps(_fewer([_fewer_parts(message) for message in cut]), ensure_ascii=False)


def _cut(message: dict[str, Any], length: int) -> dict[str, Any]:
    parts = [{key: _cut_value(value, length) for key, value in part.items()} for part in message["parts"]]
    return {**message, "parts": parts}


def _cut_value(value: Any, length: int) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= length:
        return value
    return f"{text[:length]}... [cut: {len(text)} characters]"


def _fewer_parts(message: dict[str, Any]) -> dict[str, Any]:
    parts = message["parts"]
    if len(parts) <= _FEWEST_PARTS:
        return message
    marker = _text(f"[cut: {len(parts) - _FEWEST_PARTS} more parts]")
    return {**message, "parts": [*parts[:_FEWEST_PARTS], marker]}


def _fewer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first message, which often says what all are about, and as many of the last as fit."""
    first, *others = messages
    marker = {**first, "parts": [*first["parts"], _text(f"[cut: {len(others)} more messages]")]}
    space = MAX_BYTES - _num_bytes(json.dumps([marker], ensure_ascii=False))
    num_kept = 0
    for message in reversed(others):
        # Two for the comma and the space.
        space -= _num_bytes(json.dumps(message, ensure_ascii=False)) + 2
        if space < 0:
            break
        num_kept += 1
    num_left_out = len(others) - num_kept
    if not num_left_out:
        return messages
    marker["parts"][-1] = _text(f"[cut: {num_left_out} more messages]")
    return [marker, *others[num_left_out:]]


def _num_bytes(text: str) -> int:
    # A lone surrogate, which clients can send as JSON, is no UTF-8.
    return len(text.encode("utf-8", "surrogatepass"))
