"""Figures on disk as soon as they are known: a crash later on loses nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Report:
    """One JSON file: title, machine, rows."""

    def __init__(self, path: Path, title: str, machine: dict[str, Any]) -> None:
        self._path = path
        self._began = time.monotonic()
        self._content: dict[str, Any] = {
            "title": title,
            "machine": machine,
            "finished": False,
            "seconds": 0.0,
            "facts": {},
            "rows": [],
        }
        self._write()

    def fact(self, **facts: Any) -> None:
        """Something about the whole run."""
        self._content["facts"] |= facts
        self._write()

    @property
    def num_failed(self) -> int:
        """Rows that say why they could not be measured."""
        return sum("failed" in row for row in self._content["rows"])

    def row(self, **fields: Any) -> None:
        """One measurement, printed as well."""
        self._content["rows"].append({key: _rounded(value) for key, value in fields.items()})
        self._write()
        print("  " + ", ".join(f"{key} {_shown(value)}" for key, value in fields.items()), flush=True)

    def finish(self) -> None:
        """Nothing is missing."""
        self._content["finished"] = True
        self._write()

    def _write(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._began, 1)
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self._path)


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
