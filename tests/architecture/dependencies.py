"""Which distributions the suite's modules import, and which ones the project declares."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.sources import PACKAGES, ROOT, Source, python_sources

# Generated, and part of the suite.
_STUBS = ("millrace", "envoy_api")
_MISSING = {"ImportError", "ModuleNotFoundError"}


def declared(group: str | None = None) -> set[str]:
    """Names of the distributions in pyproject.toml: of the project, or of a dependency group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = project["dependency-groups"][group] if group else project["project"]["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines}


@cache
def _owners() -> dict[str, str]:
    """Module to the distribution that brings it."""
    owners: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        # `distribution.files` makes a path of each, which takes seconds for the large ones.
        for line in (distribution.read_text("RECORD") or "").splitlines():
            *folders, file = line.split(",", 1)[0].split("/")
            if file.endswith((".py", ".so", ".pyi")):
                stem = file.split(".")[0]
                owners[".".join(folders if stem == "__init__" else (*folders, stem))] = name
    return owners


def owner(module: str) -> str | None:
    """The distribution that a module is from; None for the standard library's and the suite's own."""
    parts = module.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] in (*PACKAGES, *_STUBS):
        return None
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    # What is not installed here is known by its first name.
    return next((_owners()[name] for name in candidates if name in _owners()), parts[0])


def imports(source: Source) -> Iterator[str]:
    """Modules that a file needs: not those that only types are from, nor those that it can do without."""
    yield from _imports(source.tree)


def _imports(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module), level=0):
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            children: Iterable[ast.AST] = node.orelse
        case ast.Try() if any(_catches_import_error(handler) for handler in node.handlers):
            children = (*node.handlers, *node.orelse, *node.finalbody)
        case _:
            children = ast.iter_child_nodes(node)
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        for child in children:
            yield from _imports(child)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    caught = ast.walk(handler.type) if handler.type else ()
    return any(isinstance(node, ast.Name) and node.id in _MISSING for node in caught)


def reached(starts: Iterable[str], without: Iterable[str] = ()) -> dict[str, Source]:
    """The suite's modules that these need, themselves included, by name."""
    sources = {source.module.removesuffix(".__init__"): source for source in python_sources(*PACKAGES)}
    found: dict[str, Source] = {}
    todo = list(starts)
    while todo:
        name = todo.pop()
        if name in sources and name not in found and name not in without:
            found[name] = sources[name]
            parts = name.split(".")
            todo += [".".join(parts[:length]) for length in range(1, len(parts))]
            for module in imports(sources[name]):
                # Of `from package import name` either may be the module.
                todo += [module, module.rpartition(".")[0]]
    return found
