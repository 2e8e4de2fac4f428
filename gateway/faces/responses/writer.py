"""From the deltas of an answer to the events of its stream and, at the end, to the resource.

The same writer makes both, so that a stream and a whole answer have the same items with the same ids. It
needs no HTTP exchange: whoever keeps events writes them with it, too. Ids derive from the request's, so that
what another gateway writes of the same answer has them, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from contract.errors import MillraceError
from contract.outputs import FinishReason, TokenLogprobs
from gateway.faces.logprobs import ChatLogprobs
from gateway.faces.responses.answer_types import (
    ID_PREFIXES,
    CustomToolCallItem,
    EventError,
    EventType,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from gateway.faces.responses.custom_input import CustomInput
from gateway.faces.responses.tools import Toolbox
from gateway.faces.retention import kv_usage
from gateway.faces.timings import timings
from gateway.pipeline.delta import ChoiceDelta, Usage
from gateway.text.delta import TextPart, ThoughtPart, ToolCallDelta
from gateway.text.detokenizer import Vocabulary

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_decode_data = msgspec.json.Decoder(dict[str, Any]).decode
_CUT = frozenset({FinishReason.LENGTH, FinishReason.BUDGET})
_Kind: TypeAlias = Literal["reasoning", "message", "function_call", "custom_tool_call"]


def response_id(request_id: str) -> str:
    """The id of the response to a request."""
    return f"resp_{request_id}"


def response_usage(usage: Usage) -> ResponseUsage:
    """Tokens as the resource tells them."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.billed_tokens,
        total_tokens=usage.prompt_tokens + usage.billed_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_prompt_tokens),
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        test_time=usage.deliberated or msgspec.UNSET,
        kv=kv_usage(usage),
    )


class _OpenItem:
    """The item that is written: its parts so far."""

    def __init__(self, kind: _Kind, index: int, item_id: str) -> None:
        self.kind: _Kind = kind
        self.index = index
        self.id = item_id
        self.texts: list[str] = []
        self.logprobs: list[bytes] = []
        # Of calls.
        self.call_index = -1
        self.fields: dict[str, Any] = {}
        self.reader = CustomInput() if kind == "custom_tool_call" else None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponseWriter:
    """Writes one response. `begin`, `event` for each delta, then `end` or `fail`; what they return are the
    bytes of a stream, nothing where the answer is asked for as a whole. `response` is the resource so far.
    """

    def __init__(
        self,
        response: Response,
        tools: Toolbox,
        *,
        streams: bool,
        vocabulary: Vocabulary | None = None,
        seal: Callable[[str], str] | None = None,
        shows_reasoning: bool = True,
        tells_timing: bool = False,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`response` is the resource in progress, without output. With a `vocabulary` texts have their
        log-probabilities; with `seal` thoughts have an `encrypted_content`, which is all
        of them unless it `shows_reasoning`. `tells_timing` adds where the time went to what is counted in the
        end. `now_s` is in Unix seconds.
        """
        self.response = response
        self.sequence_number = 0
        self._tools = tools
        self._streams = streams
        self._seal = seal
        self._shows_reasoning = shows_reasoning
        self._tells_timing = tells_timing
        self._now_s = now_s
        self._vocabulary = vocabulary
        self._pieces: dict[int, tuple[bytes, bytes]] = {}
        self._out: list[bytes] = []
        self._items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        # White space between items belongs to none of them until text follows; and what may belong to text.
        self._held = ""
        self._logprobs: list[TokenLogprobs] = []
        self._finish: FinishReason | None = None
        self._num_kept = 0

    def take_num_kept(self) -> int:
        """Bytes of log-probabilities that it has come to keep since it was asked before."""
        kept, self._num_kept = self._num_kept, 0
        return kept

    def begin(self) -> bytes:
        """The events before the first delta."""
        self._emit("response.created", response=self.response)
        self._emit("response.in_progress", response=self.response)
        return self._written()

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta: the items come in the order of its parts."""
        logprobs = [] if self._vocabulary is None else delta.logprobs
        if not delta.parts:
            self._logprobs += logprobs
        for part in delta.runs():
            match part:
                case ThoughtPart(text):
                    self._think(text)
                    self._logprobs.clear()
                case TextPart(text):
                    self._logprobs += logprobs
                    self._say(text)
                case ToolCallDelta():
                    self._call(part)
        self._finish = delta.finish_reason or self._finish
        return self._written()

    def conclude(self, usage: Usage) -> None:
        """Makes `response` what it is in the end."""
        is_cut = self._finish in _CUT
        speaks = any(not isinstance(each, ReasoningItem) for each in self._items)
        if self._open is None or self._open.kind == "reasoning":
            # An answer of nothing is an empty message.
            if self._held and not speaks:
                self._say_held()
            elif not speaks and not is_cut:
                self._begin("message")
        self._close("incomplete" if is_cut else "completed")
        self.response = replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else int(self._now_s()),
            output=self._items,
            **self.counted(usage),
        )

    def counted(self, usage: Usage | None) -> dict[str, Any]:
        """The fields of the resource that tell what it took; none of it where nothing was counted."""
        if usage is None:
            return {}
        return {"usage": response_usage(usage), "timing": timings(usage, asked=self._tells_timing)}

    def end(self) -> bytes:
        """The last events: of the item that is written, and of the response, which is concluded."""
        is_cut = self.response.status == "incomplete"
        self._emit("response.incomplete" if is_cut else "response.completed", response=self.response)
        return self._written() + (DONE if self._streams else b"")

    def fail(self, error: MillraceError, usage: Usage | None = None) -> bytes:
        """The last events of an answer that failed: what is there of it, and why."""
        self._close("incomplete")
        code, message = error.reason.openai_code, error.message
        self.response = replace(
            self.response,
            status="failed",
            error=ResponseError(code, message),
            output=self._items,
            **self.counted(usage),
        )
        param = error.field or None
        told = EventError(error.mapping.openai_type, code, message, param)
        self._emit("error", error=told, code=code, message=message, param=param)
        self._emit("response.failed", response=self.response)
        return self._written() + (DONE if self._streams else b"")

    def cancel(self, usage: Usage | None = None) -> bytes:
        """The last events of an answer that nobody wants any more, with what is there of it. The
        specification has no event for that: its stream ends as that of an incomplete one.
        """
        self._close("incomplete")
        self.response = replace(
            self.response,
            status="cancelled",
            output=self._items,
            **self.counted(usage),
        )
        self._emit("response.incomplete", response=self.response)
        return self._written() + (DONE if self._streams else b"")

    def take_up(self, written: Iterable[bytes]) -> None:
        """Goes on behind events that another writer has written."""
        for event in map(_decode_event, written):
            self.sequence_number = event["sequence_number"] + 1
            kind, item = event["type"], self._open
            if kind == "response.output_item.added":
                given = event["item"]
                item = self._open = _OpenItem(given["type"], event["output_index"], given["id"])
                names = ("call_id", "name", "namespace")
                item.fields = {name: given[name] for name in names if name in given}
                # Of thoughts that are not shown no part is begun.
                self._shows_reasoning = False
            elif kind == "response.content_part.added":
                self._shows_reasoning = True
            elif kind == "response.output_item.done":
                self._items.append(msgspec.convert(event["item"], OutputItem))
                self._open = None
            elif kind.endswith(".delta") and item is not None:
                item.texts.append(event["delta"])
                item.logprobs += map(_encode, event.get("logprobs", ()))

    # --- items ------------------------------------------------------------------------------------------

    def _think(self, text: str) -> None:
        item = self._item("reasoning")
        item.texts.append(text)
        if self._shows_reasoning:
            self._emit_of(item, "response.reasoning_text.delta", content_index=0, delta=text)

    def _say(self, text: str) -> None:
        text = self._held + text
        if (self._open is None or self._open.kind != "message") and not text.strip():
            self._held = text
            return
        self._held = text
        self._say_held()

    def _say_held(self) -> None:
        item, text, self._held = self._item("message"), self._held, ""
        logprobs: Any = []
        if self._vocabulary is not None:
            fresh = ChatLogprobs(self._vocabulary, self._pieces)
            self._num_kept += fresh.add(_of_text(self._logprobs, text, self._vocabulary))
            self._logprobs.clear()
            item.logprobs += fresh.parts
            logprobs = _list(fresh.parts)
        item.texts.append(text)
        self._emit_of(item, "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, piece: ToolCallDelta) -> None:
        self._held = ""
        self._logprobs.clear()
        item = self._open
        if item is None or item.call_index != piece.index:
            called = self._tools.called(piece.name)
            item = self._begin("custom_tool_call" if called.is_custom else "function_call", piece, called)
        if not piece.arguments:
            return
        if item.reader is None:
            item.texts.append(piece.arguments)
            self._emit_of(item, "response.function_call_arguments.delta", delta=piece.arguments)
        else:
            self._give(item, item.reader.feed(piece.arguments))

    def _give(self, item: _OpenItem, text: str) -> None:
        if text:
            item.texts.append(text)
            self._emit_of(item, "response.custom_tool_call_input.delta", delta=text)

    def _item(self, kind: _Kind) -> _OpenItem:
        """The open item, where it is of this kind, or a new one."""
        return self._open if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: _Kind, piece: ToolCallDelta | None = None, called: Any = None) -> _OpenItem:
        self._close("completed")
        index = len(self._items)
        item_id = f"{ID_PREFIXES[kind]}{self.response.id.removeprefix('resp_')}_{index}"
        item = self._open = _OpenItem(kind, index, item_id)
        if piece is not None:
            item.call_index = piece.index
            item.fields = {"call_id": piece.id, "name": called.name}
            if called.namespace:
                item.fields["namespace"] = called.namespace
        added = self._made(item, "in_progress")
        self._emit("response.output_item.added", output_index=index, item=added)
        if piece is None and (kind != "reasoning" or self._shows_reasoning):
            part = ReasoningText(text="") if kind == "reasoning" else OutputText(text="")
            self._emit_of(item, "response.content_part.added", content_index=0, part=part)
        return item

    def _close(self, status: ItemStatus) -> None:
        """Ends the item that is written; of several it is the last that an answer which is cut cuts."""
        item, self._open = self._open, None
        if item is None:
            return
        text = item.text
        match item.kind:
            case "reasoning" if not self._shows_reasoning:
                pass
            case "reasoning":
                self._emit_of(item, "response.reasoning_text.done", content_index=0, text=text)
                part: Any = ReasoningText(text=text)
                self._emit_of(item, "response.content_part.done", content_index=0, part=part)
            case "message":
                logprobs = _list(item.logprobs)
                self._emit_of(
                    item, "response.output_text.done", content_index=0, text=text, logprobs=logprobs
                )
                part = OutputText(text=text, logprobs=logprobs)
                self._emit_of(item, "response.content_part.done", content_index=0, part=part)
            case "function_call":
                name = item.fields["name"]
                self._emit_of(item, "response.function_call_arguments.done", name=name, arguments=text)
            case "custom_tool_call":
                assert item.reader is not None, "its input is read"
                self._give(item, item.reader.finish())
                self._emit_of(item, "response.custom_tool_call_input.done", input=item.text)
        done = self._made(item, status)
        self._items.append(done)
        self._emit("response.output_item.done", output_index=item.index, item=done)

    def _made(self, item: _OpenItem, status: ItemStatus) -> OutputItem:
        """The item as it is now."""
        begins, text = status == "in_progress", item.text
        match item.kind:
            case "reasoning":
                sealed = msgspec.UNSET if self._seal is None or begins else self._seal(text)
                hidden = begins or not self._shows_reasoning
                content = [] if hidden else [ReasoningText(text=text)]
                return ReasoningItem(id=item.id, content=content, encrypted_content=sealed, status=status)
            case "message":
                parts = [] if begins else [OutputText(text=text, logprobs=_list(item.logprobs))]
                return MessageItem(id=item.id, status=status, content=parts)
            case "function_call":
                return FunctionCallItem(id=item.id, status=status, arguments=text, **item.fields)
            case "custom_tool_call":
                return CustomToolCallItem(id=item.id, status=status, input=text, **item.fields)

    # --- events -----------------------------------------------------------------------------------------

    def _emit_of(self, item: _OpenItem, kind: EventType, **fields: Any) -> None:
        if self._streams:
            self._emit(kind, item_id=item.id, output_index=item.index, **fields)

    def _emit(self, kind: EventType, **fields: Any) -> None:
        if self._streams:
            event = ResponseEvent(type=kind, sequence_number=self.sequence_number, **fields)
            self._out.append(b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n")
            self.sequence_number += 1

    def _written(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)


def _decode_event(written: bytes) -> dict[str, Any]:
    return _decode_data(written.partition(b"data: ")[2])


def _of_text(logprobs: list[TokenLogprobs], text: str, vocabulary: Vocabulary) -> Sequence[TokenLogprobs]:
    """Those of the tokens that the text is made of: beside them stand markers, and the answer's end."""
    pieces = [vocabulary.token_bytes(each.token_id) for each in logprobs]
    wanted = text.encode("utf-8", "surrogatepass")
    begins = b"".join(pieces).rfind(wanted)
    if begins < 0:
        return list(logprobs)
    starts = accumulate(map(len, pieces), initial=0)
    ends = begins + len(wanted)
    return [
        each
        for each, piece, start in zip(logprobs, pieces, starts, strict=False)
        if start < ends and start + len(piece) > begins
    ]


def _list(parts: list[bytes]) -> Any:
    """A JSON array of written values."""
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
