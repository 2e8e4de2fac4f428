"""From one choice's token ids to its deltas: detokenize, stop strings, reasoning, tool calls, log-
probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.text.delta import TextDelta
from gateway.text.detokenizer import TokenTexts, detokenizer
from gateway.text.reasoning import ContentParser, TextParser, ThinkParser
from gateway.text.stop_strings import StopStrings
from gateway.text.tool_calls import PARSERS
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

REASONING_MARKERS: tuple[str, ...] = ("<think>", "</think>")
REASONING_FORMATS = frozenset({"think", "deepseek_r1", "qwen3"})


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a request's choices is read."""

    stop: tuple[str, ...] = ()
    # Stop strings that end before this many tokens do not count.
    min_tokens: int = 0
    # Names of formats to take out of the text; "" leaves the text alone.
    tool_call_format: str = ""
    reasoning_format: str = ""
    # The prompt's template has opened the reasoning already.
    reasoning_opened: bool = False
    # End the choice after the first tool call.
    single_tool_call: bool = False


def shown_ids(texts: TokenTexts, options: TextOptions) -> frozenset[int]:
    """Ids of special tokens that the parsers of `options` must see."""
    markers = REASONING_MARKERS if options.reasoning_format else ()
    if options.tool_call_format:
        markers += PARSERS[options.tool_call_format].MARKERS
    wanted = {marker.encode() for marker in markers}
    vocabulary = texts.vocabulary
    return frozenset(id_ for id_ in vocabulary.special_ids if vocabulary.token_bytes(id_) in wanted)


class ChoiceText:
    """The state of one choice. `feed` until `ended`, then `finish` once."""

    def __init__(self, texts: TokenTexts, options: TextOptions, call_id: CallIds) -> None:
        self._detokenizer = detokenizer(texts)
        self._stop = StopStrings(options.stop)
        self._min_tokens = options.min_tokens
        self._single_call = options.single_tool_call
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        # Characters decoded so far, and those of them that cannot belong to a stop string any more.
        self.num_decoded = 0
        self.num_passed = 0
        # None: the text is content as it is.
        self._parser: TextParser | None = None
        self._calls: ToolCallParser | None = None
        self._reasoning: ThinkParser | None = None
        self._build_parsers(options, call_id)

    def _build_parsers(self, options: TextOptions, call_id: CallIds) -> None:
        parser: TextParser = ContentParser()
        if options.tool_call_format:
            self._calls = PARSERS[options.tool_call_format](call_id)
            parser = self._parser = self._calls
        if options.reasoning_format in REASONING_FORMATS:
            self._reasoning = ThinkParser(parser, opened=options.reasoning_opened)
            self._parser = self._reasoning

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    @property
    def called_tools(self) -> bool:
        """Whether a tool call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    def tool_calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of the calls so far."""
        return [] if self._calls is None else self._calls.calls()

    @property
    def may_end(self) -> bool:
        """Whether the text can be over before the engine says so."""
        return self._single_call or self._stop.is_armed

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun that is not complete."""
        return self._calls is not None and self._calls.num_complete < self._calls.num_calls

    @property
    def ended(self) -> bool:
        """Whether the text is over before the engine says so: a stop string, or the one allowed tool call."""
        if self._stop.matched is not None:
            return True
        return self._single_call and self._calls is not None and self._calls.num_complete > 0

    def feed(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        """Adds to `delta` what is certain after these ids. Ids after a stop string are dropped."""
        if self._reasoning is not None and self._reasoning.thinking:
            self.num_reasoning_tokens += len(token_ids)
        if self._min_tokens > self.num_tokens:
            early = token_ids[: self._min_tokens - self.num_tokens]
            self.num_tokens += len(early)
            text = self._detokenizer.feed(early)
            self.num_decoded += len(text)
            self._deliver(text, delta)
            token_ids = token_ids[len(early) :]
        self.num_tokens += len(token_ids)
        text = self._detokenizer.feed(token_ids)
        self.num_decoded += len(text)
        self._deliver(self._stop.feed(text), delta)

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back. After a stop string nothing of it is."""
        if self._stop.matched is None:
            text = self._detokenizer.finish()
            self.num_decoded += len(text)
            text = self._stop.feed(text)
            if self._stop.matched is None:
                text += self._stop.finish()
            self._deliver(text, delta)
        if self._parser is not None:
            self._parser.finish(delta)

    def _deliver(self, text: str, delta: TextDelta) -> None:
        if not text:
            return
        self.num_passed += len(text)
        if self._parser is None:
            delta.content += text
        else:
            self._parser.feed(text, delta)
