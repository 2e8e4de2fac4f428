"""The Hermes format: `<tool_call>` around `{"name": …, "arguments": {…}}`, once per call."""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.delta import TextDelta, ToolCallDelta
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """See ToolCallParser. Line breaks before a call and between calls belong to the format and are
    dropped.
    """

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.num_calls = 0
        self.num_complete = 0
        self._call_id = call_id
        self._call: JsonCall | None = None
        self._delta = TextDelta()
        # Text between calls: what may be a marker or white space before one.
        self._held = ""
        # A call has ended and its closing marker has not been seen.
        self._closing = False

    def feed(self, text: str, delta: TextDelta) -> None:
        """See ToolCallParser."""
        self._delta = delta
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text)
            elif self._closing:
                text = self._read_close(text)
            else:
                text = self._read_content(text)

    def finish(self, delta: TextDelta) -> None:
        """See ToolCallParser."""
        self._delta = delta
        if self._call is not None and not self._call.named:
            delta.content += OPEN + "".join(self._call.raw)
        only_breaks = self.num_calls > 0 and not self._held.strip("\n")
        if not self._closing and not only_breaks:
            delta.content += self._held
        self._held = ""
        self._call = None

    def _read_content(self, text: str) -> str:
        before, marker, rest = split_at_marker(self._held + text, (OPEN,))
        if marker is None:
            certain = before.rstrip("\n")
            self._held = before[len(certain) :] + rest
            self._delta.content += certain
            return ""
        self._held = ""
        self._delta.content += before.rstrip("\n")
        self._call = JsonCall(self._begin, self._argue)
        return rest

    def _read_call(self, call: JsonCall, text: str) -> str:
        for position, character in enumerate(text):
            call.take(character)
            if call.state is CallState.OPEN:
                continue
            self._call = None
            if call.state is CallState.DONE:
                self.num_complete += 1
                self._closing = True
            elif call.named:
                # The name is out already: the broken rest is the client's to see.
                self._argue(character)
                self._closing = True
            else:
                self._delta.content += OPEN + "".join(call.raw)
            return text[position + 1 :]
        return ""

    def _read_close(self, text: str) -> str:
        _, marker, rest = split_at_marker(self._held + text, (CLOSE, OPEN))
        self._held = "" if marker else rest
        if marker is None:
            return ""
        self._closing = False
        if marker == OPEN:
            self._call = JsonCall(self._begin, self._argue)
        return rest

    def _begin(self, name: str) -> None:
        index = self.num_calls
        self.num_calls += 1
        self._delta.add_call(ToolCallDelta(index=index, id=self._call_id(index), name=name))

    def _argue(self, piece: str) -> None:
        self._delta.add_call(ToolCallDelta(index=self.num_calls - 1, arguments=piece))
