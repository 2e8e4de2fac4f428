"""Renews slow.txt from what pytest's cache keeps of a whole run, `make test`: `python -m tests.slow`."""

from __future__ import annotations

import json
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# What `make test-fast` runs.
_FOLDERS = ("tests/unit/", "tests/contract/", "tests/architecture/")


def main() -> None:
    """Fails where nothing was measured yet."""
    names = json.loads((TESTS.parent / ".pytest_cache/v/millrace/slow").read_text())
    functions = sorted({name.partition("[")[0] for name in names if name.startswith(_FOLDERS)})
    (TESTS / "slow.txt").write_text("".join(f"{name}\n" for name in functions))
    print(f"{len(functions)} slow functions")


if __name__ == "__main__":
    main()
