"""Harmony, the form of gpt-oss's answers: messages with a channel, and those to tools with a recipient.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`. The prompt ends inside
of the first message's header.
"""

from __future__ import annotations

from contract.formats import REASONING
from gateway.text.delta import TextDelta
from gateway.text.markers import split_at_marker
from gateway.text.reasoning import TextParser
from gateway.text.tool_calls.addressed import END, HEADER, MESSAGE, RECIPIENT
from gateway.text.tool_calls.parser import AT_ONCE

_CHANNEL = "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", HEADER, _CHANNEL)
HARMONY_MARKS = (*_ENDS, MESSAGE, "<|constrain|>", REASONING["harmony"].open)


class HarmonyParser:
    """A TextParser: the analysis is reasoning, messages to tools go on with their headers, and of the others
    the texts, which are the answer. Without calls, messages to tools are dropped.
    """

    def __init__(self, answer: TextParser, *, calls_tools: bool) -> None:
        self._answer = answer
        self._calls_tools = calls_tools
        # None inside of a message.
        self._header: list[str] | None = []
        self._kind = ""
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether text that comes now is no answer."""
        return self._header is not None or self._kind == "analysis"

    @property
    def is_over(self) -> bool:
        """Never: thoughts may come between messages."""
        return False

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        for start in range(0, len(text), AT_ONCE):
            self._read(text[start : start + AT_ONCE], delta)

    def _read(self, text: str, delta: TextDelta) -> None:
        text, self._held = self._held + text, ""
        while text:
            marks = (MESSAGE,) if self._header is not None else _ENDS
            before, mark, rest = split_at_marker(text, marks)
            if self._header is not None:
                self._header.append(before)
            else:
                self._say(before, delta)
            if mark is None:
                self._held = rest
                return
            text = rest
            if self._header is not None:
                self._begin("".join(self._header), delta)
            else:
                if self._kind == "call" and self._calls_tools:
                    self._answer.feed(END, delta)
                self._header, self._kind = [mark] if mark == _CHANNEL else [], ""

    def finish(self, delta: TextDelta) -> None:
        """See TextParser. An answer in no message at all is one."""
        header = None if self._header is None else "".join(self._header)
        if header is None:
            self._say(self._held, delta)
        elif _CHANNEL not in header and not RECIPIENT.search(header):
            self._answer.feed(header.strip() and header + self._held, delta)
        self._header, self._held = [], ""
        self._answer.finish(delta)

    def _begin(self, header: str, delta: TextDelta) -> None:
        recipient = RECIPIENT.search(header)
        self._header = None
        if recipient is None:
            self._kind = "analysis" if f"{_CHANNEL}analysis" in header else "final"
            return
        self._kind = "call"
        if self._calls_tools:
            self._answer.feed(f"{HEADER}to=functions.{recipient[1]}{MESSAGE}", delta)

    def _say(self, text: str, delta: TextDelta) -> None:
        if self._kind == "analysis":
            delta.think(text)
        elif text and (self._kind == "final" or self._calls_tools):
            self._answer.feed(text, delta)
