"""Mistral's formats: after `[TOOL_CALLS]` a JSON list of calls, or per marker `name[ARGS]{…}`."""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import CallState, JsonCall, JsonValue
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

MARKER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_SPACE = " \t\r\n"
# What stands before the arguments of a call without a marker of its own.
_BARE_NAME = re.compile(r"\s*[\w.-]*(\[CALL_ID\]\w*)?(\[ARGS\])?")


class MistralParser(ToolCallParser):
    """What follows the first marker and is no call becomes content, but for arguments of nothing and for what
    stands around the calls of a list.
    """

    def __init__(self, call_id: CallIds) -> None:
        super().__init__(call_id)
        # Reads one character after the marker; None before it and behind a list.
        self._step: Callable[[MistralParser, str], None] | None = None
        # Some of the text behind a list has come.
        self._has_text = False
        # Text behind the marker, which becomes content when it turns out to be no call.
        self._raw: list[str] = []
        # What stands before the next arguments: another marker, and the name.
        self._name: list[str] = []
        self._call: JsonCall | None = None
        self._value = JsonValue()

    def _read(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._content(text) if self._step is None else self._behind_marker(text)

    def _content(self, text: str) -> str:
        before, marker, rest = split_at_marker(text, (MARKER,))
        self._sink.content(before if self._has_text or not self.num_calls else before.lstrip())
        self._has_text = self._has_text or bool(before.strip())
        if marker is None:
            self._held = rest
            return ""
        self._step, self._raw, self._has_text = MistralParser._after_marker, [], False
        return rest

    def _behind_marker(self, text: str) -> str:
        for position, character in enumerate(text):
            assert self._step is not None, "the marker has come"
            self._step(self, character)
            if self._step is None:
                return text[position + 1 :]
        return ""

    def _end(self) -> None:
        if self._step is None:
            self._sink.content(self._held)
        elif self._is_cut:
            if self._step is MistralParser._in_name:
                self._end_in_name()
        elif not self.num_calls:
            self._sink.content(MARKER + "".join(self._raw))
        elif self._step is MistralParser._in_name:
            self._say("".join(self._name))

    def _end_in_name(self) -> None:
        """The answer was cut before the arguments of a call, or in the text behind one."""
        before, marker, written = "".join(self._name).rpartition(MARKER)
        if not marker and self.num_calls and not (ARGUMENTS in written and _BARE_NAME.fullmatch(written)):
            self._say(written)
            return
        self._say(before if self.num_calls else "")
        name, arguments, _ = written.partition(ARGUMENTS)
        if arguments and (name := name.partition(CALL_ID)[0].strip()):
            self._sink.begin(name)

    def _say(self, text: str) -> None:
        """Text behind a call, without the white space between them."""
        self._sink.content(text.lstrip())

    def _after_marker(self, character: str) -> None:
        if character == "{":
            # One call without the list around it.
            self._between_calls(character)
            return
        self._raw.append(character)
        if character == "[":
            self._step = MistralParser._between_calls
        elif character not in _SPACE:
            self._name = [character]
            self._step = MistralParser._in_name

    def _between_calls(self, character: str) -> None:
        if character == "{":
            self._call = JsonCall(self._sink)
            self._step = MistralParser._in_call
            self._in_call(character)
            return
        self._raw.append(character)
        if character == "]":
            self._sink.content("" if self.num_calls else MARKER + "".join(self._raw))
            self._step, self._raw = None, []

    def _in_call(self, character: str) -> None:
        assert self._call is not None, "a call is open in this state"
        self._raw.append(character)
        self._call.feed(character)
        if self._call.state is not CallState.OPEN:
            self.num_complete += self._call.state is CallState.DONE
            self._step = MistralParser._between_calls

    def _in_name(self, character: str) -> None:
        self._raw.append(character)
        if character != "{":
            self._name.append(character)
            return
        before, marker, written = "".join(self._name).rpartition(MARKER)
        name = written.partition(CALL_ID)[0].removesuffix(ARGUMENTS).strip()
        self._value, self._name = JsonValue(), []
        if not marker and self.num_calls and not _BARE_NAME.fullmatch(written):
            # Text behind the last call.
            self._say(written + character)
            self._step, self._has_text = None, True
            return
        self._say(before)
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
        self._raw.append(character)
        if self._value.feed(character)[1]:
            self._step = MistralParser._in_name
