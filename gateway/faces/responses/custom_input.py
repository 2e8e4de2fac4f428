"""The free text of a custom tool's call, out of the JSON that the model writes it in, as it comes.

Models write JSON by hand: what is no escape stands for itself, and so does a quote that does not end the
text, so that nothing of an input is lost.
"""

from __future__ import annotations

import re

import msgspec

_SPACE = " \t\r\n"
# What stands before the text, but for white space, and between which characters that may stand.
_HEAD, _PARTS = '{"input":"', (0, 1, 8, 9)
_PLAIN = re.compile(r'[^"\\]+')
# An escape that is a character: no half of a surrogate pair.
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?"
)


class CustomInput:
    """Reads `{"input": "..."}` in pieces. What the model wrote in another form is the input as it stands."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        # Characters of the head that have come; None once it is known to be another form.
        self._num_head: int | None = 0
        # An escape that is begun.
        self._held = ""
        # A quote and what ends the object behind it: the end, unless more follows.
        self._end: list[str] = []
        self._told: list[str] = []

    def feed(self, piece: str) -> str:
        """Text that is certain after this piece of the JSON."""
        if self._num_head != len(_HEAD):
            self._raw.append(piece)
            piece = self._behind_head(piece)
        told: list[str] = []
        while piece:
            piece = self._behind_quote(piece, told) if self._end else self._in_text(piece, told)
        return self._tell("".join(told))

    def finish(self) -> str:
        """What was held back."""
        if self._num_head is not None:
            # An escape that is begun only is no character yet, and a head that is begun no input: the answer
            # was cut there.
            return ""
        return self._tell("".join(self._raw))

    @property
    def text(self) -> str:
        """All that was told."""
        return "".join(self._told)

    def _behind_head(self, piece: str) -> str:
        if self._num_head is None:
            return ""
        for position, character in enumerate(piece):
            if character == _HEAD[self._num_head]:
                self._num_head += 1
            elif character not in _SPACE or self._num_head not in _PARTS:
                self._num_head = None
                return ""
            if self._num_head == len(_HEAD):
                return piece[position + 1 :]
        return ""

    def _in_text(self, piece: str, told: list[str]) -> str:
        """Reads up to a quote, and returns the rest."""
        text, self._held, at = self._held + piece, "", 0
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                told.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._end.append('"')
                return text[at + 1 :]
            elif escape := _ESCAPE.match(text, at):
                told.append(msgspec.json.decode(f'"{escape[0]}"', type=str))
                at = escape.end()
            elif _ESCAPE_BEGUN.fullmatch(text, at):
                self._held = text[at:]
                return ""
            else:
                told.append("\\")
                at += 1
        return ""

    def _behind_quote(self, piece: str, told: list[str]) -> str:
        for position, character in enumerate(piece):
            if character not in _SPACE and (character != "}" or "}" in self._end):
                # It did not end there.
                told += self._end
                self._end = []
                return piece[position:]
            self._end.append(character)
        return ""

    def _tell(self, text: str) -> str:
        if text:
            self._told.append(text)
        return text
