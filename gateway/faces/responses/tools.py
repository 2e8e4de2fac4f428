"""Tools of the Responses API: what of them a model can be told, and how its calls are written.

A model knows functions. A custom tool, whose input is free text, stands as a function of one text; a
namespace stands in its functions' names. Calls are turned back by the same table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contract.chat import Tool, ToolChoice, ToolChoiceMode
from contract.errors import invalid, unsupported
from gateway.faces.bodies import Tolerance
from gateway.faces.options import json_text, tool_mode
from gateway.faces.responses.items import joined
from gateway.pipeline.validate import NAME

# Tools that agents offer whatever the server: the model may do without them, so that they are set aside with
# a warning; a choice that names one is refused.
SET_ASIDE = ("web_search", "web_search_preview", "image_generation", "tool_search")
# Characters of the name of a tool in a namespace: each of the two names may have 64.
MAX_JOINED_NAME = 64 + len("__") + 64
# Codex' name for the functions that stand in no namespace.
_DEFAULT_NAMESPACE = "functions"


class ToolFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class OfferedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool; `type` says which of the fields it has."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    # Of a namespace.
    tools: list[OfferedTool] | None = None
    defer_loading: bool | None = None


class ToolSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice that names a tool, or some."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ToolSelection] | None = None


TOOL_TOLERANCE = Tolerance({"tools": OfferedTool}, {OfferedTool: {"tools": OfferedTool}})
# What a model fills in of a custom tool.
_ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Called:
    """How calls of a function are told."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request: what the model is told, and what its calls are, by the functions' names."""

    tools: tuple[Tool, ...] = ()
    calls: Mapping[str, Called] = field(default_factory=dict)
    # Where each stands in the body, by the functions' names.
    paths: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def called(self, name: str) -> Called:
        """What a call of this function is; a name that nobody offered is the model's own."""
        return self.calls.get(name) or Called(name)


def toolbox(offered: Sequence[OfferedTool]) -> Toolbox:
    """The tools; raises INVALID_ARGUMENT or UNSUPPORTED_FIELD by the path of the field."""
    collector = _Collector()
    for index, tool in enumerate(offered):
        collector.add(tool, f"tools[{index}]")
    return Toolbox(tuple(collector.tools), collector.calls, collector.paths, tuple(collector.warnings))


class _Collector:
    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.calls: dict[str, Called] = {}
        self.paths: dict[str, str] = {}
        self.warnings: list[str] = []

    def add(self, tool: OfferedTool, path: str, namespace: str = "") -> None:
        match tool.type:
            case "function":
                self._put(tool, path, namespace, tool.description or "", json_text(tool.parameters))
            case "custom":
                self._put(
                    tool, path, namespace, _described(tool), json_text(_ONE_TEXT), custom=_form(tool, path)
                )
            case "namespace" if not namespace:
                name = "" if tool.name == _DEFAULT_NAMESPACE else _name(tool, path)
                for index, inner in enumerate(tool.tools or ()):
                    self.add(inner, f"{path}.tools[{index}]", name)
            case kind if kind in SET_ASIDE:
                self.warnings.append(
                    f"{path} has no effect: {kind} is not served, so the model is not told of it"
                )
            case kind:
                remedy = "use function or custom, and run it yourself"
                raise unsupported(f"{path}.type", remedy, f"{kind!r} is not served")

    def _put(
        self,
        tool: OfferedTool,
        path: str,
        namespace: str,
        description: str,
        schema: str,
        *,
        custom: ToolFormat | None = None,
    ) -> None:
        name = _name(tool, path)
        full = joined(namespace, name)
        if full in self.calls:
            raise invalid(f"{path}.name", f"{full!r} is there twice")
        self.calls[full], self.paths[full] = Called(name, namespace, custom is not None), path
        self.tools.append(
            Tool(
                name=full,
                description=description,
                parameters_json=schema,
                strict=bool(tool.strict),
                input_syntax=(custom and custom.syntax) or "",
                input_grammar=(custom and custom.definition) or "",
            )
        )


def _form(tool: OfferedTool, path: str) -> ToolFormat:
    """The form of a custom tool's input; raises INVALID_ARGUMENT for what is none."""
    form = tool.format or ToolFormat("text")
    if form.type not in ("text", "grammar"):
        raise invalid(f"{path}.format.type", f"{form.type!r} is not one of text, grammar")
    if form.type == "grammar" and form.syntax not in ("lark", "regex"):
        raise invalid(f"{path}.format.syntax", f"{form.syntax!r} is not one of lark, regex")
    if form.type == "grammar" and not form.definition:
        raise invalid(f"{path}.format.definition", "it is required with this type")
    return form if form.type == "grammar" else ToolFormat("text")


def _described(tool: OfferedTool) -> str:
    """What a model is told of a custom tool."""
    description, form = tool.description or "", tool.format
    if form is not None and form.type == "grammar":
        description += f"\n\nThe input follows this {form.syntax} grammar:\n{form.definition}"
    return description.lstrip("\n")


def _name(tool: OfferedTool, path: str) -> str:
    if not tool.name:
        raise invalid(f"{path}.name", "it is required")
    if not NAME.fullmatch(tool.name):
        problem = f"{tool.name[:80]!r} is not a name; use 1 to 64 of letters, digits, '_' and '-'"
        raise invalid(f"{path}.name", problem)
    return tool.name


def chosen(box: Toolbox, choice: str | ToolSelection | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, which are those that the model sees, and whether one must be."""
    if choice is None:
        return box.tools, ToolChoice()
    if isinstance(choice, str):
        return box.tools, ToolChoice(tool_mode(choice, "tool_choice"))
    if choice.type != "allowed_tools":
        return box.tools, ToolChoice(ToolChoiceMode.NAMED, _chosen_name(box, choice, "tool_choice"))
    if not choice.tools:
        raise invalid("tool_choice.tools", "it is empty; send tool_choice none where no tool may be called")
    names = {
        _chosen_name(box, each, f"tool_choice.tools[{index}]") for index, each in enumerate(choice.tools)
    }
    mode = tool_mode(choice.mode or "auto", "tool_choice.mode")
    return tuple(tool for tool in box.tools if tool.name in names), ToolChoice(mode)


def _chosen_name(box: Toolbox, choice: ToolSelection, path: str) -> str:
    if choice.type not in ("function", "custom"):
        raise unsupported(f"{path}.type", "name a function or custom tool", f"{choice.type!r} is not served")
    known = box.calls.get(choice.name or "")
    if known is None or known.is_custom != (choice.type == "custom"):
        problem = f"{choice.name!r} is no {choice.type} tool of this request; declare it in tools, too"
        raise invalid(f"{path}.name", problem)
    return choice.name or ""


def field_parts(tools: Sequence[Tool], box: Toolbox) -> dict[str, str]:
    """What the services behind call the fields of these tools, and where they stand in the body."""
    parts = {}
    for index, tool in enumerate(tools):
        path = box.paths[tool.name].removeprefix("tools")
        for name, own in (
            ("input_grammar", "format.definition"),
            ("parameters", "parameters"),
            ("name", "name"),
        ):
            parts[f"[{index}].function.{name}"] = f"{path}.{own}"
    return parts


def count_tools(offered: Sequence[OfferedTool]) -> int:
    """Tools, those of namespaces included."""
    return sum(1 + len(each.tools or ()) for each in offered)
