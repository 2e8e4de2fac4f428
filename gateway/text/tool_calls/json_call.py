"""Reads one JSON object `{"name": …, "arguments": {…}}` character by character, so that arguments can stream.

The arguments are passed on exactly as the model wrote them. Every decision depends on one character and the
state alone, which is what makes the outcome independent of how the text was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import msgspec

from gateway.text.tool_calls.parser import CallSink

_SPACE = " \t\r\n"
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# Characters between keys and values, and what may come after each; "" is a value.
_FOLLOWING: Mapping[str, str] = {"{": '"}', ",": '"}', ":": ""}


class CallState(Enum):
    """Where the object stands."""

    OPEN = auto()
    DONE = auto()
    # It is not a JSON object of the expected shape.
    BROKEN = auto()


class JsonValue:
    """Finds the end of one JSON value. Strings and nesting are followed, nothing is validated."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "started")

    def __init__(self) -> None:
        self.started = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    @property
    def is_between_members(self) -> bool:
        """Whether what was read last belongs to the outermost object or list and to none of its texts."""
        return self._depth == 1 and not self._in_string

    def feed(self, character: str) -> tuple[bool, bool]:
        """(whether the character belongs to the value, whether the value has ended)."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return True, self._depth == 0
            return True, False
        if not self.started:
            self.started = True
            self._scalar = character not in '{["'
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif self._scalar and character in ",}]" + _SPACE:
            return False, True
        elif character in "}]":
            self._depth -= 1
            return True, self._depth == 0
        return True, False


class JsonCall:
    """One call, streamed to `sink`: its name once, then each piece of its arguments.

    With `needs_arguments` an object without arguments is no call, and its name waits for them.
    """

    def __init__(self, sink: CallSink, *, needs_arguments: bool = False) -> None:
        self.state = CallState.OPEN
        # Whether the name has been streamed.
        self.named = False
        # Everything read, to be given back as content when this turns out not to be a call.
        self.raw: list[str] = []
        self._sink = sink
        self._needs_arguments = needs_arguments
        self._name = ""
        self._argued = False
        # Arguments that came before the name.
        self._early = ""
        # Characters of which the next one must be; "" where a value begins.
        self._expected = "{"
        # Key of the value that is read or comes next; None while a key is read.
        self._key: str | None = None
        # The key or value that is read, and its text so far.
        self._value: JsonValue | None = None
        self._text: list[str] = []

    def feed(self, character: str) -> None:
        """Reads one character."""
        self.raw.append(character)
        if self._value is not None:
            self._read(self._value, character)
        elif character not in _SPACE:
            self._between(character)

    @property
    def name(self) -> str:
        """The name, once it is whole."""
        return self._name

    def cut(self) -> None:
        """No more comes: a call whose name is whole is one."""
        if self._name and not self.named:
            self._tell(self._early)

    def _between(self, character: str) -> None:
        """Reads what stands around keys and values."""
        if character not in self._expected if self._expected else character in ",}]:":
            self.state = CallState.BROKEN
        elif character == "}":
            self._end()
        elif self._expected and character in _FOLLOWING:
            self._expected = _FOLLOWING[character]
        else:
            if self._key in _ARGUMENT_KEYS and self._name and character != '"':
                self._announce()
            self._value, self._text = JsonValue(), []
            self._read(self._value, character)

    def _read(self, value: JsonValue, character: str) -> None:
        belongs, ended = value.feed(character)
        if belongs:
            self._text.append(character)
            if self._streams:
                self._sink.argue(character)
        if not ended:
            return
        text, self._value = "".join(self._text), None
        if self._key is None:
            self._key, self._expected = _decode_string(text), ":"
            if self._key is None:
                self.state = CallState.BROKEN
            return
        self._end_value(text)
        self._key, self._expected = None, ",}"
        if not belongs and character not in _SPACE and self.state is CallState.OPEN:
            self._between(character)

    @property
    def _streams(self) -> bool:
        # Arguments that are written as a JSON string have to be decoded as a whole.
        return self._key in _ARGUMENT_KEYS and self.named and self._text[0] != '"'

    def _announce(self) -> None:
        if not self.named:
            self.named = True
            self._sink.begin(self._name)

    def _end_value(self, text: str) -> None:
        if self._key in _NAME_KEYS and not self._name:
            name = _decode_string(text)
            if not name:
                self.state = CallState.BROKEN
                return
            self._name = name
            if self._argued or not self._needs_arguments:
                self._tell(self._early)
        elif self._key in _ARGUMENT_KEYS:
            streamed, self._argued = self._streams, True
            if streamed:
                return
            # Clients parse the arguments of every call; what is no JSON text is theirs to see.
            decoded = _decode_string(text) if text.startswith('"') else text
            written = text if decoded is None else decoded or "{}"
            if self._name:
                self._tell(written)
            else:
                self._early = written

    def _tell(self, written: str) -> None:
        self._announce()
        if written:
            self._sink.argue(written)

    def _end(self) -> None:
        self.state = CallState.DONE if self.named else CallState.BROKEN
        if self.named and not self._argued:
            # Clients parse the arguments of every call.
            self._sink.argue("{}")


def _decode_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None
