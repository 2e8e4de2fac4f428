"""From one choice's token ids to its deltas: detokenize, stop strings, reasoning, tool calls, log-
probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contract.chat import Tool
from contract.formats import REASONING
from contract.thinking import UNBOUNDED, ThinkingTags, Thought
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import Detokenizer, TokenTexts, detokenizer
from gateway.text.harmony import HARMONY_MARKS, HarmonyParser
from gateway.text.markers import longest_partial_suffix
from gateway.text.reasoning import ContentParser, TextParser, ThinkParser
from gateway.text.tool_calls import PARSERS, marks
from gateway.text.tool_calls.parser import CallIds, ToolCallParser
from gateway.text.tool_calls.values import ToolTypes

_HARMONY = "harmony"


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a request's choices is read."""

    stop: tuple[str, ...] = ()
    # Ids that end the answer and are no part of it. The engine is not told of them, because they may stand in
    # thoughts.
    stop_token_ids: frozenset[int] = frozenset()
    # A stop string or id that comes before this many tokens does not count.
    min_tokens: int = 0
    # Names of formats to take out of the text; "" leaves the text alone.
    tool_call_format: str = ""
    reasoning_format: str = ""
    # Types of the calls' arguments, where their format writes plain text.
    tools: tuple[Tool, ...] = ()
    # The prompt's template has opened the reasoning already.
    reasoning_opened: bool = False
    # Where thoughts stand between tokens; None where their tags are text.
    thinking: ThinkingTags | None = None
    # End the choice after the first tool call.
    single_tool_call: bool = False


def shown_ids(texts: TokenTexts, options: TextOptions) -> frozenset[int]:
    """Ids of special tokens that the parsers of `options` must see."""
    markers = marks(options.tool_call_format)
    if form := REASONING.get(options.reasoning_format):
        markers += (form.open, form.close)
    if _HARMONY in (options.tool_call_format, options.reasoning_format):
        markers += HARMONY_MARKS
    vocabulary = texts.vocabulary
    texts_of = {id_: vocabulary.token_bytes(id_).decode(errors="replace") for id_ in vocabulary.special_ids}
    return frozenset(id_ for id_, text in texts_of.items() if text and any(text in mark for mark in markers))


class StopStrings:
    """A TextParser that passes text on until a stop string is complete; that and what follows is dropped.

    When several match, the one that is complete first wins, and of those the longest: the outcome does not
    depend on how the text was cut. What might become a stop string is held back, and nothing more.
    """

    __slots__ = ("_answer", "_held", "_patterns", "is_armed", "matched", "num_withheld")

    def __init__(self, patterns: Sequence[str], answer: TextParser) -> None:
        self._patterns = tuple(patterns)
        self._answer = answer
        self._held = ""
        # False: text is passed on whatever is in it.
        self.is_armed = True
        # The stop string that ended the text.
        self.matched: str | None = None
        # Characters at the end of what came that were not passed on.
        self.num_withheld = 0

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser; sets `matched` when a stop string is complete."""
        if self.matched is not None:
            self.num_withheld += len(text)
            return
        if self.is_armed:
            text = self._held + text
            match = self._first_match(text)
            if match is None:
                num_passed = len(text) - longest_partial_suffix(text, self._patterns)
                self._held = text[num_passed:]
            else:
                num_passed, self.matched = match
                self._held = ""
            self.num_withheld = len(text) - num_passed
            text = text[:num_passed]
        if text:
            self._answer.feed(text, delta)

    def finish(self, delta: TextDelta) -> None:
        """See TextParser."""
        if self._held:
            self._answer.feed(self._held, delta)
            self._held, self.num_withheld = "", 0
        self._answer.finish(delta)

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, each) for each in self._patterns if (start := text.find(each)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0])) if found else None


class ChoiceText:
    """The state of one choice. `feed` until `ended`, then `finish` once.

    Stop strings and ids are looked for in the answer, not in the reasoning before it.
    """

    def __init__(
        self, texts: TokenTexts, options: TextOptions, call_id: CallIds, after: Detokenizer | None = None
    ) -> None:
        """`after` has read the prompt, where the text goes on from it."""
        self._detokenizer = after or detokenizer(texts)
        self._min_tokens = options.min_tokens
        self._single_call = options.single_tool_call
        self._stop_ids = options.stop_token_ids
        self._at_stop_id = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        # Characters decoded so far.
        self.num_decoded = 0
        # None: the text is content as it is.
        self._parser: TextParser | None = None
        self._calls: ToolCallParser | None = None
        self._stop: StopStrings | None = None
        self._reasoning: ThinkParser | HarmonyParser | None = None
        self._build_parsers(options, call_id)
        # What tokens say of thoughts, as engines count them.
        self._thought: Thought | None = None
        if self._reasoning is not None and options.thinking is not None:
            self._thought = Thought(options.thinking, UNBOUNDED, ())
        self._vocabulary = texts.vocabulary

    def _build_parsers(self, options: TextOptions, call_id: CallIds) -> None:
        parser: TextParser = ContentParser()
        if options.tool_call_format:
            self._calls = PARSERS[options.tool_call_format](call_id, ToolTypes(options.tools))
            parser = self._parser = self._calls
        if options.stop:
            self._stop = StopStrings(options.stop, parser)
            self._stop.is_armed = not self._min_tokens
            parser = self._parser = self._stop
        form = REASONING.get(options.reasoning_format)
        if _HARMONY in (options.tool_call_format, options.reasoning_format):
            calls_tools = options.tool_call_format == _HARMONY
            self._parser = self._reasoning = HarmonyParser(parser, calls_tools=calls_tools)
        elif form is not None:
            calls = next(iter(marks(options.tool_call_format)), "")
            self._parser = self._reasoning = ThinkParser(
                parser, opened=options.reasoning_opened, form=form, calls=calls
            )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stop is None else self._stop.matched

    @property
    def num_passed(self) -> int:
        """Characters decoded so far that cannot belong to a stop string any more."""
        return self.num_decoded - (0 if self._stop is None else self._stop.num_withheld)

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
        return self._single_call or self._stop is not None or self.watches_ids

    @property
    def watches_ids(self) -> bool:
        """Whether each id is to be shown to `ends_at` before it is fed."""
        return bool(self._stop_ids)

    def ends_at(self, token_id: int) -> bool:
        """Whether the answer is over before this id."""
        if token_id in self._stop_ids and self.num_tokens >= self._min_tokens:
            self._at_stop_id = self._reasoning is None or self._reasoning.answers
        return self._at_stop_id

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun that is not complete."""
        return self._calls is not None and self._calls.num_complete < self._calls.num_calls

    @property
    def ended(self) -> bool:
        """Whether the text is over before the engine says so: a stop string or id, or the one tool call."""
        if self._at_stop_id or (self._stop is not None and self._stop.matched is not None):
            return True
        return self._single_call and self._calls is not None and self._calls.num_complete > 0

    def feed(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        """Adds to `delta` what is certain after these ids. Ids after a stop string are dropped."""
        reasoning, num_read = self._reasoning, 0
        while num_read < len(token_ids) and reasoning is not None and not reasoning.is_over:
            # One by one, so that those of the answer are not counted as thoughts, however they come together.
            self._feed_thought(reasoning, token_ids[num_read], delta)
            num_read += 1
        if num_read < len(token_ids):
            self._feed(token_ids[num_read:] if num_read else token_ids, delta)

    def _feed_thought(self, reasoning: ThinkParser | HarmonyParser, token_id: int, delta: TextDelta) -> None:
        thought = self._thought
        if thought is None:
            self.num_reasoning_tokens += reasoning.thinking
            self._feed((token_id,), delta)
            return
        thought.read((token_id,))
        self.num_reasoning_tokens = thought.num_thought
        text = self._detokenizer.feed((token_id,))
        self.num_decoded += len(text)
        reasoning.take(text, self._vocabulary.token_text(token_id), thought.thinks, delta)
        self.num_tokens += 1
        if self._stop is not None:
            self._stop.is_armed = self.num_tokens >= self._min_tokens

    def _feed(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        if self._min_tokens > self.num_tokens:
            early = token_ids[: self._min_tokens - self.num_tokens]
            self._decode(early, delta)
            token_ids = token_ids[len(early) :]
            if self._stop is not None:
                self._stop.is_armed = self.num_tokens >= self._min_tokens
        self._decode(token_ids, delta)

    def finish(self, delta: TextDelta, *, is_cut: bool = False) -> None:
        """Adds what was held back. After a stop string nothing of it is. `is_cut` says that a limit has ended
        the answer and not the model; a stop string cuts it, too.
        """
        if self.stop_string is None:
            self._deliver(self._detokenizer.finish(), delta)
        if self._calls is not None and (is_cut or self.stop_string is not None):
            self._calls.cut()
        if self._parser is not None:
            self._parser.finish(delta)

    def _decode(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        self.num_tokens += len(token_ids)
        self._deliver(self._detokenizer.feed(token_ids), delta)

    def _deliver(self, text: str, delta: TextDelta) -> None:
        if not text:
            return
        self.num_decoded += len(text)
        if self._parser is None:
            delta.say(text)
        else:
            self._parser.feed(text, delta)
