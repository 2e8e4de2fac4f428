"""Server-sent events, written with little work per token: what does not change is encoded once per stream."""

from __future__ import annotations

from typing import Any

import msgspec

from contract.outputs import FinishReason, TokenLogprobs
from gateway.http.answers import (
    FINISH_REASONS,
    CompletionLogprobs,
    chat_logprobs,
    enforcement_body,
    head,
    tool_call_deltas,
)
from gateway.pipeline.delta import CHAT_ID, COMPLETION_ID, AnswerInfo, ChoiceDelta
from gateway.text.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_FINISH_JSON = {reason: _encode(text) for reason, text in FINISH_REASONS.items()}


class EventWriter:
    """Bytes of one stream's events. Frame: head, choices, tail; the head is encoded once."""

    def __init__(self, info: AnswerInfo, id_prefix: str, kind: str, *, include_usage: bool) -> None:
        fields = _encode(head(info, id_prefix, kind))
        self._head = b"data: " + fields[:-1] + b',"choices":['
        # OpenAI: with include_usage every chunk but the last has a null.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._info = info

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The chunk with usage and without choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def rest(self) -> bytes:
        """What was held back and comes before the end."""
        return b""

    def _event(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def _enforcement_event(self) -> bytes:
        report = self._info.enforcement
        if report is None or not (report.approximated or report.unenforced):
            return b""
        return self._head + b'],"enforcement":' + _encode(enforcement_body(report)) + b"}\n\n"


class ChatEvents(EventWriter):
    """Events of a chat completion."""

    def __init__(
        self, info: AnswerInfo, vocabulary: Vocabulary, *, include_usage: bool, logprobs: bool
    ) -> None:
        super().__init__(info, CHAT_ID, "chat.completion.chunk", include_usage=include_usage)
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._begun: set[int] = set()
        self._plain = {
            index: (
                self._head + b'{"index":%d,"delta":{"content":' % index,
                b'},"logprobs":null,"finish_reason":null}' + self._tail,
            )
            for index in range(info.num_choices)
        }

    def begin(self) -> bytes:
        """What comes before the first delta."""
        return self._enforcement_event()

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta."""
        index = delta.index
        if (
            index in self._begun
            and delta.finish_reason is None
            and not (delta.reasoning or delta.tool_calls or delta.logprobs)
        ):
            before, after = self._plain[index]
            return before + _encode(delta.content) + after
        return self._event(self._full_choice(delta))

    def _full_choice(self, delta: ChoiceDelta) -> bytes:
        fields: dict[str, Any] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            fields["role"] = "assistant"
            fields["content"] = delta.content
        elif delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            fields["tool_calls"] = tool_call_deltas(delta.tool_calls)
        logprobs = (
            _encode(chat_logprobs(self._vocabulary, delta.logprobs))
            if self._logprobs and delta.logprobs
            else b"null"
        )
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            delta.index,
            _encode(fields),
            logprobs,
            _finish(delta.finish_reason),
            _stop_reason(delta),
        )


class CompletionEvents(EventWriter):
    """Events of a completion; `first_index` is the index of this prompt's first choice."""

    def __init__(
        self,
        info: AnswerInfo,
        vocabulary: Vocabulary,
        *,
        include_usage: bool,
        logprobs: bool,
        first_index: int = 0,
        echo: str | None = None,
    ) -> None:
        super().__init__(info, COMPLETION_ID, "text_completion", include_usage=include_usage)
        self._first_index = first_index
        self._echo = echo
        self._logprobs = {
            index: CompletionLogprobs(vocabulary) for index in range(info.num_choices) if logprobs
        }
        self._echoed: set[int] = set()
        # They come with one of the choices. Where the prompt is cached, others can be there before it: their
        # text begins with the prompt's tokens too, so it waits for these.
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._waits = echo is not None and logprobs and len(info.prompt_token_ids) > 1
        self._waiting: list[ChoiceDelta] = []
        self._plain = {
            index: (
                self._head + b'{"index":%d,"text":' % (first_index + index),
                b',"logprobs":null,"finish_reason":null}' + self._tail,
            )
            for index in range(info.num_choices)
        }

    def begin(self) -> bytes:
        """What comes before the first delta."""
        return self._enforcement_event()

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta."""
        if self._waits:
            if not delta.prompt_logprobs:
                self._waiting.append(delta)
                return b""
            self._prompt_logprobs = delta.prompt_logprobs
            return self._whole(delta) + self.rest()
        return self._whole(delta)

    def rest(self) -> bytes:
        """What waits still; nothing does afterwards."""
        self._waits = False
        waiting, self._waiting = self._waiting, []
        return b"".join(map(self._whole, waiting))

    def _whole(self, delta: ChoiceDelta) -> bytes:
        index = delta.index
        echoes = self._echo is not None and index not in self._echoed
        if delta.finish_reason is None and not (delta.logprobs or echoes):
            before, after = self._plain[index]
            return before + _encode(delta.content) + after
        text = delta.content
        logprobs = b"null"
        if index in self._logprobs:
            lead = self._info.prompt_token_ids[0] if echoes else None
            prompt = self._prompt_logprobs if echoes else ()
            logprobs = _encode(self._logprobs[index].body((*prompt, *delta.logprobs), lead_token_id=lead))
        if echoes:
            self._echoed.add(index)
            text = (self._echo or "") + text
        return self._event(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (
                self._first_index + index,
                _encode(text),
                logprobs,
                _finish(delta.finish_reason),
                _stop_reason(delta),
            )
        )


def _finish(reason: FinishReason | None) -> bytes:
    return b"null" if reason is None else _FINISH_JSON[reason]


def _stop_reason(delta: ChoiceDelta) -> bytes:
    reason = b"" if delta.stop_reason is None else b',"stop_reason":' + _encode(delta.stop_reason)
    return reason if delta.verdict is None else reason + b',"verdict":' + _encode(delta.verdict)
