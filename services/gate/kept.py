"""Answers on disk: what was asked is not asked again after an interruption, and of a baseline never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.gate.cases import ServerAnswer


class _KeptLine(msgspec.Struct, frozen=True, array_like=True):
    key: str
    answer: ServerAnswer


class KeptAnswers:
    """Answers of one server by what was asked, in a file to which lines are added.

    A last line that was cut is left out and asked again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        whole = 0
        self._answers: dict[str, ServerAnswer] = {}
        for line, end in _lines(path):
            try:
                found = msgspec.json.decode(line, type=_KeptLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            self._answers[found.key] = found.answer
            whole = end
        self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(whole)
        self._file.seek(whole)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> ServerAnswer | None:
        """The answer to what `key` names."""
        return self._answers.get(key)

    def put(self, key: str, answer: ServerAnswer) -> None:
        """Keeps an answer; it is on its way to the disk when this returns."""
        self._answers[key] = answer
        self._file.write(msgspec.json.encode(_KeptLine(key, answer)) + b"\n")
        self._file.flush()

    def close(self, *, delete: bool = False) -> None:
        """Lets the file go."""
        self._file.close()
        if delete:
            self._path.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines, and where each ends."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield line, end
