"""Figures on disk as soon as they are known: a line of JSON per row, so that whatever ends the process loses
nothing but what was under way. Several processes may add to one file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


class Report:
    """The rows of one phase in FOLDER/gpu-LEASE.jsonl; with no path, as while kernels are compiled, nobody's.
    Those of a rehearsal say so.
    """

    def __init__(self, path: Path | None, phase: str, *, rehearses: bool = False) -> None:
        self._path = path
        self._marks: dict[str, Any] = {"phase": phase} | ({"rehearsed": True} if rehearses else {})
        self.num_wrong = self.num_failed = 0

    @property
    def folder(self) -> Path:
        """Where files lie that are to be kept."""
        return self._path.parent if self._path else Path()

    def row(self, **fields: Any) -> None:
        """One measurement, printed as well."""
        if self._path is None:
            return
        append(self._path, self._marks | fields)
        print("  " + ", ".join(f"{key} {_shown(value)}" for key, value in fields.items()), flush=True)

    def wrong(self, reason: str, **fields: Any) -> None:
        """A result that is not what it should be: no figure that comes after it is worth anything."""
        self.num_wrong += 1
        self.row(**fields, wrong=reason)

    def failed(self, error: Exception, **fields: Any) -> None:
        """Something that could not be measured; the rest can."""
        self.num_failed += 1
        self.row(**fields, failed=f"{type(error).__name__}: {str(error)[:400]}")


def append(path: Path, fields: dict[str, Any]) -> None:
    """One line, on the disk when this returns."""
    line = json.dumps({key: _rounded(value) for key, value in fields.items()}) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_rows(folder: Path) -> Rows:
    """All rows of all leases in a folder, in the order of the files' names. The last line of a file may have
    been cut off.
    """
    rows = []
    for path in sorted(folder.glob("gpu-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
