"""A message as one body or as server-sent events: the same blocks either way.

A stream has one block open at a time. Its events are written with little work per token: of those of a text
all but the text is encoded once a block.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.chat import MESSAGE_ID
from contract.outputs import FinishReason
from gateway.faces.anthropic import answer_types as answers
from gateway.faces.anthropic.thoughts import Thoughts
from gateway.faces.anthropic.turns import TOOL_ID
from gateway.faces.retention import kv_usage
from gateway.faces.timings import timings
from gateway.pipeline.delta import AnswerInfo, ChoiceDelta, Usage
from gateway.text.delta import TextDelta, TextPart, ThoughtPart, ToolCallDelta
from gateway.text.tool_calls.json_call import JsonValue

_encode = msgspec.json.Encoder().encode
# Deltas of which nothing is sent, after which a ping is: neither the client nor a proxy takes silence for an
# end.
_SILENT_DELTAS = 32
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
# Ours are other words for the first letters that the API's ids have.
_OUR_TOOL_ID = "call_"


class MessageWriter:
    """Writes one message; either `begin`, `events` and `end`, or `body`."""

    def __init__(
        self,
        info: AnswerInfo,
        *,
        tier: str,
        max_tokens: int,
        thoughts: Thoughts,
        shows_thinking: bool = True,
        eager_tools: Collection[str] = (),
        tells_timing: bool = False,
    ) -> None:
        """`tier` is what the API calls the tier that serves, `max_tokens` what was asked for; `eager_tools`
        have their arguments sent as they come. `tells_timing` adds where the time went at the end.
        """
        self._info = info
        self._left_out = info.left_out or msgspec.UNSET
        self._tier = tier
        self._max_tokens = max_tokens
        self._thoughts = thoughts
        self._shows_thinking = shows_thinking
        self._eager_tools = eager_tools
        self._tells_timing = tells_timing
        self._index = -1
        # Type of the block that is open; "" for none.
        self._open = ""
        self._call_index = -1
        self._is_eager = False
        # JSON before and behind a piece of the open block.
        self._frame = (b"", b"")
        # Text of the open block that is needed at its end: thoughts to be signed, arguments to be checked.
        self._kept: list[str] = []
        # White space that is sent if text follows it: no block begins with it alone.
        self._blank = ""
        self._num_silent = 0
        self._end = ChoiceDelta()

    def begin(self, usage: Usage) -> bytes:
        """The events before the first delta."""
        message = self._message([], None, None, usage)
        return _event(answers.MessageStart(message)) + _PING

    def events(self, delta: ChoiceDelta) -> bytes:
        """The events of a delta."""
        if delta.finish_reason is not None:
            self._end = delta
        parts: list[bytes] = []
        for part in delta.runs():
            match part:
                case ThoughtPart(text):
                    self._think(text, parts)
                case TextPart(text):
                    self._say(text, parts)
                case ToolCallDelta():
                    self._call(part, parts)
        self._num_silent = 0 if parts else self._num_silent + 1
        if self._num_silent >= _SILENT_DELTAS:
            self._num_silent = 0
            return _PING
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """The events behind the last delta."""
        parts: list[bytes] = []
        self._close(parts)
        ended = answers.MessageEnd(*self._stopped(self._end, usage))
        timing = timings(usage, asked=self._tells_timing)
        told = answers.MessageDelta(ended, self._usage(usage), self._left_out, timing)
        parts += (_event(told), _STOP)
        return b"".join(parts)

    def body(self, gathered: ChoiceDelta, usage: Usage) -> bytes:
        """A whole message, of which the delta has everything."""
        # No block is white space alone, and what is around it is one.
        told = TextDelta(
            [each for each in gathered.runs() if type(each) is not TextPart or each.text.strip()]
        )
        blocks: list[answers.AnswerBlock] = []
        for part in told.runs():
            match part:
                case ThoughtPart(text):
                    shown = text if self._shows_thinking else ""
                    blocks.append(answers.ThinkingAnswer(shown, self._signature(text)))
                case TextPart(text):
                    blocks.append(answers.TextAnswer(text))
                case ToolCallDelta():
                    block = answers.ToolUseAnswer(_tool_id(part), part.name, as_input(part.arguments))
                    blocks.append(block)
        message = self._message(blocks, *self._stopped(gathered, usage), usage)
        return _encode(replace(message, timing=timings(usage, asked=self._tells_timing)))

    def _message(
        self,
        blocks: list[answers.AnswerBlock],
        reason: answers.StopReason | None,
        sequence: str | None,
        usage: Usage,
    ) -> answers.MessageAnswer:
        return answers.MessageAnswer(
            id=f"{MESSAGE_ID}{self._info.request_id}",
            model=self._info.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(usage),
            left_out=self._left_out,
        )

    def _usage(self, usage: Usage) -> answers.MessageUsage:
        cached = min(usage.cached_prompt_tokens, usage.prompt_tokens)
        return answers.MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.billed_tokens,
            output_tokens_details=answers.ThoughtTokens(usage.reasoning_tokens),
            service_tier="standard" if self._tier == "default" else self._tier,
            test_time=usage.deliberated or msgspec.UNSET,
            kv=kv_usage(usage),
        )

    def _stopped(self, end: ChoiceDelta, usage: Usage) -> tuple[answers.StopReason, str | None]:
        if end.stop_reason is not None:
            return "stop_sequence", end.stop_reason
        match end.finish_reason:
            case FinishReason.TOOL_CALLS:
                return "tool_use", None
            case FinishReason.LENGTH if usage.completion_tokens < self._max_tokens:
                return "model_context_window_exceeded", None
            case FinishReason.LENGTH | FinishReason.BUDGET:
                # The API has no word for a budget that ended: the answer is cut as by max_tokens.
                return "max_tokens", None
            case _:
                return "end_turn", None

    def _signature(self, thought: str) -> str:
        return self._thoughts.sign(thought, shown=self._shows_thinking)

    def _think(self, text: str, parts: list[bytes]) -> None:
        if self._open != "thinking":
            self._start(answers.ThinkingAnswer("", ""), b'"thinking_delta","thinking":', parts)
        self._kept.append(text)
        if self._shows_thinking:
            self._piece(text, parts)

    def _say(self, text: str, parts: list[bytes]) -> None:
        if self._open != "text":
            text, self._blank = self._blank + text, ""
            if text.isspace():
                self._blank = text
                return
            self._start(answers.TextAnswer(""), b'"text_delta","text":', parts)
        self._piece(text, parts)

    def _call(self, call: ToolCallDelta, parts: list[bytes]) -> None:
        if self._open == "tool_use" and call.index == self._call_index:
            self._argue(call.arguments, parts)
            return
        block = answers.ToolUseAnswer(_tool_id(call), call.name, {})
        self._start(block, b'"input_json_delta","partial_json":', parts)
        self._call_index, self._is_eager = call.index, call.name in self._eager_tools
        self._argue(call.arguments, parts)

    def _argue(self, text: str, parts: list[bytes]) -> None:
        if not text:
            return
        if self._is_eager:
            self._piece(text, parts)
        else:
            self._kept.append(text)

    def _start(self, block: answers.AnswerBlock, piece: bytes, parts: list[bytes]) -> None:
        self._close(parts)
        self._index += 1
        self._open = block.__struct_config__.tag  # type: ignore[assignment]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
        self._frame = (head % self._index + piece, b"}}\n\n")
        self._blank = ""
        parts.append(_event(answers.BlockStart(self._index, block)))

    def _piece(self, text: str, parts: list[bytes]) -> None:
        before, after = self._frame
        parts.append(before + _encode(text) + after)

    def _close(self, parts: list[bytes]) -> None:
        """Ends the open block, with what is said of it at its end."""
        kept, self._kept = "".join(self._kept), []
        if not self._open:
            return
        if self._open == "thinking":
            parts.append(
                _event(answers.BlockDelta(self._index, answers.SignaturePiece(self._signature(kept))))
            )
        elif self._open == "tool_use" and kept.strip():
            self._piece(kept if _object(kept) is not None else _encode(as_input(kept)).decode(), parts)
        parts.append(_event(answers.BlockStop(self._index)))
        self._open = ""


def as_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; of those that are cut or broken the members before that, which are whole."""
    written, comma = arguments.strip(), _last_comma(arguments.strip())
    # Another value than a text, an object or a list may go on.
    whole = f"{written}}}" if written.endswith(('"', "}", "]")) else ""
    for text in (written, whole, f"{written[:comma]}}}" if comma else ""):
        if (value := _object(text)) is not None:
            return value
    return {}


def _last_comma(written: str) -> int:
    """Where the last comma between members of the object stands; 0 where there is none."""
    comma, members = 0, JsonValue()
    for position, character in enumerate(written if written.startswith("{") else ""):
        if members.feed(character)[1]:
            break
        if character == "," and members.is_between_members:
            comma = position
    return comma


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tool_id(call: ToolCallDelta) -> str:
    return TOOL_ID + call.id.removeprefix(_OUR_TOOL_ID)


def _event(event: answers.MessageEvent) -> bytes:
    name = str(event.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _encode(event) + b"\n\n"
