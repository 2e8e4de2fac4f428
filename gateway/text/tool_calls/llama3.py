"""Llama 3's JSON format: an answer that is `{"name": …, "parameters": {…}}`, several separated by `;`.

An answer is a call only if it begins with one, after `<|python_tag|>` or white space. Many answers that are
not calls begin with `{`: what turns out not to be a call, with its arguments, is content.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.delta import TextDelta
from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.sink import CallSink

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class Llama3Parser:
    """See ToolCallParser."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.num_complete = 0
        self._sink = CallSink(call_id)
        self._call: JsonCall | None = None
        # Text before a call: white space, separators, the tag or its beginning.
        self._held = ""
        # No call can come any more.
        self._plain = False

    @property
    def num_calls(self) -> int:
        """See ToolCallParser."""
        return self._sink.num_begun

    def feed(self, text: str, delta: TextDelta) -> None:
        """See ToolCallParser."""
        self._sink.delta = delta
        for position, character in enumerate(text):
            if self._plain:
                self._sink.content(text[position:])
                return
            if self._call is None:
                self._before_call(character)
            else:
                self._in_call(self._call, character)

    def finish(self, delta: TextDelta) -> None:
        """See ToolCallParser."""
        self._sink.delta = delta
        if self._call is not None and not self._call.named:
            self._sink.content(self._held + "".join(self._call.raw))
        elif self._call is None and not self.num_calls:
            self._sink.content(self._held)
        self._held, self._call = "", None

    def _before_call(self, character: str) -> None:
        before = self._held.lstrip(_BETWEEN)
        if character == "{" and before.rstrip(_BETWEEN) in ("", TAG):
            self._call = JsonCall(self._begin, self._sink.argue, needs_arguments=True)
            self._call.take(character)
            return
        self._held += character
        before = (before + character).lstrip(_BETWEEN)
        if not TAG.startswith(before.rstrip(_BETWEEN)):
            self._give_up(self._held)

    def _in_call(self, call: JsonCall, character: str) -> None:
        call.take(character)
        if call.state is CallState.OPEN:
            return
        self._call = None
        if call.state is CallState.DONE:
            self.num_complete += 1
        elif call.named:
            # The name is out already: the broken rest is the client's to see.
            self._sink.argue(character)
            self._plain = True
        else:
            self._give_up(self._held + "".join(call.raw))

    def _begin(self, name: str) -> None:
        self._held = ""
        self._sink.begin(name)

    def _give_up(self, text: str) -> None:
        self._held = ""
        self._plain = True
        self._sink.content(text)
