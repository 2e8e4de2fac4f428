"""From a request to token ids and to what its answer's grammar depends on: the domain, wherever it runs.

The service calls it where it reads short requests, in threads for longer ones, and workers for large ones.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import Conversation, LeftOut, ResponseFormat, ToolChoiceMode, turns_of, without_oldest
from contract.formats import REASONING, UNKNOWN_FORMAT
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.request import (
    EncodedText,
    GrammarRequest,
    Prompted,
    PromptRequest,
    Reasoning,
    ToolRules,
    ToolSpec,
)
from tokenizer_svc.messages import wire
from tokenizer_svc.prompt.limits import RequestLimits, num_bytes
from tokenizer_svc.refusals import invalid, no_input
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.text.encoding import ControlTokens, TextEncoder
from tokenizer_svc.text.template import ChatTemplates, assistant_prefix, without_thinking
from tokenizer_svc.types import LengthLimit, Truncation


class _Written(NamedTuple):
    """A conversation as its template writes it, its tokens, and how long either took."""

    text: str
    token_ids: list[int]
    render_s: float
    encode_s: float


class Prompts:
    """Templates, encoder and limits of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, limits: PromptLimitsConfig, *, turn_cache_tokens: int) -> None:
        added = checkpoint.description.get("added_tokens", [])
        known = checkpoint.tool_call_format != UNKNOWN_FORMAT
        self.tool_call_format = checkpoint.tool_call_format if known else ""
        self.reasoning_format = checkpoint.reasoning_format
        # Texts are cut inside of the tokens that the tokenizer puts around them.
        self._pools = checkpoint.pooled is not None
        self._tags = REASONING.get(self.reasoning_format, REASONING["think"])
        # Tools' schemas are grammars as well.
        self._max_tool_bytes = limits.max_grammar_bytes
        self._control = ControlTokens(added, checkpoint.templates.values())
        self.templates = ChatTemplates(checkpoint.templates, checkpoint.special_tokens, self._control, limits)
        self.encoder = TextEncoder(checkpoint, self._control, turn_cache_tokens=turn_cache_tokens)
        self.limits = RequestLimits(limits, checkpoint, writes_user_turns=self.templates.writes_user_turns)

    def prepared(self, message: tokenizer_pb2.PrepareRequest, asked: PromptRequest) -> Prompted:
        """Rendered and encoded. Raises TEMPLATE_FAILED, GRAMMAR_REFUSED and INVALID_ARGUMENT, and beyond
        limits REQUEST_TOO_LARGE and CONTEXT_LENGTH_EXCEEDED.
        """
        form = wire.response_format(message.response_format)
        self.limits.format(form)
        kind = message.WhichOneof("input")
        if kind == "conversation":
            return self._conversation(message.conversation, form, asked)
        if kind == "texts" and form is not None:
            raise invalid("nothing is generated from texts; leave it out", "response_format")
        if kind == "texts":
            return self._texts(message.texts, asked)
        return self._text(message, form, asked)

    def _conversation(
        self, message: chat_pb2.Conversation, form: ResponseFormat | None, asked: PromptRequest
    ) -> Prompted:
        self.limits.whole(message.ByteSize(), len(message.messages), len(message.tools))
        conversation = wire.conversation(message, max_tool_bytes=self._max_tool_bytes)
        self.limits.conversation(conversation, asked.length)
        begin_s = time.monotonic()
        written, left_out = self._written(conversation, asked), None
        if asked.length.truncation is Truncation.KEEP_END:
            written, left_out = self._shortened(conversation, written, asked)
        rendered, ids = written.text, written.token_ids
        self.limits.length(len(ids), asked.length, "messages")
        prefix = ""
        if self.reasoning_format and not conversation.continue_final_message:
            prefix = assistant_prefix(rendered, self._control.control, self._tags)
        reasoning = self._reasoning(conversation, rendered, prefix)
        grammar = self._grammar_request(conversation, form, reasoning) if asked.with_grammar else None
        return Prompted(
            token_ids=ids,
            num_tokens=len(ids),
            left_out=left_out,
            assistant_prefix=prefix,
            grammar=grammar.encoded() if grammar is not None else None,
            begin_s=begin_s,
            render_s=written.render_s,
            encode_s=written.encode_s,
        )

    def _written(self, conversation: Conversation, asked: PromptRequest) -> _Written:
        begin_s = time.monotonic()
        rendered = self.templates.render(conversation)
        rendered_s = time.monotonic()
        ids = self.encoder.encode_rendered(rendered, tenant=asked.turns_of)
        return _Written(rendered, ids, rendered_s - begin_s, time.monotonic() - rendered_s)

    def _shortened(
        self, conversation: Conversation, whole: _Written, asked: PromptRequest
    ) -> tuple[_Written, LeftOut | None]:
        """Without as few of the oldest turns as it takes, but always with the last one; times are of all that
        was tried.
        """
        most, num_turns = self.limits.max_tokens(asked.length), len(turns_of(conversation.messages))
        if most is None or len(whole.token_ids) <= most or num_turns < 2:
            return whole, None
        tried = [whole]

        def left(num_out: int) -> _Written:
            tried.append(self._written(without_oldest(conversation, num_out), asked))
            return tried[-1]

        # Leaving out so many turns is too few, and so many is enough, or all that there are.
        too_few, enough = 0, num_turns - 1
        kept = left(enough)
        while len(kept.token_ids) <= most and enough - too_few > 1:
            middle = (too_few + enough) // 2
            if len((shorter := left(middle)).token_ids) <= most:
                kept, enough = shorter, middle
            else:
                too_few = middle
        num_tokens = max(0, len(whole.token_ids) - len(kept.token_ids))
        left_out = LeftOut(num_tokens=num_tokens, num_turns=enough, of_turns=num_turns)
        render_s, encode_s = sum(each.render_s for each in tried), sum(each.encode_s for each in tried)
        return kept._replace(render_s=render_s, encode_s=encode_s), left_out

    def _text(
        self, message: tokenizer_pb2.PrepareRequest, form: ResponseFormat | None, asked: PromptRequest
    ) -> Prompted:
        limits, length = self.limits, asked.length
        begin_s = time.monotonic()
        most = None if length.truncation is Truncation.REFUSE else limits.max_tokens(length)
        kept: list[int] | None = None
        match message.WhichOneof("input"):
            case "text":
                limits.text_size(num_bytes(message.text), length, "prompt")
                adds = message.add_special_tokens or not message.HasField("add_special_tokens")
                if most is not None and self._pools:
                    keeps_end = length.truncation is Truncation.KEEP_END
                    fitted = self.encoder.encode_fitting(
                        message.text, None, most, keeps_end=keeps_end, add_special_tokens=adds
                    )
                    kept, ids = fitted.kept, fitted.ids
                else:
                    ids = self.encoder.encode_text(message.text, add_special_tokens=adds)
            case "encoded":
                ids = self._given_ids(message.encoded, length, "prompt")
            case _:
                raise no_input()
        if kept is None:
            kept = ids if most is None else self.encoder.truncated(ids, most, length.truncation)
        limits.length(len(kept), length, "prompt")
        return Prompted(
            token_ids=kept,
            num_tokens=len(kept),
            left_out=LeftOut(num_tokens=len(ids) - len(kept)) if len(kept) < len(ids) else None,
            grammar=GrammarRequest(response_format=form).encoded() if form is not None else None,
            begin_s=begin_s,
            encode_s=time.monotonic() - begin_s,
        )

    def _texts(self, message: tokenizer_pb2.TextList, asked: PromptRequest) -> Prompted:
        """Each text by itself; an error names it by its index."""
        length, begin_s = asked.length, time.monotonic()
        most = None if length.truncation is Truncation.REFUSE else self.limits.max_tokens(length)
        given = [self._one_of(each, index, length) for index, each in enumerate(message.texts)]
        texts = [each for each in given if isinstance(each, tuple)]
        keeps_end = length.truncation is Truncation.KEEP_END
        fitted = iter(self.encoder.encode_each(texts, most, keeps_end=keeps_end))
        token_ids: list[int] = []
        parts: list[EncodedText] = []
        for index, each in enumerate(given):
            if isinstance(each, tuple):
                kept, ids, second_start = next(fitted)
            else:
                kept = self.encoder.truncated(each, most, length.truncation)
                ids, second_start = each, 0
            self.limits.length(len(kept), length, f"texts[{index}]")
            token_ids += kept
            parts.append(
                EncodedText(
                    num_tokens=len(kept),
                    num_truncated_tokens=len(ids) - len(kept),
                    second_start=second_start,
                )
            )
        return Prompted(
            token_ids=token_ids,
            num_tokens=len(token_ids),
            texts=tuple(parts),
            begin_s=begin_s,
            encode_s=time.monotonic() - begin_s,
        )

    def _one_of(
        self, message: tokenizer_pb2.TextInput, index: int, length: LengthLimit
    ) -> tuple[str, str | None] | list[int]:
        """A text, with the second one of a pair, or token ids."""
        field, kind = f"texts[{index}]", message.WhichOneof("input")
        pair = message.pair if message.HasField("pair") else None
        if kind == "text":
            self.limits.text_size(num_bytes(message.text) + num_bytes(pair or ""), length, field)
            return message.text, pair
        if kind is None:
            raise no_input()
        if pair is not None:
            raise invalid("a pair is of two texts", f"{field}.pair")
        return self._given_ids(message.encoded, length, field)

    def _given_ids(self, message: tokenizer_pb2.EncodedPrompt, length: LengthLimit, field: str) -> list[int]:
        self.limits.num_ids(len(message.ids), length, field)
        ids = list(message.ids)
        self.limits.ids(ids, field)
        return ids

    def _grammar_request(
        self, conversation: Conversation, form: ResponseFormat | None, reasoning: Reasoning
    ) -> GrammarRequest | None:
        """What the answer has to follow; None when it is free. Raises INVALID_ARGUMENT for a tool choice that
        the tools do not allow.
        """
        tools = self._tool_rules(conversation)
        if form is None and tools is None:
            return None
        return GrammarRequest(
            response_format=form,
            tools=tools,
            reasoning=reasoning,
            reasoning_format=self.reasoning_format or "think",
        )

    def _reasoning(self, conversation: Conversation, rendered: str, prefix: str) -> Reasoning:
        """Whether thoughts precede the answer: the template has opened them, or the model may, unless the
        template or the client has closed them.
        """
        opens, closes = self._tags.open.rstrip(), self._tags.close
        if self.reasoning_format == "harmony":
            # Every answer begins where thoughts may.
            return Reasoning.NONE if conversation.continue_final_message else Reasoning.OPTIONAL
        if opens in prefix and closes not in prefix:
            return Reasoning.OPEN
        is_closed = prefix or conversation.continue_final_message or rendered.rstrip().endswith(closes)
        unasked = self.templates.thinks_when_asked or without_thinking(conversation.template_options)
        if not self.reasoning_format or is_closed or unasked:
            return Reasoning.NONE
        return Reasoning.OPTIONAL

    def _tool_rules(self, conversation: Conversation) -> ToolRules | None:
        choice = conversation.tool_choice
        mode = choice.mode
        if mode is ToolChoiceMode.NONE or not conversation.tools:
            if choice.forces:
                raise invalid(f"tool_choice {mode.value} needs tools; there are none", "tool_choice")
            return None
        if mode is ToolChoiceMode.AUTO and not self.tool_call_format:
            # The template alone decides what the model makes of its tools.
            return None
        # Rendering has read their schemas.
        chosen = [
            index
            for index, tool in enumerate(conversation.tools)
            if mode is not ToolChoiceMode.NAMED or tool.name == choice.name
        ]
        tools = tuple(
            msgspec.convert(conversation.tools[index], ToolSpec, from_attributes=True) for index in chosen
        )
        if not tools:
            known = ", ".join(tool.name for tool in conversation.tools)
            raise invalid(f"tool_choice names {choice.name!r}; tools: {known}", "tool_choice")
        return ToolRules(
            tools=_within(tools, self._max_tool_bytes),
            mode=mode,
            parallel=conversation.parallel_tool_calls and mode is not ToolChoiceMode.NAMED,
            format=self.tool_call_format,
            first=chosen[0],
        )


def _within(tools: tuple[ToolSpec, ...], limit: int) -> tuple[ToolSpec, ...]:
    """The tools, without the largest schemas of those that are not strict as far as all together have more
    than `limit` bytes.
    """
    sizes = [len(tool.parameters_json) + len(tool.input_grammar) for tool in tools]
    kept, size = list(tools), sum(sizes)
    for index in sorted(range(len(tools)), key=sizes.__getitem__, reverse=True):
        tool = tools[index]
        if size <= limit:
            break
        if tool.strict or not tool.parameters_json:
            continue
        size -= len(tool.parameters_json)
        why = f"it has {len(tool.parameters_json)} bytes, and the limit of all together is {limit}: use less"
        kept[index] = msgspec.structs.replace(tool, parameters_json="", left_out=why)
    return tuple(kept)
