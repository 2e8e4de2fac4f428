"""The figures that the project watches, of the whole repository: `python -m tests.architecture.figures`.

Production code is what a deployment runs and somebody has written: no tests, no benchmarks, no stubs.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from tests.architecture.sources import (
    PACKAGES,
    ROOT,
    Source,
    committed_files,
    is_generated,
    python_sources,
)

# Named in as few files as can be: an option of a request, a number per choice that goes from the scheduler to
# the ledger, and the norm, with what its names begin: its struct, its kernels, the checkpoint's key.
OPTION = "min_p"
STATISTIC = "recomputed_tokens"
NORM = r"(?:rms_norm|RmsNorm)\w*"
# A feature of layers. A family that is the first to have it touches these files and its own.
FEATURE = "qk_norm"
_FAMILIES = "engine/model/families/"

_LANGUAGES = (".py", ".proto", ".cc", ".cpp", ".h")
# Kernels take what they compute on; their launchers do the same.
KERNELS = "kernels/"
_LONG = 80


def production_files() -> list[str]:
    """Files of programs, written by hand."""
    folders = tuple(f"{package}/" for package in (*PACKAGES, "proto"))
    return [
        name
        for name in committed_files()
        if name.startswith(folders) and name.endswith(_LANGUAGES) and not is_generated(name)
    ]


def text_of(name: str) -> str:
    """A committed file's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def lines_by_room(names: Sequence[str]) -> Counter[str]:
    """Lines of the first two folders of each path, or of the first where files lie in it."""
    found: Counter[str] = Counter()
    for name in names:
        folders = name.split("/")[:-1]
        found["/".join(folders[:2])] += len(text_of(name).splitlines())
    return found


def naming(word: str) -> list[str]:
    """Production files in which the word stands."""
    pattern = re.compile(rf"\b{word}\b")
    return [name for name in production_files() if pattern.search(text_of(name))]


def of_one_family(word: str) -> list[str]:
    """Production files in which a feature of layers stands, of the families that have it the first."""
    files = naming(word)
    return [name for name in files if not name.startswith(_FAMILIES)] + [
        name for name in files if name.startswith(_FAMILIES)
    ][:1]


def functions(sources: Sequence[Source]) -> Iterator[tuple[str, int, int]]:
    """(place, lines, parameters) of every function."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(each.arg not in ("self", "cls") for each in arguments)
                assert node.end_lineno is not None
                place = f"{source.name}:{node.lineno} {node.name}"
                yield place, node.end_lineno - node.lineno + 1, count


def percentile_99(sizes: Sequence[int]) -> int:
    """The size that one function in a hundred passes."""
    return sorted(sizes)[len(sizes) * 99 // 100]


def import_circles(sources: Sequence[Source]) -> list[list[str]]:
    """Groups of modules that reach each other by imports, those for types alone included."""
    modules = {source.module: source for source in sources}
    edges = {name: sorted(_imported(source, modules)) for name, source in modules.items()}
    return [sorted(group) for group in _strong_components(edges) if len(group) > 1]


def _imported(source: Source, modules: dict[str, Source]) -> set[str]:
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {name for name in found if name in modules and name != source.module}


def _strong_components(edges: dict[str, list[str]]) -> list[list[str]]:
    """Tarjan's, without recursion."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for root, direct in edges.items():
        work = [(root, iter(direct))] if root not in index else []
        while work:
            name, rest = work[-1]
            if name not in index:
                index[name] = lowest[name] = len(index)
                stack.append(name)
            for inner in rest:
                if inner not in index:
                    work.append((inner, iter(edges[inner])))
                    break
                if inner in stack:
                    lowest[name] = min(lowest[name], lowest[inner])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == index[name]:
                    at = stack.index(name)
                    components.append(stack[at:])
                    del stack[at:]
    return components


def main() -> None:
    """Prints them all."""
    names = production_files()
    rooms = lines_by_room(names)
    for room, lines in sorted(rooms.items()):
        print(f"{lines:7,}  {room}")
    print(f"{sum(rooms.values()):7,}  production lines by hand")
    sources = python_sources(*PACKAGES)
    measured = list(functions(sources))
    sizes = [lines for _, lines, _ in measured]
    place, longest, _ = max(measured, key=lambda each: each[1])
    print(f"{longest:7,}  longest function ({place})")
    print(f"{sum(size > _LONG for size in sizes):7,}  functions of more than {_LONG} lines")
    print(f"{percentile_99(sizes):7,}  lines of a function, 99th percentile")
    place, _, most = max(
        (each for each in measured if not each[0].startswith(KERNELS)), key=lambda each: each[2]
    )
    print(f"{most:7,}  most parameters outside kernels ({place})")
    circles = import_circles(sources)
    print(f"{len(circles):7,}  circles of imports, for types alone included")
    for circle in circles:
        print(f"{'':9}{' '.join(circle)}")
    for what, word in (("option", OPTION), ("per-choice statistic", STATISTIC), ("norm", NORM)):
        files = naming(word)
        print(f"{len(files):7,}  files that name {word} ({what}): {' '.join(files)}")
    files = of_one_family(FEATURE)
    num_rooms = len({PurePath(name).parent for name in files})
    print(f"{len(files):7,}  files in {num_rooms} rooms for a family with {FEATURE}: {' '.join(files)}")


if __name__ == "__main__":
    main()
