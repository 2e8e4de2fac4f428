"""What becomes of every field of the HTTP APIs, as tables of Markdown, from what the faces declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from gateway.faces.anthropic import bodies
from gateway.faces.anthropic import fields as anthropic
from gateway.faces.openai import chat, completions
from gateway.faces.openai import fields as openai
from gateway.faces.responses import fields as responses
from gateway.faces.responses import requests
from gateway.faces.responses.answer_types import ID_PREFIXES
from gateway.faces.unserved import Unserved

_HEAD = """## Fields

What becomes of each field of a request's body. Any other field is refused by its name, except inside of
messages, blocks and tools, where strange keys are ignored and named in `x-millrace-ignored`. What has no
effect is named in `x-millrace-warning`. Types and limits are in `/openapi.json`, `/v1/responses/openapi.json`
and `/v1/messages/openapi.json`.
"""
# Of each table.
BODIES: tuple[tuple[type[msgspec.Struct], ...], ...] = (
    (chat.ChatBody, completions.CompletionBody),
    (requests.ResponseBody,),
    (bodies.MessagesBody,),
)
_IDS = """Items of an answer have ids with the beginnings of OpenAI's own: {ids}.
OpenAI's server refuses an item that comes back under another one, and a conversation may be taken there.
"""
# Their parts are told where the same kind stands first.
_TOLD_ELSEWHERE = ("system",)


def section() -> str:
    """The part of the page that no client has to be run for."""
    chats, asked, messages = BODIES
    ids = ", ".join(f"`{prefix}` for {kind.replace('_', ' ')}" for kind, prefix in ID_PREFIXES.items())
    return "\n".join(
        (
            _HEAD,
            _table("`/v1/chat/completions` and `/v1/completions`", chats, openai.FIELDS, openai.ACCEPTED),
            _table("`/v1/responses`", asked, responses.FIELDS, responses.ACCEPTED),
            _IDS.format(ids=ids),
            _table("`/v1/messages`", messages, anthropic.FIELDS, anthropic.ACCEPTED),
        )
    )


def field_names(kind: type[msgspec.Struct], prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    """Names of a body's fields and of theirs, as in `messages[].role`; a kind inside itself is told once."""
    kinds = get_type_hints(kind)
    yield from (prefix + name for name in kind.__struct_encode_fields__)
    for name, told in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        if prefix + told in _TOLD_ELSEWHERE:
            continue
        for part, brackets in _parts(kinds[name]):
            if part not in (*above, kind):
                yield from field_names(part, f"{prefix}{told}{brackets}.", (*above, kind))


def _parts(annotation: Any, brackets: str = "") -> Iterator[tuple[type[msgspec.Struct], str]]:
    """The structs in a type, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation, brackets
    for each in get_args(annotation):
        yield from _parts(each, "[]" if get_origin(annotation) is list else brackets)


def _table(
    title: str,
    kinds: Iterable[type[msgspec.Struct]],
    unserved: Unserved,
    notes: Mapping[str, str],
) -> str:
    names = dict.fromkeys(name for kind in kinds for name in field_names(kind))
    rows = [f"| `{name}` | honoured: {notes[name]} |" for name in names if name in notes]
    # What is said of a name holds wherever it stands.
    plain = ", ".join(f"`{name}`" for name in names if not {name, name.rpartition(".")[2]} & notes.keys())
    rows += [f"| {plain} | honoured |"]
    for name in unserved.names:
        if name in unserved.without_effect:
            rows.append(f"| `{name}` | no effect: {unserved.without_effect[name]} |")
        elif name not in names:
            harmless = ", ".join(
                msgspec.json.encode(each).decode() for each in unserved.harmless.get(name, ())
            )
            unless = f", but for {harmless}" if harmless else ""
            rows.append(f"| `{name}` | refused{unless}: {unserved.remedy(name)} |")
    return "\n".join((f"### {title}\n", "| field | what becomes of it |", "| --- | --- |", *rows, ""))
