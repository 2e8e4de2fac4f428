"""Llama 3's JSON format: an answer that is `{"name": …, "parameters": {…}}`, several separated by `;`.

An answer is a call if it begins with one, after `<|python_tag|>` or white space; behind text, as templates
for Llama 4 write it, only `{"name": ` and a tool of the request begin one. Many answers that are not calls
begin with `{`: what turns out not to be a call, with its arguments, is content. After the tag the models' own
tools are called in Python, as `NAME.call(key=value)`.
"""

from __future__ import annotations

import re

from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.parser import CallIds
from gateway.text.tool_calls.values import ToolTypes
from gateway.text.tool_calls.whole import MayBeCalls, PythonCall

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"
_PYTHON, _PYTHON_BEGUN = re.compile(r"\w{1,128}\.call\("), re.compile(r"\w{1,128}(\.\w{0,4})?")


class Llama3Parser(MayBeCalls):
    """Calls are streamed as their arguments come."""

    behind_text = ('{"name": "', '"')

    def __init__(self, call_id: CallIds, tools: ToolTypes) -> None:
        super().__init__(call_id, tools)
        self._call: JsonCall | None = None
        self._python: PythonCall | None = None

    def _read(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self._plain:
                mark, rest = self._up_to_call(text[position:])
                position = len(text) - len(rest)
                if mark:
                    self._call = JsonCall(self._sink, needs_arguments=True)
                    for character in mark:
                        self._call.feed(character)
                continue
            character = text[position]
            position += 1
            if self._python is not None:
                if self._python.feed(character):
                    ended, self._python = self._python, None
                    self._end_python(ended)
            elif self._call is None:
                self._before_call(character)
            else:
                self._in_call(self._call, character)

    def _end(self) -> None:
        is_tagged = self._mark.startswith(TAG)
        if self._is_cut and self._python is not None:
            self._sink.begin(self._python.name)
        elif self._python is not None:
            self._give_up(self._python.source)
        elif self._call is not None:
            self._end_call(self._call, is_tagged=is_tagged)
        elif self._is_cut and is_tagged:
            self._forget()
        elif self._mark or not self.num_calls:
            self._give_up("")
        self._sink.content(self._held)
        self._call = None

    def _end_call(self, call: JsonCall, *, is_tagged: bool) -> None:
        is_known = bool(call.name) and self._tools.knows(call.name)
        if self._is_cut and (is_tagged or is_known):
            call.cut()
        elif not call.named:
            self._give_up("".join(call.raw))

    def _before_call(self, character: str) -> None:
        if character == "{" and self._mark in ("", TAG):
            self._call = JsonCall(self._sink, needs_arguments=True)
            self._call.feed(character)
            return
        self._lead.append(character)
        if character in _BETWEEN and len(self._mark) <= len(TAG):
            self._is_parted = bool(self._mark)
            return
        self._mark += character
        is_tagged, name = self._mark.startswith(TAG), self._mark.removeprefix(TAG)
        if self._is_parted:
            self._give_up("")
        elif is_tagged and character == "(" and _PYTHON.fullmatch(name):
            del self._lead[-len(name) :]
            self._python = PythonCall(name)
        elif not TAG.startswith(self._mark) and not (is_tagged and _PYTHON_BEGUN.fullmatch(name)):
            self._give_up("")

    def _in_call(self, call: JsonCall, character: str) -> None:
        call.feed(character)
        if call.state is CallState.OPEN:
            return
        self._call = None
        if not call.named:
            self._give_up("".join(call.raw))
            return
        self._forget()
        if call.state is CallState.DONE:
            self.num_complete += 1
        else:
            # The name is out already: the broken rest is the client's to see.
            self._sink.argue(character)
            self._plain = True
