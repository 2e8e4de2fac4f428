"""The project's own sources as the architecture tests see them: every committed file, parsed once."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILES = (ROOT / "Makefile", *sorted((ROOT / "make").glob("*.mk")))
PACKAGES = (
    *("contract", "runtime", "checkpoint", "kernels", "observability"),
    *("gateway", "tokenizer_svc", "engine", "services"),
)
_GENERATED = "contract/stubs/"


@dataclass(frozen=True)
class Source:
    """One Python file. `name` is relative to the repository."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted module name."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def is_main(self) -> bool:
        """Whether the file is started as a program."""
        return self.name.endswith("__main__.py") or 'if __name__ == "__main__"' in self.text


def is_generated(name: str) -> bool:
    """Whether nobody wrote the file."""
    return name.startswith(_GENERATED)


@cache
def committed_files() -> tuple[str, ...]:
    """Names of all committed files that still exist."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return tuple(name for name in listed.split("\0") if name and (ROOT / name).is_file())


@cache
def python_sources(*folders: str) -> tuple[Source, ...]:
    """Committed Python files below `folders`, or all of them; generated stubs are left out."""
    sources = []
    for name in committed_files():
        inside = not folders or any(name.startswith(f"{folder}/") for folder in folders)
        if name.endswith(".py") and inside and not is_generated(name):
            text = (ROOT / name).read_text(encoding="utf-8")
            sources.append(Source(name, text, ast.parse(text, name)))
    return tuple(sources)


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module that is imported anywhere in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
