"""What several APIs ask for in the same words: how hard to think, labels of the ledger, names of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contract.chat import ToolChoiceMode
from contract.efforts import EFFORT, EFFORTS, NO_EFFORT
from contract.errors import invalid, unsupported
from gateway.pipeline.validate import MAX_METADATA_VALUE

# For the page of fields.
EFFORT_ACCEPTED = (
    "told to a template that takes it, and otherwise a budget: a share of the tier's, or of what "
    "`max_tokens` leave (`[gateway.efforts]`); a budget in tokens goes before it"
)
# Efforts that a model without thoughts makes as well.
_OF_ANY_MODEL = (NO_EFFORT, "minimal")


def thinking_options(thinks: bool, effort: str = "") -> dict[str, Any]:
    """Variables of a template: it knows the switch under one of these names. Without an `effort` the
    template has its own.
    """
    switch = {"enable_thinking": thinks, "thinking": thinks}
    return {**switch, EFFORT: effort} if effort else switch


def effort_options(
    effort: str | None, field: str, model: str, *, reasons: bool, given: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Variables of the template for an effort that was asked for in `field`, beside those that were `given`.

    Raises INVALID_ARGUMENT for an effort that nobody knows, and for a variable that says the opposite;
    UNSUPPORTED_FIELD where the model does not reason.
    """
    options = dict(given)
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise invalid(field, f"{effort!r} is not one of {', '.join(EFFORTS)}")
    if not reasons and effort not in _OF_ANY_MODEL:
        raise unsupported(field, "leave it out or send none", f"model {model!r} does not reason")
    # A switch that says the opposite is no accident.
    said = effort if reasons else NO_EFFORT
    for name, value in thinking_options(said != NO_EFFORT, said).items():
        if options.setdefault(name, value) != value:
            raise invalid(f"chat_template_kwargs.{name}", f"{field} is {effort!r}; give one of them")
    return options


def labels(metadata: Mapping[str, str] | None, **ids: str | None) -> dict[str, str]:
    """What is kept with the ledger entry: metadata, and the client's own ids of its users, by their fields,
    which are bounded like it.
    """
    found = dict(metadata or {})
    for name, value in ids.items():
        if value:
            if len(value) > MAX_METADATA_VALUE:
                raise invalid(name, f"{len(value)} characters; the limit is {MAX_METADATA_VALUE}")
            if found.get(name, value) != value:
                raise invalid(f"metadata.{name}", f"{name} says something else; give one of them")
            found[name] = value
    return found


def tool_mode(mode: str, field: str, modes: Sequence[str] = ("none", "auto", "required")) -> ToolChoiceMode:
    """Whether tools may be called; raises INVALID_ARGUMENT at `field` for another word than `modes`."""
    if mode not in modes:
        raise invalid(field, f"{mode!r} is not one of {', '.join(modes)}")
    return ToolChoiceMode(mode)


def json_text(value: Mapping[str, Any] | None) -> str:
    """A JSON object as text; "" for none."""
    return "" if value is None else msgspec.json.encode(value).decode()
