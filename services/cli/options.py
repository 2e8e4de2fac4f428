"""Options that belong together, as one dataclass that a command takes as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, which takes dataclasses, as typer reads it: each field is an option of its own.

    Fields are annotated as typer's parameters are; their order, and the dataclasses', is that of the help.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type), "annotations name classes"
        groups[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        grouped = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **grouped)

    # Typer reads both the signature and the annotations.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call
