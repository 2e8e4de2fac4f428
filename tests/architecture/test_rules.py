"""Rules that import-linter cannot express; `make lint` checks the import graph itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import (
    PACKAGES,
    ROOT,
    Source,
    committed_files,
    imported_modules,
    python_sources,
)

# --- time, devices and wires stay out of the engine's bookkeeping -----------------------------------------

PURE = ("engine/types", "engine/policy", "engine/scheduler", "engine/kv")
_IMPURE = {"torch", "grpc", "time", "datetime", "asyncio", "threading", "random", "socket", "google"}


def _packages(source: Source) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(source.tree)}


def test_bookkeeping_is_pure() -> None:
    used = {source.name: sorted(_packages(source) & _IMPURE) for source in python_sources(*PURE)}
    assert not {name: found for name, found in used.items() if found}, "time and devices are arguments here"


# --- proto classes stay at the border ---------------------------------------------------------------------

_PROTO_PACKAGES = {"millrace", "envoy_api"}
# Where messages are built and read: servicers, converters, clients of other services, and the mains that
# register servicers. Everything else sees domain types.
_BORDER = (
    "contract/proto/",
    "services/",
    "gateway/app.py",
    "gateway/auth/verifier.py",
    "gateway/edge.py",
    "gateway/engines/adapters.py",
    "gateway/engines/attachment.py",
    "gateway/engines/mailbox.py",
    "gateway/faces/grpc/",
    "gateway/limits/servicer.py",
    # Signs the request context, which is a message.
    "gateway/auth/verifier.py",
    "runtime/context.py",
    # Reads a file that is one.
    "checkpoint/sentencepiece.py",
    "gateway/tokenizer/",
    "tokenizer_svc/messages/",
    # Prepares a request as it came: a large one is not looked at before a worker does.
    "tokenizer_svc/prompt/",
    "tokenizer_svc/service/",
    "engine/__main__.py",
    "engine/service/",
)


def test_proto_classes_stay_at_the_border() -> None:
    inside = [source for source in python_sources(*PACKAGES) if not source.name.startswith(_BORDER)]
    assert not [source.name for source in inside if _packages(source) & _PROTO_PACKAGES], (
        "these use proto classes; convert them in a servicer or in convert.py, or add a new border here"
    )


# --- the environment is read in one place per package -----------------------------------------------------


def _reads_environment(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in ast.walk(tree)
    )


def _may_read_environment(source: Source) -> bool:
    # The supervisor and the command line are the mains of the local stack: they pass the environment on.
    mains = ("services/cli/", "services/supervisor/", "services/bench/")
    return source.name.endswith("config.py") or source.is_main or source.name.startswith(mains)


def test_environment_is_read_by_configs_and_mains_only() -> None:
    others = [source for source in python_sources(*PACKAGES) if not _may_read_environment(source)]
    assert not [source.name for source in others if _reads_environment(source.tree)], (
        "these read the environment; add a key to the package's config instead"
    )


# --- words ------------------------------------------------------------------------------------------------

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
_MACHINE = re.compile(r"(?<![\w.])/(?:work|home/\w+|root|Users/\w+)/")
_VAGUE_FILE = re.compile(r"(^|/)(utils?|helpers?|misc|common)(\.py|/)")
_VAGUE_CLASS = re.compile(r"(Manager|Helper|Utils?)$")
_TEXT = (".py", ".md", ".toml", ".yaml", ".yml", ".proto", ".cpp", ".h", ".sh", ".txt")


def _text_files() -> list[str]:
    own_rules = {"tests/architecture/test_rules.py"}
    return [
        name
        for name in committed_files()
        if name.endswith(_TEXT) and not name.startswith("contract/stubs/") and name not in own_rules
    ]


def test_a_class_name_occurs_once() -> None:
    found: dict[str, list[str]] = {}
    for source in python_sources(*PACKAGES, "models"):
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(source.name)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}, (
        "a reader looks a class up by its name: give each a name of its own"
    )


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in _text_files()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if _UNFINISHED.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in _text_files()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if _MACHINE.search(line)
    ]
    assert not found, "\n".join(found)


def test_names_say_what_things_are() -> None:
    files = [
        name
        for name in committed_files()
        if name.endswith(".py") and _VAGUE_FILE.search(name) and not name.startswith("contract/stubs/")
    ]
    classes = [
        f"{source.name}: class {node.name}"
        for source in python_sources(*PACKAGES)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and _VAGUE_CLASS.search(node.name)
    ]
    assert not files + classes


# --- every package explains itself ------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_design_page(package: str) -> None:
    page = ROOT / package / "DESIGN.md"
    assert page.is_file(), f"{package}/DESIGN.md is missing"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 200, "one page, not a book"


def test_every_module_says_why_it_exists() -> None:
    written = [source for source in python_sources(*PACKAGES) if source.text.strip()]
    assert not [source.name for source in written if not ast.get_docstring(source.tree)]


# Tests whose subject is a time that passes: how long a peer hangs, or how often a probe asks.
_TIME_IS_THE_SUBJECT = {
    "tests/architecture/road.py travel",
    "tests/containers/test_pods.py test_pods_of_two_models_are_found_under_one_name",
    "tests/e2e/test_books.py hang",
    "tests/unit/gateway/limits/test_hangs.py test_a_loop_that_stands_still_is_not_the_stores_silence",
}


def _sleeps_outside_loops(node: ast.AST, function: str = "") -> Iterator[str]:
    """Functions that sleep once, and so hope that something has happened by then."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.While):
            continue
        called = child.func if isinstance(child, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name.endswith("sleep") and [ast.unparse(each) for each in child.args] != ["0"]:
            yield function
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _sleeps_outside_loops(child, child.name if is_function else function)


def test_no_test_waits_for_the_clock() -> None:
    """It waits for a condition, in a loop that looks for it."""
    found = {
        f"{source.name} {function}"
        for source in python_sources("tests")
        for function in _sleeps_outside_loops(source.tree)
    }
    assert found == _TIME_IS_THE_SUBJECT
