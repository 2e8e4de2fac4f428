"""A file is read in one sitting, a function on one screen: hard limits fail, soft ones are listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, python_sources

# Lines: where a reader should be told why, and where it ends.
SOFT_FILE, HARD_FILE = 300, 600
SOFT_FUNCTION, HARD_FUNCTION = 40, 80
# Kernels are as long as they must be.
_KERNELS = ("kernels/", "tests/kernels/")


def _measured() -> tuple[Source, ...]:
    return tuple(source for source in python_sources() if not source.name.startswith(_KERNELS))


def _functions(source: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{source.name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_no_file_exceeds_the_hard_limit() -> None:
    sizes = {source.name: len(source.text.splitlines()) for source in _measured()}
    assert not {name: lines for name, lines in sizes.items() if lines > HARD_FILE}


def test_no_function_exceeds_the_hard_limit() -> None:
    sizes = dict(each for source in _measured() for each in _functions(source))
    assert not {name: lines for name, lines in sizes.items() if lines > HARD_FUNCTION}


def test_size_report() -> None:
    """Lists what is longer than it should be; shown with `pytest -rP`."""
    files = {source.name: len(source.text.splitlines()) for source in _measured()}
    functions = dict(each for source in _measured() for each in _functions(source))
    long_files = {name: lines for name, lines in files.items() if lines > SOFT_FILE}
    long_functions = {name: lines for name, lines in functions.items() if lines > SOFT_FUNCTION}
    for name, lines in sorted((long_files | long_functions).items(), key=lambda each: -each[1]):
        print(f"{lines:5d}  {name}")
    # A codebase of long functions is not saved by none of them reaching the hard limit.
    assert len(long_functions) <= 0.05 * len(functions), (
        f"{len(long_functions)} of {len(functions)} functions"
    )
