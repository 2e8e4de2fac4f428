"""Answers of the generating endpoints, as one body or as server-sent events: the same choices either way.

Events are written with little work per token: what does not change is encoded once per stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from contract.chat import CHAT_ID, COMPLETION_ID
from contract.outputs import FinishReason, TokenLogprobs
from gateway.faces.logprobs import ChatLogprobs, CompletionLogprobs
from gateway.faces.openai.answer_types import (
    CachedTokens,
    Enforcement,
    ReasoningTokens,
    UsageBody,
)
from gateway.faces.retention import kv_usage
from gateway.faces.timings import timings
from gateway.pipeline.delta import AnswerInfo, ChoiceDelta, Usage
from gateway.text.delta import ToolCallDelta
from gateway.text.detokenizer import Detokenizer, TokenTexts, detokenizer

DONE = b"data: [DONE]\n\n"

# Tokens whose log-probabilities are written at once, with twenty alternatives in half a millisecond.
_TOGETHER = 64
_encode = msgspec.json.Encoder().encode
_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    # OpenAI has no word for a budget that ended; the answer is cut as by max_tokens.
    FinishReason.BUDGET: "length",
}


class AnswerWriter:
    """Writes the answer to one prompt; `first_index` is the index of its first choice.

    The frame of an event is head, choices, tail; the head is encoded once.
    """

    ID_PREFIX: ClassVar[str]
    # `object` of whole bodies, and of events.
    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]
    # JSON before and behind the text in the event of a choice that has begun and goes on.
    PLAIN: ClassVar[tuple[bytes, bytes]]

    def __init__(
        self,
        info: AnswerInfo,
        texts: TokenTexts,
        *,
        tier: str,
        include_usage: bool,
        logprobs: bool,
        first_index: int = 0,
    ) -> None:
        """`texts` are those of the answer's tokens; `tier` is what the API calls the tier that serves."""
        self._info = info
        self._tier = tier
        self._texts = texts
        self._with_logprobs = logprobs
        self._first_index = first_index
        self._head = b"data: " + _encode(self._identity(self.CHUNK_OBJECT))[:-1] + b',"choices":['
        # OpenAI: with include_usage every chunk but the last has a null.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        before, after = self.PLAIN
        self._plain = {
            index: (self._head + before % (first_index + index), after) for index in range(info.num_choices)
        }
        # Indices of choices of which something was written.
        self._begun: set[int] = set()
        # JSON before and behind a token's log-probability, by token id: the same wherever it occurs.
        self._pieces: dict[int, tuple[bytes, bytes]] = {}

    def begin(self) -> bytes:
        """The bytes before the first delta: an event that names unenforced keywords, or nothing."""
        enforcement = _enforcement(self._info)
        return self._head + b"]," + _encode(enforcement)[1:] + b"\n\n" if enforcement else b""

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta."""
        if (
            delta.index in self._begun
            and delta.finish_reason is None
            and not delta.logprobs
            and (text := delta.plain) is not None
        ):
            before, after = self._plain[delta.index]
            return before + _encode(text) + after + self._tail
        choice = self._choice(delta, whole=False)
        self._begun.add(delta.index)
        return self._head + _encode(choice) + self._tail

    def rest(self) -> bytes:
        """Events of deltas that waited for others, written before the stream ends."""
        return b""

    def count(self, usage: UsageBody) -> None:
        """Sets the usage that the next events tell."""
        self._tail = b'],"usage":' + _encode(usage) + b"}\n\n"

    def usage_event(self, usage: UsageBody) -> bytes:
        """The chunk with usage and without choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def body(self, choices: Iterable[bytes], usage: UsageBody) -> bytes:
        """A whole answer."""
        end = {"usage": usage, **_enforcement(self._info)}
        head = _encode(self._identity(self.OBJECT))[:-1] + b',"choices":['
        return head + b",".join(choices) + b"]," + _encode(end)[1:]

    def keep(self, delta: ChoiceDelta) -> Iterator[int]:
        """Writes a delta's log-probabilities and takes them out of it, some at a time: bytes of each part."""
        while delta.logprobs:
            some, delta.logprobs = delta.logprobs[:_TOGETHER], delta.logprobs[_TOGETHER:]
            yield self._keep(delta.index, some)

    def choices(self, gathered: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        """The choices of a whole answer, of which each delta has everything but what was kept."""
        for delta in gathered:
            yield _encode(self._choice(delta, whole=True))

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.ID_PREFIX}{self._info.request_id}",
            "object": kind,
            "created": self._info.created_unix_s,
            "model": self._info.model,
            "service_tier": self._tier,
        }

    def _choice(self, delta: ChoiceDelta, *, whole: bool) -> dict[str, Any]:
        said, logprobs = self._said(delta, whole=whole)
        reason = delta.finish_reason
        choice = {
            "index": self._first_index + delta.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": None if reason is None else _FINISH_REASONS[reason],
        }
        if whole or delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if delta.verdict is not None:
            choice["verdict"] = delta.verdict
        if reason is not None and self._info.left_out is not None:
            choice["left_out"] = self._info.left_out
        return choice

    def _said(self, delta: ChoiceDelta, *, whole: bool) -> tuple[dict[str, Any], msgspec.Raw | None]:
        """A choice's text under the endpoint's own key, and its log-probabilities."""
        raise NotImplementedError

    def _keep(self, index: int, logprobs: Sequence[TokenLogprobs]) -> int:
        """Writes log-probabilities of a choice for its end; how many bytes they take."""
        raise NotImplementedError


class ChatWriter(AnswerWriter):
    """A chat completion."""

    ID_PREFIX = CHAT_ID
    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"
    PLAIN = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

    def __init__(
        self, info: AnswerInfo, texts: TokenTexts, *, shows_reasoning: bool = True, **options: Any
    ) -> None:
        """See AnswerWriter."""
        super().__init__(info, texts, **options)
        self._kept: dict[int, ChatLogprobs] = {}
        self._shows_reasoning = shows_reasoning

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta; nothing of one that adds thoughts alone where these are not shown."""
        if not self._shows_reasoning:
            delta.without_thoughts()
            if delta.index in self._begun and not (delta.parts or delta.finish_reason):
                return b""
        return super().event(delta)

    def _said(self, delta: ChoiceDelta, *, whole: bool) -> tuple[dict[str, Any], msgspec.Raw | None]:
        said: dict[str, Any] = {}
        content, reasoning, calls = delta.content, delta.reasoning, delta.tool_calls
        if whole:
            said = {
                "role": "assistant",
                "content": content if content or not calls else None,
                "refusal": None,
            }
        elif delta.index not in self._begun:
            said = {"role": "assistant", "content": content}
        elif content:
            said["content"] = content
        if reasoning and self._shows_reasoning:
            said["reasoning_content"] = reasoning
        if calls:
            said["tool_calls"] = [_tool_call(call, whole=whole) for call in calls]
        logprobs = None
        if self._with_logprobs and (whole or delta.logprobs):
            kept = self._kept.pop(delta.index, None) or self._logprobs()
            kept.add(delta.logprobs)
            logprobs = msgspec.Raw(kept.written())
        return {"message" if whole else "delta": said}, logprobs

    def _logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(self._texts.vocabulary, self._pieces)

    def _keep(self, index: int, logprobs: Sequence[TokenLogprobs]) -> int:
        return self._kept.setdefault(index, self._logprobs()).add(logprobs)


class CompletionWriter(AnswerWriter):
    """A completion."""

    ID_PREFIX = COMPLETION_ID
    OBJECT = CHUNK_OBJECT = "text_completion"
    PLAIN = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}'

    def __init__(self, info: AnswerInfo, texts: TokenTexts, **options: Any) -> None:
        """See AnswerWriter."""
        super().__init__(info, texts, **options)
        # Length of the text so far, which offsets go on from chunk to chunk.
        self._offsets = dict.fromkeys(range(info.num_choices), 0)
        # They come with one of the choices. Where the prompt is cached, others can be there before it: their
        # text begins with the prompt's tokens too, so it waits for these.
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._waits = info.echo is not None and self._with_logprobs and info.num_prompt_tokens > 1
        self._waiting: list[ChoiceDelta] = []
        # Detokenizers that read each choice's tokens again, because a token alone may be a
        # part of a character.
        self._readers = {
            index: detokenizer(texts) if info.echo is None else info.echo.reader.copy()
            for index in self._offsets
        }
        self._kept = {index: self._no_logprobs(reader) for index, reader in self._readers.items()}
        if info.echo is None:
            self._begun.update(self._offsets)

    def event(self, delta: ChoiceDelta) -> bytes:
        """One delta."""
        if not self._waits:
            return super().event(delta)
        if not delta.prompt_logprobs:
            self._waiting.append(delta)
            return b""
        self._prompt_logprobs = delta.prompt_logprobs
        return super().event(delta) + self.rest()

    def rest(self) -> bytes:
        """Events of deltas that still wait for the prompt's log-probabilities; none waits afterwards."""
        self._waits = False
        waiting, self._waiting = self._waiting, []
        return b"".join(map(super().event, waiting))

    def choices(self, gathered: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        """See AnswerWriter."""
        self._prompt_logprobs = next((each.prompt_logprobs for each in gathered if each.prompt_logprobs), ())
        return super().choices(gathered)

    def _said(self, delta: ChoiceDelta, *, whole: bool) -> tuple[dict[str, Any], msgspec.Raw | None]:
        text, earlier, echo = delta.content, None, self._info.echo
        if echo is not None and delta.index not in self._begun:
            text, earlier = echo.text + text, self._no_logprobs(detokenizer(self._texts))
            earlier.lead(echo.first_id)
            earlier.add(self._prompt_logprobs)
        logprobs = None
        if self._with_logprobs:
            fresh = self._no_logprobs(self._readers[delta.index])
            kept, self._kept[delta.index] = self._kept[delta.index], fresh
            kept.add(delta.logprobs)
            written, self._offsets[delta.index] = kept.written(self._offsets[delta.index], earlier)
            logprobs = msgspec.Raw(written)
        return {"text": text}, logprobs

    def _no_logprobs(self, reader: Detokenizer) -> CompletionLogprobs:
        return CompletionLogprobs(self._texts.vocabulary.token_text, reader)

    def _keep(self, index: int, logprobs: Sequence[TokenLogprobs]) -> int:
        return self._kept[index].add(logprobs)


def usage_body(usages: Sequence[Usage], *, timing: bool) -> UsageBody:
    """`usage` over the request's prompts; with the first one's timings when asked for."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.billed_tokens for usage in usages)
    times: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    if timing and (ttft := usages[0].ttft) is not None:
        parts = msgspec.structs.asdict(ttft).items()
        times = {f"{name.removesuffix('_s')}_ms": value * 1000 for name, value in parts}
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(sum(usage.cached_prompt_tokens for usage in usages)),
        completion_tokens_details=ReasoningTokens(sum(usage.reasoning_tokens for usage in usages)),
        time_to_first_token=times,
        timings=timings(usages[0], asked=timing),
        test_time=usages[0].deliberated or msgspec.UNSET,
        kv=kv_usage(usages[0]) if len(usages) == 1 else msgspec.UNSET,
    )


def _tool_call(call: ToolCallDelta, *, whole: bool) -> dict[str, Any]:
    index = {} if whole else {"index": call.index}
    if not call.id:
        return {**index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**index, "id": call.id, "type": "function", "function": function}


def _enforcement(info: AnswerInfo) -> dict[str, Any]:
    """The keywords of a response format that are not enforced exactly; {} where all are."""
    report = info.enforcement
    if report is None or report.exact:
        return {}
    return {"enforcement": Enforcement(report.approximated, report.unenforced)}
