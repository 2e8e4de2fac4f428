"""What keeps a body from being text: bytes that are no UTF-8, and halves of surrogate pairs, which JSON can
write ("\\ud800" without the other half) and UTF-8 cannot. Programs that cut texts by UTF-16 units send them.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, NamedTuple

from contract.errors import MillraceError, invalid

# Escaped, or as bytes that look like UTF-8.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Bytes that are looked at together: the text of all of them is nowhere at once.
_SLICE_BYTES = 64 * 1024
# Characters of a key, and of the path that leads to it, that an error shows.
_MAX_KEY, _MAX_PATH = 80, 240


class _Place(NamedTuple):
    value: Any
    step: str
    outer: _Place | None


def check_utf8(body: bytes) -> None:
    """Raises UnicodeDecodeError. A JSON parser looks at the texts that it makes, and not at those that it
    leaves as they were written.
    """
    if body.isascii():
        return
    start = 0
    while start < len(body):
        end = start + _SLICE_BYTES
        try:
            start += codecs.utf_8_decode(body[start:end], "strict", end >= len(body))[1]
        except UnicodeDecodeError as error:
            error.start += start
            raise


def half_pair(body: bytes) -> MillraceError | None:
    """INVALID_ARGUMENT at the first field that has half of a pair, in its text or in a key; None where that
    is not what keeps the body from being JSON.
    """
    if _HALF.search(body) is None:
        return None
    try:
        value = json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    places = [_Place(value, "", None)]
    while places:
        place = places.pop()
        match place.value:
            case str(text):
                if at := _half_in(text):
                    return _refused(place, f"character {at}")
            case dict(fields):
                for key in fields:
                    if at := _half_in(key):
                        return _refused(place, f"of a key of it character {at}")
                inside = [_Place(each, f".{key[:_MAX_KEY]}", place) for key, each in fields.items()]
                places += reversed(inside)
            case list(items):
                inside = [_Place(each, f"[{index}]", place) for index, each in enumerate(items)]
                places += reversed(inside)
            case _:
                pass
    return None


def _half_in(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{error.start} ({ascii(text[error.start])[1:-1]})"
    return ""


def _refused(place: _Place, what: str) -> MillraceError:
    steps, outer = [place.step], place.outer
    while outer is not None:
        steps.append(outer.step)
        outer = outer.outer
    path = "".join(reversed(steps)).lstrip(".")[:_MAX_PATH]
    return invalid(
        path or "the body",
        f"{what} is half of a surrogate pair, which is no text; send the whole character, or \\ufffd for it",
    )
