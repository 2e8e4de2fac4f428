"""Calls of harmony (gpt-oss): messages to `functions.NAME`, whose text is the arguments.

`gateway.text.harmony` separates an answer's messages; of those to tools it passes on header, text and end.
"""

from __future__ import annotations

import re

from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import JsonValue
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

HEADER, MESSAGE, END = "<|start|>", "<|message|>", "<|call|>"
# The tool that a message is to. One to the assistant itself, or to the user, is none to a tool.
RECIPIENT = re.compile(r"to=(?!(?:assistant|user)(?:[\s<]|$))(?:functions\.)?([^\s<]+)")


class AddressedParser(ToolCallParser):
    """Everything that is no message to a tool is content."""

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._value: JsonValue | None = None
        self._header: list[str] | None = None
        # Whether the value goes on, and some of it was passed on; white space behind that.
        self._is_open = self._has_argued = False
        self._blank: list[str] = []

    def _read(self, text: str) -> None:
        text = self._held + text
        self._held = ""
        while text:
            if self._value is not None:
                text = self._in_arguments(self._value, text)
                continue
            mark = HEADER if self._header is None else MESSAGE
            before, found, rest = split_at_marker(text, (mark,))
            if self._header is None:
                self._sink.content(before)
                self._header = [] if found else None
            else:
                self._header.append(before)
                if found:
                    self._begin("".join(self._header))
            self._held, text = ("", rest) if found else (rest, "")

    def _end(self) -> None:
        if self._value is not None:
            # What is held may be the beginning of the end mark.
            self._argue("" if self._is_cut else self._held)
        elif self._header is None:
            self._sink.content(self._held)

    def _begin(self, header: str) -> None:
        name = RECIPIENT.search(header)
        assert name is not None, "messages without a recipient are no calls"
        self._sink.begin(name[1])
        self._value, self._is_open, self._has_argued = JsonValue(), True, False

    def _in_arguments(self, value: JsonValue, text: str) -> str:
        before, found, rest = split_at_marker(text, (END,))
        for character in before if value.started else before.lstrip():
            if self._is_open:
                self._is_open = not value.feed(character)[1]
                self.num_complete += not self._is_open
        self._argue(before)
        if found is None:
            self._held = rest
            return ""
        if self._is_open:
            self._sink.argue("" if value.started else "{}")
            self.num_complete += not value.started
        self._value, self._header = None, None
        self._blank.clear()
        return rest

    def _argue(self, text: str) -> None:
        """A piece of the message: all of it is arguments, but the white space around them."""
        certain = text.rstrip()
        if certain:
            said = "".join(self._blank) + certain
            self._sink.argue(said if self._has_argued else said.lstrip())
            self._has_argued = True
            self._blank.clear()
        self._blank.append(text[len(certain) :])
