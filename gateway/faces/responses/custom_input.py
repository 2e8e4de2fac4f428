"""The free text of a custom tool's call, out of the JSON that the model writes it in, as it comes."""

from __future__ import annotations

import re

import msgspec

_BEGINS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The shortest beginning that says what is not of this form.
_MAY_BEGIN = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?\Z')
# Text that can be decoded by itself: no escape that is begun only, no half of a surrogate pair.
_WHOLE = re.compile(
    r"(?:[^\"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


class CustomInput:
    """Reads `{"input": "..."}` in pieces. What the model wrote in another form is the input as it stands."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        # What is not decoded yet.
        self._held = ""
        # None: not known yet whether it is of this form.
        self._is_ours: bool | None = None
        self._closed = False
        self._told: list[str] = []

    def feed(self, piece: str) -> str:
        """Text that is certain after this piece of the JSON."""
        self._raw.append(piece)
        self._held += piece
        if self._is_ours is None:
            begins = _BEGINS.match(self._held)
            if begins:
                self._is_ours, self._held = True, self._held[begins.end() :]
            elif not _MAY_BEGIN.match(self._held):
                self._is_ours = False
        return self._tell(self._decode()) if self._is_ours and not self._closed else ""

    def finish(self) -> str:
        """What was held back."""
        if self._is_ours:
            return ""
        return self._tell("".join(self._raw))

    @property
    def text(self) -> str:
        """All that was told."""
        return "".join(self._told)

    def _decode(self) -> str:
        whole = _WHOLE.match(self._held)
        end = 0 if whole is None else whole.end()
        text, self._held = self._held[:end], self._held[end:]
        self._closed = self._held.startswith('"')
        # Models write line ends into texts as they are, which JSON does not allow.
        strict = re.sub(r"[\x00-\x1f]", lambda found: f"\\u{ord(found[0]):04x}", text)
        try:
            return msgspec.json.decode(f'"{strict}"', type=str)
        except msgspec.DecodeError:
            # An escape that JSON does not know stands for itself.
            return text

    def _tell(self, text: str) -> str:
        if text:
            self._told.append(text)
        return text
