"""Parsers of the formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from contract.formats import BRACED, JSON, SECTIONS, TAGGED, BracedForm, JsonForm, SectionForm, TaggedForm
from gateway.text.tool_calls.addressed import AddressedParser
from gateway.text.tool_calls.json_objects import JsonObjectsParser
from gateway.text.tool_calls.llama3 import TAG, Llama3Parser
from gateway.text.tool_calls.mistral import ARGUMENTS, CALL_ID, MARKER, MistralParser
from gateway.text.tool_calls.parser import CallIds, ToolCallParser
from gateway.text.tool_calls.sectioned import SectionedParser
from gateway.text.tool_calls.tagged import TaggedParser
from gateway.text.tool_calls.values import ToolTypes
from gateway.text.tool_calls.whole import PYTHON_CLOSE, PYTHON_OPEN, BracedParser, PythonicParser

Parsers = Callable[[CallIds, ToolTypes], ToolCallParser]
_FORMS: Mapping[str, BracedForm | JsonForm | SectionForm | TaggedForm] = {
    **BRACED,
    **JSON,
    **SECTIONS,
    **TAGGED,
}
_MISTRAL = ("mistral", "mistral_v11", "mistral_v13")


def _untyped(kind: Callable[[CallIds], ToolCallParser], call_id: CallIds, tools: ToolTypes) -> ToolCallParser:
    return kind(call_id)


PARSERS: Mapping[str, Parsers] = {
    **{name: partial(BracedParser, form) for name, form in BRACED.items()},
    **{name: partial(_untyped, partial(JsonObjectsParser, form)) for name, form in JSON.items()},
    **{name: partial(_untyped, partial(SectionedParser, form)) for name, form in SECTIONS.items()},
    **{name: partial(TaggedParser, form) for name, form in TAGGED.items()},
    **dict.fromkeys(_MISTRAL, partial(_untyped, MistralParser)),
    "llama3": Llama3Parser,
    "llama4": PythonicParser,
    "harmony": partial(_untyped, AddressedParser),
}
_MARKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_MISTRAL, (MARKER, ARGUMENTS, CALL_ID)),
    "llama3": (TAG,),
    "llama4": (PYTHON_OPEN, PYTHON_CLOSE),
}


def marks(name: str) -> tuple[str, ...]:
    """What the format is made of. Tokens in it are read even where the tokenizer calls them special."""
    form = _FORMS.get(name)
    if form is None:
        return _MARKS.get(name, ())
    return tuple(filter(None, (value for value in msgspec.structs.astuple(form) if isinstance(value, str))))
