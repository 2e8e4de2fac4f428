"""Texts that a model is calibrated on: read from a person's file, and checked line by line.

JSONL has `text` or `messages` in each line; other keys are left alone. Everything else is plain text, cut at
blank lines into pieces of a few paragraphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import ConfigError
from services.gate import generated

BUNDLED = "bundled"
# Each of so many texts is kept from the calibration, for the gate.
HELD_OUT = 8
# With fewer, all of them calibrate, and the gate has generated texts.
LEAST_TO_DIVIDE = 16
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Characters of a piece of plain text, about 500 tokens.
_PIECE_CHARS = 2000
_BUNDLED_SEED, _BUNDLED_TEXTS = 20_001, 96


class CalibrationText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text, or one conversation, which the child renders by the model's own template."""

    line: int
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()


class CalibrationSet(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds: texts to calibrate on, and those that only the gate sees."""

    name: str
    texts: tuple[CalibrationText, ...]
    held_out: tuple[CalibrationText, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the texts that calibrate."""
        return hashlib.sha256(self.encoded()).hexdigest()

    def encoded(self) -> bytes:
        """A JSON object a line, as the child reads them."""
        return b"".join(msgspec.json.encode(text) + b"\n" for text in self.texts)


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_calibration(named: str, *, divided: bool, most: int) -> CalibrationSet:
    """The texts of a file, or the bundled ones; `most` is how many may calibrate. `divided`: some are kept
    for the gate. Raises ConfigError that names file, line and remedy.
    """
    if named == BUNDLED:
        return CalibrationSet(name=BUNDLED, texts=_bundled()[:most])
    path = Path(named)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--calibration {named}: {error.strerror or error}; name a file of texts"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from error
    texts = _json_lines(path, content) if path.suffix in (".jsonl", ".json") else _pieces(content)
    if not texts:
        raise ConfigError(
            f"{path}: it holds no text to calibrate on; write one JSON object a line, or plain text"
        )
    held: Sequence[CalibrationText] = ()
    if divided and len(texts) >= LEAST_TO_DIVIDE:
        held = texts[HELD_OUT - 1 :: HELD_OUT]
        kept = {text.line for text in held}
        texts = [text for text in texts if text.line not in kept]
    return CalibrationSet(name=path.name, texts=tuple(texts[:most]), held_out=tuple(held))


def _json_lines(path: Path, content: str) -> list[CalibrationText]:
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: {error}; a line is one JSON object with text or messages") from error
        found.append(_checked(row, number, where))
    return found


def _checked(row: _Row, number: int, where: str) -> CalibrationText:
    if (row.text is None) == (row.messages is None):
        raise ConfigError(f"{where}: give either text or messages")
    if row.text is not None:
        if not row.text.strip():
            raise ConfigError(f"{where}: text is empty; leave the line out")
        return CalibrationText(line=number, text=row.text)
    assert row.messages is not None, "one of both is there"
    if not row.messages:
        raise ConfigError(f"{where}: messages are empty; leave the line out")
    for index, message in enumerate(row.messages):
        if message.get("role") not in _ROLES:
            raise ConfigError(
                f"{where}: messages[{index}].role = {message.get('role')!r}; expected {', '.join(_ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise ConfigError(
                f"{where}: messages[{index}].content is no text; conversations of text calibrate"
            )
    return CalibrationText(line=number, messages=tuple(row.messages))


def _pieces(content: str) -> list[CalibrationText]:
    """Paragraphs put together up to a size, each piece with the line that it begins at."""
    found: list[CalibrationText] = []
    lines: list[str] = []
    begin, length = 1, 0

    def close() -> None:
        text = "\n".join(lines).strip()
        if text:
            found.append(CalibrationText(line=begin, text=text))

    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip() and length >= _PIECE_CHARS:
            close()
            lines, begin, length = [], number + 1, 0
            continue
        lines.append(line)
        length += len(line) + 1
    close()
    return found


def _bundled() -> tuple[CalibrationText, ...]:
    """Plain generated texts and questions: English, short, of many forms. Whoever has texts of the kind that
    will be served calibrates better on those.
    """
    texts = [line.text or "" for line in generated.lines_of("intrinsic", _BUNDLED_SEED, _BUNDLED_TEXTS)]
    asked = [
        line.prompt or ""
        for layer in ("tokens", "task", "behaviour")
        for line in generated.lines_of(layer, _BUNDLED_SEED, _BUNDLED_TEXTS // 3)
    ]
    both = [each for pair in zip(texts, asked, strict=True) for each in pair]
    return tuple(CalibrationText(line=number, text=text) for number, text in enumerate(both, 1))
