"""DeepSeek's format: calls between `<｜tool▁calls▁begin｜>` and its end, each in markers of its own.

V3 and R1 write `function<｜tool▁sep｜>NAME`, then the arguments in a fenced block; V3.1 writes
`NAME<｜tool▁sep｜>` and the arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import JsonValue
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_OLD_TYPE = "function"


class DeepSeekParser(ToolCallParser):
    """White space between the answer and the calls belongs to the format."""

    MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        # Reads one character of a call; None outside of calls.
        self._step: Callable[[DeepSeekParser, str], None] | None = None
        self._in_calls = False
        self._header = ""
        # Text behind the first marker, which becomes content when it turns out to be no call.
        self._raw = ""
        self._value = JsonValue()

    def _read(self, text: str) -> None:
        while text:
            text = self._read_call(text) if self._step is not None else self._read_between(self._held + text)

    def _end(self) -> None:
        if self._step is DeepSeekParser._before_arguments:
            self._sink.content((CALL_BEGIN if self.num_calls else self._raw) + self._header)
        elif self._in_calls and not self.num_calls:
            self._sink.content(self._raw + self._held)
        elif not self._in_calls:
            self._sink.content(self._held if self._held.strip() or not self.num_calls else "")

    def _read_between(self, text: str) -> str:
        self._held = ""
        markers = (CALL_BEGIN, CALLS_END) if self._in_calls else (CALLS_BEGIN,)
        before, marker, rest = split_at_marker(text, markers)
        if not self._in_calls:
            certain = before.rstrip()
            self._sink.content(certain)
            if marker is None:
                self._held = before[len(certain) :] + rest
                return ""
            self._raw = CALLS_BEGIN
        elif not self.num_calls:
            self._raw += before + (marker or "")
        if marker is None:
            self._held = rest
            return ""
        self._in_calls = marker != CALLS_END
        if not self._in_calls and not self.num_calls:
            self._sink.content(self._raw)
        if marker == CALL_BEGIN:
            self._header = ""
            self._step = DeepSeekParser._before_arguments
        return rest

    def _read_call(self, text: str) -> str:
        for position, character in enumerate(text):
            assert self._step is not None, "a call is open here"
            self._step(self, character)
            if self._step is None:
                return text[position + 1 :]
        return ""

    def _before_arguments(self, character: str) -> None:
        if character != "{" or SEPARATOR not in self._header:
            self._header += character
            if self._header.endswith(CALL_END):
                self._end_without_object()
            return
        self._sink.begin(self._name())
        self._value = JsonValue()
        self._step = DeepSeekParser._in_arguments
        self._in_arguments(character)

    def _end_without_object(self) -> None:
        """A call whose arguments are no object: one of nothing, or text."""
        name = self._name()
        written = self._header.removesuffix(CALL_END).partition(SEPARATOR)[2].strip()
        written = written.removeprefix(name).strip().removeprefix("```json").removesuffix("```")
        self._step = None
        if SEPARATOR in self._header and name and not written.strip():
            self._sink.begin(name)
            self._sink.argue("{}")
            self.num_complete += 1
        elif self.num_calls:
            self._sink.content(CALL_BEGIN + self._header)
        else:
            self._raw += self._header

    def _name(self) -> str:
        """What the header calls."""
        kind, _, rest = self._header.removesuffix(CALL_END).partition(SEPARATOR)
        # A tool of the new format may itself be called "function"; then nothing stands after the separator.
        is_old = kind.strip() == _OLD_TYPE and rest.strip()
        return (rest.partition("\n")[0] if is_old else kind).strip()

    def _in_arguments(self, character: str) -> None:
        _, ended = self._value.feed(character)
        self._sink.argue(character)
        if ended:
            self.num_complete += 1
            self._step = None
