"""Parts of answers that streams and whole bodies share: usage, log-probabilities, finish reasons, tool
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from contract.grammar import EnforcementReport, Verdict
from contract.outputs import FinishReason, TokenLogprobs
from gateway.pipeline.delta import CHAT_ID, AnswerInfo, ChoiceDelta, Usage
from gateway.text.delta import ToolCallDelta
from gateway.text.vocabulary import Vocabulary

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    # OpenAI has no word for a budget that ended; the answer is cut as by max_tokens.
    FinishReason.BUDGET: "length",
}


def usage_body(usages: Sequence[Usage], *, timing: bool) -> dict[str, Any]:
    """`usage` over the request's prompts; with the parts of the first one's time to first token when asked
    for.
    """
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }
    ttft = usages[0].ttft
    if timing and ttft is not None:
        body["time_to_first_token"] = {
            "total_ms": ttft.total_s * 1000,
            "queue_ms": ttft.queue_s * 1000,
            "preprocess_ms": ttft.preprocess_s * 1000,
            "prefill_ms": ttft.prefill_s * 1000,
            "first_decode_ms": ttft.first_decode_s * 1000,
            "serialize_ms": ttft.serialize_s * 1000,
            "network_ms": ttft.network_s * 1000,
        }
    return body


def chat_logprobs(vocabulary: Vocabulary, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            {
                **_token(vocabulary, each.token_id, each.logprob),
                "top_logprobs": [_token(vocabulary, token_id, value) for token_id, value in each.top],
            }
            for each in logprobs
        ],
        "refusal": None,
    }


def _token(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(token_id),
        # JSON has no infinity; a masked token is as good as impossible.
        "logprob": max(logprob, -9999.0),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, whose text offsets go on from chunk to chunk."""

    def __init__(self, vocabulary: Vocabulary, offset: int = 0) -> None:
        self._vocabulary = vocabulary
        self._offset = offset

    def body(self, logprobs: Iterable[TokenLogprobs], *, lead_token_id: int | None = None) -> dict[str, Any]:
        """The arrays of these tokens; `lead_token_id` is a first one without a log-probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if lead_token_id is not None:
            self._add(lead_token_id, tokens, offsets)
            values.append(None)
            tops.append(None)
        for each in logprobs:
            self._add(each.token_id, tokens, offsets)
            values.append(max(each.logprob, -9999.0))
            top = {self._vocabulary.token_text(token_id): max(value, -9999.0) for token_id, value in each.top}
            tops.append(top or {tokens[-1]: values[-1] or 0.0})
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _add(self, token_id: int, tokens: list[str], offsets: list[int]) -> None:
        text = self._vocabulary.token_text(token_id)
        tokens.append(text)
        offsets.append(self._offset)
        self._offset += len(text)


def tool_call_deltas(calls: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """`delta.tool_calls`."""
    return [
        {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}
        if call.id
        else {"index": call.index, "function": {"arguments": call.arguments}}
        for call in calls
    ]


def _function(call: ToolCallDelta) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def enforcement_body(report: EnforcementReport) -> dict[str, Any]:
    """What of a response format is not enforced exactly; part of answers that used one which is not."""

    def listed(items: Iterable[Any]) -> list[dict[str, str]]:
        return [{"keyword": item.keyword, "path": item.path, "note": item.note} for item in items]

    return {"approximated": listed(report.approximated), "unenforced": listed(report.unenforced)}


class WholeChoice:
    """Collects the deltas of one choice."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCallDelta] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | None = None
        self.verdict: Verdict | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Takes the next delta."""
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason or self.stop_reason
        self.verdict = delta.verdict or self.verdict
        for piece in delta.tool_calls:
            if self.calls and self.calls[-1].index == piece.index:
                self.calls[-1].arguments += piece.arguments
            else:
                self.calls.append(piece)

    def judged(self) -> dict[str, Any]:
        """The verdict as a field of the choice, where there is one."""
        return {} if self.verdict is None else {"verdict": msgspec.to_builtins(self.verdict)}


def head(info: AnswerInfo, id_prefix: str, kind: str) -> dict[str, Any]:
    """The fields that every chunk and body begins with."""
    return {
        "id": f"{id_prefix}{info.request_id}",
        "object": kind,
        "created": info.created_unix_s,
        "model": info.model,
        "service_tier": info.service_tier,
    }


def chat_body(
    info: AnswerInfo,
    choices: Sequence[WholeChoice],
    usage: Usage,
    vocabulary: Vocabulary,
    *,
    logprobs: bool,
    timing: bool,
) -> dict[str, Any]:
    """A whole chat completion."""
    body = head(info, CHAT_ID, "chat.completion")
    body["choices"] = [
        {
            "index": index,
            "message": _chat_message(choice),
            "logprobs": chat_logprobs(vocabulary, choice.logprobs) if logprobs else None,
            "finish_reason": FINISH_REASONS[choice.finish_reason or FinishReason.STOP],
            "stop_reason": choice.stop_reason,
            **choice.judged(),
        }
        for index, choice in enumerate(choices)
    ]
    body["usage"] = usage_body([usage], timing=timing)
    _add_enforcement(body, info)
    return body


def _chat_message(choice: WholeChoice) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not choice.calls else None,
        "refusal": None,
    }
    reasoning = "".join(choice.reasoning)
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in choice.calls
        ]
    return message


def _add_enforcement(body: dict[str, Any], info: AnswerInfo) -> None:
    report = info.enforcement
    if report is not None and (report.approximated or report.unenforced):
        body["enforcement"] = enforcement_body(report)
