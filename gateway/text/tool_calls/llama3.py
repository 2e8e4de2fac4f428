"""Llama 3's JSON format: an answer that is `{"name": …, "parameters": {…}}`, several separated by `;`.

An answer is a call only if it begins with one, after `<|python_tag|>` or white space. Many answers that are
not calls begin with `{`: what turns out not to be a call, with its arguments, is content.
"""

from __future__ import annotations

from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class Llama3Parser(ToolCallParser):
    """Calls are streamed as their arguments come."""

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._call: JsonCall | None = None
        # No call can come any more.
        self._plain = False

    def _read(self, text: str) -> None:
        for position, character in enumerate(text):
            if self._plain:
                self._sink.content(text[position:])
                return
            if self._call is None:
                self._before_call(character)
            else:
                self._in_call(self._call, character)

    def _end(self) -> None:
        if self._call is not None and not self._call.named:
            self._sink.content(self._held + "".join(self._call.raw))
        elif self._call is None and not self.num_calls:
            self._sink.content(self._held)
        self._call = None

    def _before_call(self, character: str) -> None:
        before = self._held.lstrip(_BETWEEN)
        if character == "{" and before.rstrip(_BETWEEN) in ("", TAG):
            self._call = JsonCall(self._sink, needs_arguments=True)
            self._call.feed(character)
            return
        self._held += character
        before = (before + character).lstrip(_BETWEEN)
        if not TAG.startswith(before.rstrip(_BETWEEN)):
            self._give_up(self._held)

    def _in_call(self, call: JsonCall, character: str) -> None:
        call.feed(character)
        if call.state is CallState.OPEN:
            return
        self._call = None
        if not call.named:
            self._give_up(self._held + "".join(call.raw))
            return
        self._held = ""
        if call.state is CallState.DONE:
            self.num_complete += 1
        else:
            # The name is out already: the broken rest is the client's to see.
            self._sink.argue(character)
            self._plain = True

    def _give_up(self, text: str) -> None:
        self._held = ""
        self._plain = True
        self._sink.content(text)
