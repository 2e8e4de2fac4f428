"""Reads one JSON object `{"name": …, "arguments": {…}}` character by character, so that arguments can stream.

The arguments are passed on exactly as the model wrote them. Every decision depends on one character and the
state alone, which is what makes the outcome independent of how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import msgspec

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


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

    def take(self, character: str) -> tuple[bool, bool]:
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
    """One call. `on_name` is called once, then `on_arguments` with each piece.

    With `needs_arguments` an object without arguments is no call, and its name waits for them.
    """

    def __init__(
        self,
        on_name: Callable[[str], None],
        on_arguments: Callable[[str], None],
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.state = CallState.OPEN
        # Whether the name has been told.
        self.named = False
        self._name = ""
        self._argued = False
        self._needs_arguments = needs_arguments
        # Everything read, to be given back as content when this turns out not to be a call.
        self.raw: list[str] = []
        self._on_name = on_name
        self._on_arguments = on_arguments
        self._step: Callable[[JsonCall, str], None] = JsonCall._before_object
        self._key = ""
        self._value = JsonValue()
        self._text: list[str] = []
        # Arguments that came before the name.
        self._early = ""

    def take(self, character: str) -> None:
        """Reads one character."""
        self.raw.append(character)
        self._step(self, character)

    def _before_object(self, character: str) -> None:
        if character == "{":
            self._step = JsonCall._before_key
        elif character not in _SPACE:
            self.state = CallState.BROKEN

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._text = [character]
            self._value = JsonValue()
            self._value.take(character)
            self._step = JsonCall._in_key
        elif character == "}":
            self._end()
        elif character not in _SPACE:
            self.state = CallState.BROKEN

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        _, ended = self._value.take(character)
        if ended:
            key = _decode_string("".join(self._text))
            if key is None:
                self.state = CallState.BROKEN
                return
            self._key = key
            self._step = JsonCall._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._step = JsonCall._before_value
        elif character not in _SPACE:
            self.state = CallState.BROKEN

    def _before_value(self, character: str) -> None:
        if character in _SPACE:
            return
        if character in ",}]:":
            self.state = CallState.BROKEN
            return
        if self._key in _ARGUMENT_KEYS and self._name and character != '"':
            self._announce()
        self._value = JsonValue()
        self._text = []
        self._step = JsonCall._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        belongs, ended = self._value.take(character)
        if belongs:
            self._text.append(character)
            if self._streams:
                self._on_arguments(character)
        if ended:
            self._end_value("".join(self._text))
            self._step = JsonCall._after_value
            if not belongs:
                self._after_value(character)

    @property
    def _streams(self) -> bool:
        # Arguments that are written as a JSON string have to be decoded as a whole.
        return self._key in _ARGUMENT_KEYS and self.named and self._text[0] != '"'

    def _announce(self) -> None:
        if not self.named:
            self.named = True
            self._on_name(self._name)

    def _end_value(self, text: str) -> None:
        if self._key == "name" and not self._name:
            name = _decode_string(text)
            if not name:
                self.state = CallState.BROKEN
                return
            self._name = name
            if self._argued or not self._needs_arguments:
                self._announce()
                self._argue(self._early)
        elif self._key in _ARGUMENT_KEYS and self._streams:
            self._argued = True
        elif self._key in _ARGUMENT_KEYS:
            # Clients parse the arguments of every call; what is no JSON text is theirs to see.
            decoded = _decode_string(text) if text.startswith('"') else text
            written = text if decoded is None else decoded or "{}"
            self._argued = True
            if self._name:
                self._announce()
                self._argue(written)
            else:
                self._early = written

    def _argue(self, written: str) -> None:
        if written:
            self._on_arguments(written)

    def _after_value(self, character: str) -> None:
        if self.state is CallState.BROKEN:
            return
        if character == ",":
            self._step = JsonCall._before_key
        elif character == "}":
            self._end()
        elif character not in _SPACE:
            self.state = CallState.BROKEN

    def _end(self) -> None:
        self.state = CallState.DONE if self.named else CallState.BROKEN
        if self.named and not self._argued:
            # Clients parse the arguments of every call.
            self._on_arguments("{}")


def _decode_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None
