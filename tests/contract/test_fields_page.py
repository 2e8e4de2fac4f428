"""docs/clients.md says of every field what the faces declare."""

from __future__ import annotations

from pathlib import Path

from gateway.faces.anthropic import fields as anthropic
from gateway.faces.openai import fields as openai
from gateway.faces.openai.chat import ChatBody
from gateway.faces.responses import fields as responses
from tests.clients.fields import BODIES, field_names, section

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"


def test_the_page_has_the_fields_as_the_faces_declare_them() -> None:
    """To write it again: `make test-clients`, or print `section()`."""
    _, _, fields = _PAGE.read_text(encoding="utf-8").partition("## Fields\n")
    assert f"## Fields\n{fields}".rstrip() == section().rstrip()


def test_what_is_said_of_a_field_is_said_of_one_that_there_is() -> None:
    rows = section().splitlines()
    named = [*openai.ACCEPTED, *anthropic.ACCEPTED, *responses.ACCEPTED]
    for name in named:
        assert sum(row.startswith(f"| `{name}` | honoured:") for row in rows) == named.count(name), name


def test_every_field_of_every_body_stands_in_its_table() -> None:
    _, *tables = section().split("### ")
    for bodies, table in zip(BODIES, tables, strict=True):
        for body in bodies:
            for name in field_names(body):
                # What is said of a name holds wherever it stands.
                assert f"`{name}`" in table or f"| `{name.rpartition('.')[2]}` |" in table, name
    assert {
        "stream_options.include_usage",
        "response_format.json_schema.schema",
        "tools[].function.parameters",
        "messages[].tool_calls[].function.arguments",
        "tool_choice.allowed_tools.tools[].function.name",
        "test_time.scorer.type",
    } <= set(field_names(ChatBody))
