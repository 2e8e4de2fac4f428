"""The Hermes format: `<tool_call>` around `{"name": …, "arguments": {…}}`, once per call."""

from __future__ import annotations

from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Line breaks around calls belong to the format and are dropped."""

    MARKERS = (OPEN, CLOSE)

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._call: JsonCall | None = None
        # A call has ended and its closing marker has not been seen.
        self._closing = False

    def _read(self, text: str) -> None:
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text)
            elif self._closing:
                text = self._read_close(text)
            else:
                text = self._read_content(text)

    def _end(self) -> None:
        if self._call is not None and not self._call.named:
            self._sink.content(OPEN + "".join(self._call.raw))
        only_breaks = self.num_calls > 0 and not self._held.strip("\n")
        if not self._closing and not only_breaks:
            self._sink.content(self._held)
        self._call = None

    def _read_content(self, text: str) -> str:
        before, marker, rest = split_at_marker(self._held + text, (OPEN,))
        certain = before.rstrip("\n")
        self._sink.content(certain)
        if marker is None:
            self._held = before[len(certain) :] + rest
            return ""
        self._held = ""
        self._call = JsonCall(self._sink)
        return rest

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
            else:
                self._sink.content(OPEN + "".join(call.raw))
            return text[position + 1 :]
        return ""

    def _read_close(self, text: str) -> str:
        _, marker, rest = split_at_marker(self._held + text, (CLOSE, OPEN))
        self._held = "" if marker else rest
        if marker is None:
            return ""
        self._closing = False
        if marker == OPEN:
            self._call = JsonCall(self._sink)
        return rest
