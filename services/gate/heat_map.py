"""The needles' heat map as PNG, for where neither a page nor a terminal is: lengths across, depths down.

Numbers are drawn with a font of its own, 3 by 5 points a character, so that nothing else is needed.
"""

from __future__ import annotations

import colorsys
import struct
import zlib
from collections.abc import Sequence

from services.gate.verdict import Cell

# Rows of three bits, from the top.
_GLYPHS = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 1, 1, 1),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
    "%": (5, 1, 2, 4, 5),
}
# In pixels: a point of the font, a character with its gap, a cell, and the room for numbers at its sides.
_POINT, _ADVANCE, _WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 3, 12, 96, 48, 64, 32, 2
_WHITE, _BLACK = (255, 255, 255), (26, 26, 26)
_Colour = tuple[int, int, int]


def to_png(cells: Sequence[Cell]) -> bytes:
    """A column for each length in tokens, a row for each depth, and the share that the candidate found."""
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    canvas = _Canvas(_LEFT + _WIDTH * len(lengths), _TOP + _HEIGHT * len(depths))
    for column, length in enumerate(lengths):
        canvas.write(str(length), _LEFT + _WIDTH * column + _WIDTH // 2, _TOP // 2, _BLACK)
    for row, depth in enumerate(depths):
        canvas.write(f"{depth:.0%}", _LEFT // 2, _TOP + _HEIGHT * row + _HEIGHT // 2, _BLACK)
    for cell in cells:
        x, y = _LEFT + _WIDTH * lengths.index(cell.length), _TOP + _HEIGHT * depths.index(cell.depth)
        canvas.fill(x, y, _WIDTH - _GAP, _HEIGHT - _GAP, _colour(cell.candidate))
        canvas.write(f"{cell.candidate:.0%}", x + _WIDTH // 2, y + _HEIGHT // 2, _WHITE)
    return canvas.png()


def _colour(share: float) -> _Colour:
    """From red to green, as on the page."""
    red, green, blue = colorsys.hls_to_rgb(share / 3, 0.36, 0.6)
    return round(red * 255), round(green * 255), round(blue * 255)


class _Canvas:
    """Pixels of red, green and blue, white at first."""

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._rows = [bytearray(b"\xff" * 3 * width) for _ in range(height)]

    def fill(self, x: int, y: int, width: int, height: int, colour: _Colour) -> None:
        """A rectangle, from its upper left corner."""
        for row in self._rows[y : y + height]:
            row[3 * x : 3 * (x + width)] = bytes(colour) * width

    def write(self, text: str, x: int, y: int, colour: _Colour) -> None:
        """Digits and per cent, around a point."""
        left, top = x - len(text) * _ADVANCE // 2, y - 5 * _POINT // 2
        for number, character in enumerate(text):
            for row, bits in enumerate(_GLYPHS[character]):
                for column in range(3):
                    if bits & (4 >> column):
                        at = left + number * _ADVANCE + column * _POINT
                        self.fill(at, top + row * _POINT, _POINT, _POINT, colour)

    def png(self) -> bytes:
        """The file (PNG, third edition: 8 bits a channel, no filter)."""
        header = struct.pack(">IIBBBBB", self._width, len(self._rows), 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows), 9)
        chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
