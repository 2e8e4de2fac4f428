"""Mistral's formats: after `[TOOL_CALLS]` a JSON list of calls, or per marker `name[ARGS]{…}`."""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall, JsonValue
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

MARKER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_SPACE = " \t\r\n"


class MistralParser(ToolCallParser):
    """Text after the first marker that is no call is dropped: the format has none."""

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        # Reads one character after the marker; None before it.
        self._step: Callable[[MistralParser, str], None] | None = None
        # Text behind the marker, which becomes content when it turns out to be no call.
        self._raw = ""
        self._name = ""
        self._call: JsonCall | None = None
        self._value = JsonValue()

    def _read(self, text: str) -> None:
        if self._step is None:
            before, marker, rest = split_at_marker(self._held + text, (MARKER,))
            self._held = "" if marker else rest
            self._sink.content(before)
            if marker is None:
                return
            self._step, text = MistralParser._after_marker, rest
        for character in text:
            self._step(self, character)

    def _end(self) -> None:
        if self._step is None:
            self._sink.content(self._held)
        elif not self.num_calls:
            self._sink.content(MARKER + self._raw)

    def _after_marker(self, character: str) -> None:
        if character == "{":
            # One call without the list around it.
            self._between_calls(character)
            return
        self._raw += character
        if character == "[":
            self._step = MistralParser._between_calls
        elif character not in _SPACE:
            self._name = character
            self._step = MistralParser._in_name

    def _between_calls(self, character: str) -> None:
        if character == "{":
            self._call = JsonCall(self._sink)
            self._step = MistralParser._in_call
            self._in_call(character)
        else:
            self._raw += character

    def _in_call(self, character: str) -> None:
        assert self._call is not None, "a call is open in this state"
        self._raw += character
        self._call.feed(character)
        if self._call.state is not CallState.OPEN:
            self.num_complete += self._call.state is CallState.DONE
            self._step = MistralParser._between_calls

    def _in_name(self, character: str) -> None:
        self._raw += character
        if character != "{":
            self._name += character
            return
        name = self._name.partition(CALL_ID)[0].removesuffix(ARGUMENTS).strip().removeprefix(MARKER)
        self._value = JsonValue()
        self._name = ""
        if not name:
            # Arguments of nothing: no call, and dropped like other text here.
            self._step = MistralParser._in_nothing
            self._value.feed(character)
            return
        self._sink.begin(name)
        self._step = MistralParser._in_arguments
        self._in_arguments(character)

    def _in_arguments(self, character: str) -> None:
        _, ended = self._value.feed(character)
        self._sink.argue(character)
        if ended:
            self.num_complete += 1
            self._step = MistralParser._in_name

    def _in_nothing(self, character: str) -> None:
        self._raw += character
        if self._value.feed(character)[1]:
            self._step = MistralParser._in_name
