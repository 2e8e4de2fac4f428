"""Calls that are JSON objects between two marks: one each time (Hermes), or a list of them (Granite, Phi,
Command).
"""

from __future__ import annotations

from contract.formats import JsonForm
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

_SPACE = " \t\r\n"


class JsonObjectsParser(ToolCallParser):
    """Line breaks around calls belong to the format and are dropped."""

    def __init__(self, form: JsonForm, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._form = form
        self._call: JsonCall | None = None
        # What stands before a list's first object; None where none is waited for.
        self._before: str | None = None
        # A call has ended and its closing marker has not been seen.
        self._closing = False

    def _read(self, text: str) -> None:
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text)
            elif self._before is not None:
                text = self._read_before(self._before, text)
            elif self._closing:
                text = self._read_close(text)
            else:
                text = self._read_content(text)

    def _end(self) -> None:
        if self._call is not None:
            if not self._call.named and not self._closing:
                self._sink.content(self._raw(self._call))
        elif self._before is not None:
            self._sink.content(self._form.open + self._before)
        elif not self._closing:
            self._end_of_content()
        self._call = None

    def _read_content(self, text: str) -> str:
        rest = self._content_up_to(self._held + text, self._form.open)
        if rest is None:
            return ""
        self._held = ""
        self._begin()
        return rest

    def _begin(self) -> None:
        self._lead = ""
        if self._form.is_list:
            self._before = ""
        else:
            self._call = JsonCall(self._sink)

    def _read_before(self, before: str, text: str) -> str:
        for position, character in enumerate(text):
            if character == "{" and before.strip(_SPACE) == "[":
                self._before, self._lead = None, before
                self._call = JsonCall(self._sink)
                return text[position:]
            if character not in _SPACE and (character != "[" or before.strip(_SPACE)):
                self._before = None
                self._sink.content(self._form.open + before)
                return text[position:]
            before += character
        self._before = before
        return ""

    def _raw(self, call: JsonCall) -> str:
        return self._form.open + self._lead + "".join(call.raw)

    def _read_call(self, call: JsonCall, text: str) -> str:
        for position, character in enumerate(text):
            call.feed(character)
            if call.state is CallState.OPEN:
                continue
            self._call = None
            if call.state is CallState.DONE:
                self.num_complete += 1
                self._closing = True
            elif call.named:
                # The name is out already: the broken rest is the client's to see.
                self._sink.argue(character)
                self._closing = True
            elif not self._closing:
                self._sink.content(self._raw(call))
            return text[position + 1 :]
        return ""

    def _read_close(self, text: str) -> str:
        form = self._form
        markers = (form.close, form.open, *("{" if form.is_list else ""))
        _, marker, rest = split_at_marker(self._held + text, markers)
        self._held = "" if marker else rest
        if marker == "{":
            self._call = JsonCall(self._sink)
            return marker + rest
        if marker is not None:
            self._closing = False
        if marker == form.open:
            self._begin()
        return rest if marker else ""
