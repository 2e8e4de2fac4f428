"""What becomes of every field of the HTTP APIs, as tables of Markdown, from what the faces declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gateway.faces.anthropic import bodies
from gateway.faces.anthropic import fields as anthropic
from gateway.faces.openai import chat, completions
from gateway.faces.openai import fields as openai
from gateway.faces.responses import fields as responses
from gateway.faces.responses import items, requests, tools
from gateway.faces.test_time import DeliberationBody
from gateway.faces.unserved import Unserved

_HEAD = """## Fields

What becomes of each field of a request's body. Any other field is refused by its name, except inside of
messages, blocks and tools, where strange keys are ignored and named in `x-millrace-ignored`. What has no
effect is named in `x-millrace-warning`. Types and limits are in `/openapi.json`, `/v1/responses/openapi.json`
and `/v1/messages/openapi.json`.
"""
_MESSAGES_KINDS = (
    ("", bodies.MessagesBody),
    ("messages[].", bodies.TurnBody),
    ("messages[].content[].", bodies.ContentBlock),
    ("tools[].", bodies.ToolDefinition),
    ("tool_choice.", bodies.ToolChoiceOption),
    ("thinking.", bodies.ThinkingConfig),
    ("output_config.", bodies.OutputConfig),
    ("output_config.format.", bodies.OutputFormat),
    ("metadata.", bodies.MessageMetadata),
    ("test_time.", DeliberationBody),
)
_RESPONSES_KINDS = (
    ("", requests.ResponseBody),
    ("input[].", items.InputItem),
    ("input[].content[].", items.ItemPart),
    ("tools[].", tools.OfferedTool),
    ("tools[].format.", tools.ToolFormat),
    ("tool_choice.", tools.ToolSelection),
    ("text.", requests.TextBody),
    ("text.format.", requests.TextFormatBody),
    ("reasoning.", requests.ReasoningBody),
    ("stream_options.", requests.ResponseStreamOptions),
    ("test_time.", DeliberationBody),
)


def section() -> str:
    """The part of the page that no client has to be run for."""
    chats = (("", chat.ChatBody), ("", completions.CompletionBody), ("test_time.", DeliberationBody))
    return "\n".join(
        (
            _HEAD,
            _table("`/v1/chat/completions` and `/v1/completions`", chats, openai.FIELDS, openai.ACCEPTED),
            _table("`/v1/responses`", _RESPONSES_KINDS, responses.FIELDS, responses.ACCEPTED),
            _table("`/v1/messages`", _MESSAGES_KINDS, anthropic.FIELDS, anthropic.ACCEPTED),
        )
    )


def _table(
    title: str,
    kinds: Iterable[tuple[str, type[msgspec.Struct]]],
    unserved: Unserved,
    notes: Mapping[str, str],
) -> str:
    names = dict.fromkeys(f"{prefix}{name}" for prefix, kind in kinds for name in kind.__struct_fields__)
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
