"""Server-sent events as OpenAI-compatible servers write them: lines end with LF or CRLF, the space after the
colon is optional, and comments and other fields may stand beside the data.

Most events are looked at as bytes; only those that carry an error, and the last ones, are decoded.
"""

from __future__ import annotations

import re

import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"
# A chunk holds output: of a completion whatever its text, as tokens may have none of their own; of a chat not
# the opening role, whose content is empty, but thoughts and arguments of tools as well as content.
_OUTPUT = re.compile(rb'"text"\s*:\s*"|"(?:content|reasoning_content|reasoning|arguments)"\s*:\s*"(?!")')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class EventStream:
    """The events of one response."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        # The last payloads, one of which has the usage.
        self.last: list[bytes] = []
        # The server's message about a failure; empty when there was none.
        self.error = ""
        # Whether the closing event has come.
        self.is_done = False

    def feed(self, data: bytes) -> int:
        """Takes a piece of the body; the number of events that it completed and that carry output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_chunks = 0
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if line.startswith(_DATA):
                self._lines.append(line[len(_DATA) :].removeprefix(b" "))
            elif not line:
                num_chunks += self._end_event()
        return num_chunks

    def finish(self) -> int:
        """The body has ended, perhaps without the blank line that ends an event. As `feed`."""
        return self.feed(b"\n\n")

    def _end_event(self) -> int:
        if not self._lines:
            return 0
        payload = b"\n".join(self._lines)
        self._lines = []
        if payload == _DONE:
            self.is_done = True
            return 0
        self.last = [*self.last[-2:], payload]
        if b'"error"' in payload:
            self._read_error(payload)
        return int(_OUTPUT.search(payload) is not None and _NO_CHOICES.search(payload) is None)

    def _read_error(self, payload: bytes) -> None:
        try:
            event = msgspec.json.decode(payload)
        except ValueError:
            return
        if isinstance(event, dict) and event.get("error") and not self.error:
            self.error = str(event["error"])[:500]
