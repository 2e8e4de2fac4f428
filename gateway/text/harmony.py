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
# End a message; some begin the next one.
ENDS = ("<|end|>", "<|call|>", "<|return|>", HEADER, _CHANNEL)
_ALL = frozenset((*ENDS, MESSAGE, "<|constrain|>"))
HARMONY_MARKS = (*_ALL, REASONING["harmony"].open)


class HarmonyParser:
    """A TextParser: the analysis is reasoning, messages to tools go on with their headers, and of the others
    the texts, which are the answer. Without calls, messages to tools are dropped.

    Where marks are tokens (`take`), those alone are marks, and what the tokens say are thoughts is analysis.
    """

    def __init__(self, answer: TextParser, *, calls_tools: bool) -> None:
        self._answer = answer
        self._calls_tools = calls_tools
        # None inside of a message.
        self._header: list[str] | None = []
        self._kind = ""
        self._held = ""
        self._by_tokens = False

    @property
    def thinking(self) -> bool:
        """Whether text that comes now is thought."""
        return self._header is None and self._kind == "analysis"

    @property
    def answers(self) -> bool:
        """Whether text that comes now is the answer's."""
        return self._header is None and self._kind != "analysis"

    @property
    def is_over(self) -> bool:
        """Never: thoughts may come between messages."""
        return False

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        for start in range(0, len(text), AT_ONCE):
            self._read(text[start : start + AT_ONCE], delta)

    def take(self, text: str, token: str, thinks: bool | None, delta: TextDelta) -> None:
        """Reads the text of one token, `token` where it is a mark; `thinks` says whether thoughts follow."""
        self._by_tokens = True
        mark = token if token in _ALL else None
        self._pass(text if mark is None else text.removesuffix(token), delta)
        if mark is not None:
            self._turn(mark, delta, thinks)

    def _read(self, text: str, delta: TextDelta) -> None:
        if self._by_tokens:
            self._pass(text, delta)
            return
        text, self._held = self._held + text, ""
        while text:
            marks = (MESSAGE,) if self._header is not None else ENDS
            before, mark, rest = split_at_marker(text, marks)
            self._pass(before, delta)
            if mark is None:
                self._held = rest
                return
            text = rest
            self._turn(mark, delta)

    def _pass(self, text: str, delta: TextDelta) -> None:
        """Text without marks."""
        if self._header is not None:
            self._header.append(text)
        else:
            self._say(text, delta)

    def _turn(self, mark: str, delta: TextDelta, thinks: bool | None = None) -> None:
        """A mark. In a header others than that of its end are its own text."""
        if self._header is not None and mark != MESSAGE:
            self._header.append(mark)
        elif self._header is not None:
            self._begin("".join(self._header), delta, thinks)
        elif mark not in ENDS:
            self._say(mark, delta)
        else:
            if self._kind == "call" and self._calls_tools:
                self._answer.feed(END, delta)
            self._header, self._kind = [mark] if mark == _CHANNEL else [], ""

    def finish(self, delta: TextDelta) -> None:
        """See TextParser. An answer in no message at all is one."""
        header = None if self._header is None else "".join(self._header)
        if header is None:
            self._say(self._held, delta)
        elif _CHANNEL not in header and HEADER not in header and not RECIPIENT.search(header):
            self._answer.feed(header.strip() and header + self._held, delta)
        self._header, self._held = [], ""
        self._answer.finish(delta)

    def _begin(self, header: str, delta: TextDelta, thinks: bool | None) -> None:
        recipient = RECIPIENT.search(header)
        self._header = None
        if recipient is None or thinks:
            is_thought = thinks if self._by_tokens else f"{_CHANNEL}analysis" in header
            self._kind = "analysis" if is_thought else "final"
            return
        self._kind = "call"
        if self._calls_tools:
            self._answer.feed(f"{HEADER}to=functions.{recipient[1]}{MESSAGE}", delta)

    def _say(self, text: str, delta: TextDelta) -> None:
        if self._kind == "analysis":
            delta.think(text)
        elif text and (self._kind == "final" or self._calls_tools):
            self._answer.feed(text, delta)
