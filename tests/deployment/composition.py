"""Reads the compose files as `docker compose` would: merged, with variables filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.containerfile import REPOSITORY

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class MissingVariable(Exception):
    """A variable that the file demands is not set."""


class _Loader(yaml.SafeLoader):
    """Knows the compose specification's !override, which replaces instead of merging."""


class _Override(list[Any]):
    """A list that replaces the one of the file before."""


_Loader.add_constructor(
    "!override", lambda loader, node: _Override(loader.construct_sequence(node, deep=True))
)


def load(*names: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The named files, relative to the repository, each merged over the ones before it."""
    merged: dict[str, Any] = {}
    for name in names or ("docker-compose.yml",):
        text = Path(REPOSITORY / name).read_text()
        document = yaml.load(_fill(text, variables or {}), _Loader)
        merged = _merge(merged, document)
    return merged


def _fill(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == "-":
            return rest
        if operator == "?":
            raise MissingVariable(f"{name}: {rest}")
        return ""

    # Comments show how variables are used; they set nothing.
    return "\n".join(
        line if line.lstrip().startswith("#") else _VARIABLE.sub(value, line) for line in text.splitlines()
    )


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: _merge(base[key], over[key])
            if key in base and key in over
            else (over if key in over else base)[key]
            for key in {**base, **over}
        }
    if isinstance(base, list) and isinstance(over, list) and not isinstance(over, _Override):
        return [*base, *(item for item in over if item not in base)]
    return over


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a service as text."""
    return {name: str(value) for name, value in (service.get("environment") or {}).items()}
