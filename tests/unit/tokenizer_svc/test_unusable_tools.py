"""Tools whose schemas no grammar can be made of: they take any object; strict ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.chat import ToolChoiceMode
from tests.unit.tokenizer_svc.test_grammars import CALLS, TOOLS, Family, rules
from tokenizer_svc.grammar.request import Built, ToolSpec, WorkRefusal


@pytest.fixture(scope="module", params=sorted(CALLS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    return request.param, Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen_tools", tmp_path_factory.mktemp("qwen"))


# Schemas of arguments that no grammar can be made of, and a part of what is told of each.
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "recursive": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        "no finite value matches",
    ),
    "unsatisfiable": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 2}},
            "required": ["x"],
        },
        "no value matches",
    ),
    "malformed": ({"type": "object", "properties": {"x": {"enum": 5}}}, "malformed"),
    "false": ({"type": "object", "allOf": [False]}, "no value matches"),
    "of no object": ({"type": "string"}, "arguments are an object, and the schema's type is 'string'"),
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("mode", [ToolChoiceMode.AUTO, ToolChoiceMode.REQUIRED])
def test_a_tool_whose_schema_cannot_be_compiled_takes_any_object(
    family: tuple[str, Family], name: str, mode: ToolChoiceMode
) -> None:
    key, built = family
    schema, why = UNUSABLE[name]
    tools = (*TOOLS, ToolSpec(name="odd", parameters_json=json.dumps(schema)))
    request = rules(built, mode, tools)
    made = built.build(request)
    assert isinstance(made, Built)
    assert made.enforcement is not None
    (told,) = [each for each in made.enforcement.unenforced if each.path == "/tools/2/parameters"]
    assert told.keyword == "parameters"
    assert "'odd'" in told.note
    assert why in told.note
    # The others keep theirs.
    *right, wrong = CALLS[key]
    assert all(built.accepts(request, text) for text in right)
    assert not built.accepts(request, wrong)
    if built.format == "hermes":
        call = '<tool_call>\n{"name": "odd", "arguments": %s}\n</tool_call>'
        assert built.accepts(request, call % '{"anything": [1, {"y": null}]}')
        assert not built.accepts(request, call % "[]")
        assert not built.accepts(request, call.replace("odd", "f") % '{"anything": 1}')


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_may_be_null_are_an_object_all_the_same(qwen: Family, strict: bool) -> None:
    schema = {"type": ["object", "null"], "properties": {"x": {"type": ["integer", "null"]}}}
    tool = ToolSpec(name="odd", parameters_json=json.dumps(schema), strict=strict)
    request = rules(qwen, ToolChoiceMode.REQUIRED, (tool,))
    call = '<tool_call>\n{"name": "odd", "arguments": %s}\n</tool_call>'
    assert qwen.accepts(request, call % '{"x": null}')
    assert not qwen.accepts(request, call % "null")


@pytest.mark.parametrize("name", UNUSABLE)
def test_where_it_is_strict_it_is_refused_by_its_name(qwen: Family, name: str) -> None:
    schema, why = UNUSABLE[name]
    odd = ToolSpec(name="odd", parameters_json=json.dumps(schema), strict=True)
    loose = ToolSpec(name="loose", parameters_json=json.dumps(UNUSABLE["recursive"][0]))
    refused = qwen.build(rules(qwen, ToolChoiceMode.AUTO, (*TOOLS, loose, odd)))
    assert isinstance(refused, WorkRefusal)
    assert refused.field == "tools[3].function.parameters"
    assert refused.message.startswith("tool 'odd': ")
    assert why in refused.message
