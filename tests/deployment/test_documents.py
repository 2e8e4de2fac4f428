"""What the guides name exists: tests, settings, metrics, commands and files."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from observability.emit import names
from services.cli.app import app
from tests.deployment.containerfile import REPOSITORY
from tests.deployment.settings import TABLES

OPERATIONS = (REPOSITORY / "docs/operations.md").read_text()
THREATS = (REPOSITORY / "docs/threat-model.md").read_text()

# The guide is about services, not about the supervisor of a workstation.
_TABLES = {name: kind for name, kind in TABLES.items() if name != "supervisor"}


def _keys(kind: type[msgspec.Struct]) -> set[str]:
    """Every key of a table and of the tables in it, as the last part of its path."""
    found: set[str] = set()
    for field in msgspec.structs.fields(kind):
        found.add(field.name)
        for inner in (field.type, *get_args(field.type)):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found |= _keys(inner)
    return found


ALL_KEYS = set().union(*map(_keys, _TABLES.values()))


def _resolve(path: str) -> Any:
    table, *rest = path.split(".")
    kind: Any = _TABLES[table]
    for part in rest:
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        assert part in fields, f"{path}: no {part}"
        kind = fields[part]
    return kind


@pytest.mark.parametrize("reference", sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", THREATS))))
def test_every_defence_names_a_test_that_exists(reference: tuple[str, str]) -> None:
    path, function = reference
    assert re.search(rf"def {function}\(", (REPOSITORY / path).read_text()), reference


def test_every_threat_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in THREATS.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(rows) > 15
    for row in rows:
        assert "tests/" in row or "not by a test" in row, row


# A program, settings of others, and columns of `millrace usage`.
_OTHERS = {"pg_dump", "always_on", "always_off", "best_effort", "unclaimed_tokens", "engine_cost"}


def test_settings_in_the_guide_exist() -> None:
    paths = re.findall(rf"`((?:{'|'.join(map(re.escape, _TABLES))})\.[a-z_.]+)(?: = [^`]*)?`", OPERATIONS)
    assert len(paths) > 5
    for path in paths:
        _resolve(path)
    for key in re.findall(r"`([a-z]+_[a-z_]+)(?: = [^`]*)?`", OPERATIONS):
        if not key.startswith("millrace_"):
            assert key in ALL_KEYS | _OTHERS | set(names.Cause), key


def test_metrics_in_the_guide_exist() -> None:
    for name in re.findall(r"`(millrace_[a-z_]+)`", OPERATIONS):
        # Compose's volumes begin alike.
        assert name in names.METRICS or name == "millrace_secrets", name


def test_commands_in_the_guide_exist() -> None:
    known = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for name in re.findall(r"`millrace ([a-z]+)", OPERATIONS):
        assert name in known, name


def test_files_in_the_guides_exist() -> None:
    for text in (OPERATIONS, THREATS):
        for path in re.findall(r"(?:-f |`|-k )([\w./-]+/[\w./-]+|[\w.-]+\.yml)\b", text):
            if not path.startswith(("localhost", "http")) and "<" not in path:
                assert (REPOSITORY / path).exists(), path


def test_the_numbers_of_the_guide_are_those_of_the_files() -> None:
    jaeger = (REPOSITORY / "observability/jaeger/config.yaml").read_text()
    assert "max_traces: 100000" in jaeger
    compose = (REPOSITORY / "docker-compose.yml").read_text()
    assert "retention.time=15d" in compose
