"""Calls that are JSON objects between two marks: one each time (Hermes), or a list of them (Granite, Phi,
Command).
"""

from __future__ import annotations

from collections.abc import Callable

from contract.formats import JsonForm
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

_SPACE = " \t\r\n"


class JsonObjectsParser(ToolCallParser):
    """Line breaks around calls and what closes a list belong to the format and are dropped. Any other text
    behind a call is the answer's, whether the call's closing mark has come or not.
    """

    def __init__(self, form: JsonForm, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._form = form
        # Takes some of the text and returns the rest.
        self._step: Callable[[JsonObjectsParser, str], str] = JsonObjectsParser._content
        self._call: JsonCall | None = None
        # What was read before the object of the call, and belongs to the text where that is no call.
        self._lead: list[str] = []
        # A list has begun.
        self._in_list = False
        # A closing mark is still to come: wherever it stands, it is no text. A bracket alone may be one.
        self._is_closing = False
        # What may stand between calls, and what ends a call that is broken.
        self._between = _SPACE + ",}" + ("]" if form.close != "]" else "")
        self._ends = (form.open,) if form.close == "]" else (form.close, form.open)

    def _read(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._step(self, text)

    def _end(self) -> None:
        # An object behind a call may have no mark of its own.
        is_begun = bool(self._lead) or (self._form.is_list and self.num_calls > 0)
        if self._step is JsonObjectsParser._content:
            self._end_of_content()
        elif self._is_cut and is_begun:
            pass
        elif self._call is not None and not self._call.named:
            self._no_call("".join(self._call.raw))
        elif self._step is JsonObjectsParser._before_list:
            self._no_call("")
        self._call = None

    def _content(self, text: str) -> str:
        form = self._form
        marks = (form.open, form.close) if self._is_closing else (form.open,)
        mark, rest = self._content_up_to(text, marks)
        if mark is None:
            return ""
        if mark == form.open:
            return self._begin(rest)
        self._is_closing, self._num_breaks = False, 0
        return rest

    def _begin(self, text: str) -> str:
        """Behind the opening mark."""
        self._lead = [self._take_breaks(), self._form.open]
        self._is_closing = False
        if self._form.is_list:
            self._in_list, self._step = False, JsonObjectsParser._before_list
            return text
        return self._begin_object(text)

    def _begin_object(self, text: str, *, needs_arguments: bool = False) -> str:
        self._call = JsonCall(self._sink, needs_arguments=needs_arguments)
        self._step = JsonObjectsParser._in_call
        return text

    def _before_list(self, text: str) -> str:
        stripped = text.lstrip(_SPACE)
        self._lead.append(text[: len(text) - len(stripped)])
        if not stripped:
            return ""
        if stripped[0] == "{" and self._in_list:
            return self._begin_object(stripped)
        if stripped[0] == "[" and not self._in_list:
            self._in_list = True
            self._lead.append("[")
            return stripped[1:]
        self._no_call("")
        return stripped

    def _in_call(self, text: str) -> str:
        call = self._call
        assert call is not None, "an object has begun"
        for position, character in enumerate(text):
            call.feed(character)
            if call.state is CallState.OPEN:
                continue
            self._call = None
            if call.state is CallState.DONE:
                self.num_complete += 1
                self._step = JsonObjectsParser._behind_call
            elif call.named:
                # The name is out already: the broken rest is the client's to see.
                self._step = JsonObjectsParser._in_broken_call
                return text[position:]
            else:
                self._no_call("".join(call.raw))
            return text[position + 1 :]
        return ""

    def _no_call(self, read: str) -> None:
        """What came since the opening mark is text."""
        self._sink.content("".join(self._lead) + read)
        self._lead.clear()
        self._step = JsonObjectsParser._content

    def _in_broken_call(self, text: str) -> str:
        before, mark, rest = split_at_marker(text, self._ends)
        self._sink.argue(before)
        if mark is None:
            self._held = rest
            return ""
        self._step = JsonObjectsParser._content
        return self._begin(rest) if mark == self._form.open else rest

    def _behind_call(self, text: str) -> str:
        form = self._form
        rest = text.lstrip(self._between)
        for mark in (form.close, form.open):
            if rest.startswith(mark):
                self._step = JsonObjectsParser._content
                return self._begin(rest[len(mark) :]) if mark == form.open else rest[len(mark) :]
            if mark.startswith(rest):
                self._held = rest
                return ""
        self._lead = []
        if rest[0] == "{":
            return self._begin_object(rest, needs_arguments=not form.is_list)
        self._step, self._is_closing = JsonObjectsParser._content, len(form.close) > 1
        return rest
