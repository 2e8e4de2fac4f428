"""What a client says reaches the model, whatever roles its template knows, or is refused by the message."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from contract.chat import Conversation, Message, Role, Tool, ToolCall
from contract.errors import MillraceError, Reason
from tests.unit.tokenizer_svc.building import Text
from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tests.unit.tokenizer_svc.families import CHATML, FAMILIES, WITH_TOOLS, make

# Templates that each leave something out, or refuse it. {LOOP} writes users and assistants.
LOOP = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content | trim }}"
    "{% endif %}{% endfor %}[assistant]"
)
ODD = {
    "developer_in_a_comment": "{# developer #}{% for m in messages %}{% if m.role != 'developer' %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
    "developer_compared_and_dropped": "{% for m in messages %}{% if m.role == 'developer' %}{% else %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
    "no_system": LOOP,
    "refuses_system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}" + LOOP,
    "system_in_front": "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    + LOOP,
    "one_system_only": "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    "{{ raise_exception('system must be first') }}{% endif %}"
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}" + LOOP,
    "last_system": "{% set s = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set s.text = m.content %}{% endif %}{% endfor %}{{ s.text }}" + LOOP,
    "system_as_json": "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}",
}
SAYS = {
    Role.SYSTEM: 'Answer "briefly", always.',
    Role.DEVELOPER: "Always say QUINCE.",
    Role.USER: "Hi",
}
ORDERS = [
    roles for length in (1, 2, 3) for roles in itertools.product((Role.SYSTEM, Role.DEVELOPER), repeat=length)
]


def _said(roles: tuple[Role, ...]) -> tuple[Message, ...]:
    return tuple(
        Message(role=role, content=f"{SAYS.get(role, 'said')} ({index})") for index, role in enumerate(roles)
    )


@pytest.fixture(scope="module", params=[*ODD, *FAMILIES])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in ODD:
        return Text(write(folder, byte_level(CHATML), ODD[request.param]))
    return Text(make(request.param, folder))


def _holds(rendered: str, text: str) -> bool:
    return text in rendered or json.dumps(text)[1:-1] in rendered


@pytest.mark.parametrize("roles", ORDERS, ids="-".join)
@pytest.mark.parametrize("late", [False, True], ids=["in-front", "between"])
def test_instructions_are_written_by_every_template(text: Text, roles: tuple[Role, ...], late: bool) -> None:
    before = (Role.USER, Role.ASSISTANT) if late else ()
    messages = _said((*before, *roles, Role.USER))
    rendered = text.templates.render(Conversation(messages=messages))
    for message in messages:
        assert _holds(rendered, message.content), message
    # In the order in which they were said to the model.
    assert rendered.count(messages[-1].content) == 1


def test_a_short_instruction_is_not_taken_for_a_templates_own_word(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), LOOP))
    messages = (Message(role=Role.SYSTEM, content="user"), Message(role=Role.USER, content="q"))
    assert text.templates.render(Conversation(messages=messages)) == "[user]user\n\nq[assistant]"


def test_a_text_that_stands_in_another_one_is_missed_all_the_same(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), LOOP))
    quoted = "You are kind and helpful."
    messages = (
        Message(role=Role.SYSTEM, content=quoted),
        Message(role=Role.USER, content=f"Why does it say {quoted}"),
    )
    assert text.templates.render(Conversation(messages=messages)).count(quoted) == 2


@pytest.mark.parametrize("role", [Role.TOOL, Role.USER, Role.ASSISTANT])
def test_what_can_be_written_nowhere_is_refused_by_its_message(role: Role, tmp_path: Path) -> None:
    source = "{% for m in messages %}{% if m.role != '" + role + "' %}{{ m.content }}{% endif %}{% endfor %}"
    text = Text(write(tmp_path, byte_level(CHATML), source))
    other = Role.ASSISTANT if role is Role.USER else Role.USER
    messages = (Message(role=other, content="first"), Message(role=role, content="second"))
    with pytest.raises(MillraceError, match=rf"^messages\[1\]: .*{role.value} message") as caught:
        text.templates.render(Conversation(messages=messages))
    assert caught.value.reason is Reason.TEMPLATE_FAILED
    assert caught.value.field == "messages[1]"


@pytest.mark.parametrize("result", ["a", "ant", "assistant"])
def test_a_short_result_is_not_taken_for_a_templates_own_word(result: str, tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), LOOP))
    messages = (Message(role=Role.USER, content="Question"), Message(role=Role.TOOL, content=result))
    with pytest.raises(MillraceError, match=r"^messages\[1\]: .*tool message"):
        text.templates.render(Conversation(messages=messages))


def test_what_a_template_that_reads_texts_leaves_out_is_folded(tmp_path: Path) -> None:
    reads = (
        "{% for m in messages %}{% if m.role == 'user' and not m.content.endswith('Hi') %}"
        "{{ raise_exception('say Hi') }}{% endif %}{% endfor %}"
    )
    text = Text(write(tmp_path, byte_level(CHATML), reads + LOOP))
    messages = (Message(role=Role.DEVELOPER, content="Say QUINCE."), Message(role=Role.USER, content="QHi"))
    assert text.templates.render(Conversation(messages=messages)) == "[user]Say QUINCE.\n\nQHi[assistant]"


def test_a_part_of_a_users_text_that_is_left_out_is_refused(tmp_path: Path) -> None:
    source = LOOP.replace("m.content | trim", "m.content.split('</think>')[-1]")
    text = Text(write(tmp_path, byte_level(CHATML), source))
    message = Message(role=Role.USER, content="Explain: KEEP </think> please")
    with pytest.raises(MillraceError, match=r"^messages\[0\]: "):
        text.templates.render(Conversation(messages=(message,)))


def _called(arguments_json: str, content: str = "") -> Conversation:
    call = ToolCall(id="abcdefghi", name="look_up", arguments_json=arguments_json)
    return Conversation(
        messages=(
            Message(role=Role.USER, content="Look it up."),
            Message(role=Role.ASSISTANT, content=content, tool_calls=(call,)),
            Message(role=Role.TOOL, content="It is 7.", tool_call_id="abcdefghi"),
        ),
        tools=(Tool(name="look_up", description="d", parameters_json='{"type": "object"}'),),
    )


# Written by templates that want a call's arguments one by one.
_ITERATING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}{% for key, value in c.function.arguments HOW %} {{ key }}={{ value | string }}"
    "{% endfor %}>{% endfor %}{% endfor %}"
)
CALLING = {
    "items": _ITERATING.replace("HOW", "| items"),
    "items_method": _ITERATING.replace(" HOW", ".items()"),
    "texts_as_they_are": _ITERATING.replace(
        "{% for key", "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{% for key"
    )
    .replace(" HOW", ".items()")
    .replace("{% endfor %}>", "{% endfor %}{% endif %}>"),
    "put_together": _ITERATING.replace("HOW", ".items()").replace(
        "{{ key }}={{ value | string }}", "{{ key + '=' + value }}"
    ),
    "mappings_only": _ITERATING.replace("HOW", ".items()").replace(
        "{% for key",
        "{% if c.function.arguments is not mapping %}{{ raise_exception('no mapping') }}{% endif %}"
        "{% for key",
    ),
    "json_of_json": _ITERATING.partition("{% for key")[0] + " {{ c.function.arguments | tojson | tojson }}>"
    "{% endfor %}{% endfor %}",
    "joined_text": _ITERATING.partition("{% for key")[0] + "{{ ' ' + c.function.arguments }}>"
    "{% endfor %}{% endfor %}",
    "named_results": "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}"
    + _ITERATING.partition("%}")[2].replace("HOW", "| items"),
}
ARGUMENTS = {
    "cut off": '{"text": "half a sen',
    "null": "null",
    "list": "[1, 2]",
    "number": "7",
    "text": '"said"',
    "empty": "",
    "deep": '{"a":' * 490 + "1" + "}" * 490,
    "deeper": "[" * 100_000,
    "deepest": '{"a":' * 100_000,
    "half a pair": '{"text": "said \\ud83d"}',
    "no text among its values": '{"a": 1, "b": null, "c": [true], "d": "said"}',
    "names of methods": '{"items": 1, "keys": 2, "get": "said"}',
    "more behind it": '{"a": "said"} {"b": 2}',
    "as Python writes it": "{'a': None, 'b': 'said'}",
    "no number": '{"a": NaN, "b": 1e999, "c": "said"}',
    "too long a number": '{"a": ' + "9" * 5000 + "}",
}


@pytest.fixture(scope="module", params=[*CALLING, *WITH_TOOLS, "chatml", "gemma"])
def calling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in CALLING:
        return Text(write(folder, byte_level(CHATML), CALLING[request.param]))
    return Text(make(request.param, folder))


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_call_with_odd_arguments_leaves_the_conversation_usable(calling: Text, arguments: str) -> None:
    if "Conversation roles must alternate" in calling.checkpoint.templates["default"]:
        pytest.skip("the template takes no tool messages")
    rendered = calling.templates.render(_called(arguments)).replace(calling.control.mark, "")
    assert "look_up" in rendered
    assert "It is 7." in rendered
    assert calling.ids(_called(arguments))
    for part in ("half a sen", "said"):
        assert (part in arguments) <= (part in rendered)


def test_what_is_said_beside_a_call_is_written(calling: Text) -> None:
    if "Conversation roles must alternate" in calling.checkpoint.templates["default"]:
        pytest.skip("the template takes no tool messages")
    try:
        rendered = calling.templates.render(_called('{"q": 1}', "Let me have a look at it."))
    except MillraceError as error:
        assert error.field == "messages[1]"  # noqa: PT017 (either is right)
        return
    assert "Let me have a look at it." in rendered
    assert rendered.index("Let me have") < rendered.index("look_up", rendered.index("Let me have"))


def test_a_result_says_its_tool_where_the_template_wants_it(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), CALLING["named_results"]))
    assert "look_up: [tool]It is 7." in text.templates.render(_called("{}")).replace(text.control.mark, "")


READS_FIELDS = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}"
    "{% for name, p in t.function.parameters.properties.items() %}"
    ";{{ name }} {{ p.type }} {{ p.description }}{% if p.enum %} {{ p.enum | join('|') }}"
    "{% endif %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
SCHEMA = {
    "$defs": {
        "Colour": {"enum": ["red", "blue"], "description": "which colour"},
        "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
        "a/b": {"type": "integer"},
    },
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/Colour"},
        "maybe": {"anyOf": [{"type": "number", "description": "how much"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "one": {"oneOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/Colour"}]},
        "node": {"$ref": "#/$defs/Node"},
        "escaped": {"$ref": "#/$defs/a~1b"},
        "quoted": {"$ref": "#/$defs/a%7E1b"},
        "branch": {"$ref": "#/properties/maybe/anyOf/0"},
        "named": {"$ref": "#Colour"},
        "constant": {"const": 7},
        "nowhere": {"$ref": "#/$defs/Nothing"},
    },
}


def _offered(*tools: Tool) -> Conversation:
    return Conversation(messages=(Message(role=Role.USER, content="q"),), tools=tools)


def test_a_template_that_reads_fields_sees_what_a_schema_refers_to(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), READS_FIELDS))
    tool = Tool(name="paint", description="d", parameters_json=json.dumps(SCHEMA))
    rendered = text.templates.render(_offered(tool))
    for written in (
        ";colour string which colour red|blue",
        ";maybe number how much",
        ";either ['string', 'integer']",
        ";one string which colour red|blue",
        ";all string which colour red|blue",
        ";node object",
        ";escaped integer",
        ";quoted integer",
        ";branch number how much",
        ";named  ",
        ";constant integer",
        ";nowhere  ",
    ):
        assert written in rendered


# Schemas of one property `a`, and what a template that reads fields writes of the tool.
LED_TO: dict[str, tuple[dict[str, Any], str]] = {
    "$anchor": ({"$ref": "#me", "$defs": {"x": {"$anchor": "me", "type": "integer"}}}, ";a integer "),
    "$id": (
        {"$ref": "http://x/q", "$defs": {"x": {"$id": "http://x/q", "type": "integer"}}},
        ";a integer ",
    ),
    "$id of draft 4": ({"$ref": "#me", "$defs": {"x": {"id": "#me", "type": "integer"}}}, ";a integer "),
    "a place inside another $id": (
        {"$ref": "http://x/q#/$defs/i", "$defs": {"x": {"$id": "http://x/q", "$defs": {"i": {"enum": [7]}}}}},
        ";a integer  7",
    ),
    "$dynamicRef": (
        {"$dynamicRef": "#me", "$defs": {"x": {"$dynamicAnchor": "me", "type": "integer"}}},
        ";a integer ",
    ),
    "lists of types": (
        {"anyOf": [{"type": ["string", "null"]}, {"type": "integer"}]},
        ";a ['string', 'integer'] ",
    ),
    "one type twice": ({"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ";a string "),
    "null as a list": ({"anyOf": [{"type": ["null"]}, {"type": "integer"}]}, ";a integer "),
    "null as a constant": ({"oneOf": [{"const": None}, {"type": "integer"}]}, ";a integer "),
    "null alone": ({"anyOf": [{"type": "null"}]}, ";a null "),
    "constants": ({"oneOf": [{"const": "x"}, {"const": "y"}]}, ";a string  x|y"),
    "properties alone": ({"properties": {"b": {}}}, ";a object "),
    "items alone": ({"items": {}}, ";a array "),
    "nulls": ({"type": "string", "description": None}, ";a string "),
}  # fmt: skip


@pytest.mark.parametrize("name", LED_TO)
def test_however_a_schema_says_it(name: str, tmp_path: Path) -> None:
    schema, written = LED_TO[name]
    text = Text(write(tmp_path, byte_level(CHATML), READS_FIELDS))
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = Tool(name="f", description="d", parameters_json=json.dumps(parameters))
    assert written in text.templates.render(_offered(tool)).replace(text.control.mark, "") + " "


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"y": {"type": "string"}}}]},
        {
            "$ref": "#/$defs/base",
            "properties": {"y": {"type": "string"}},
            "$defs": {"base": {"properties": {"x": {"type": "integer"}}}},
        },
    ],
    ids=["allOf", "$ref"],
)
def test_what_several_parts_of_a_schema_say_is_put_together(schema: dict[str, Any], tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), READS_FIELDS))
    rendered = text.templates.render(
        _offered(Tool(name="f", description="d", parameters_json=json.dumps(schema)))
    )
    assert ";x integer" in rendered
    assert ";y string" in rendered


def test_references_that_double_are_followed_within_bounds(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), READS_FIELDS))
    doubling: dict[str, Any] = {
        f"n{index}": {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/n{index + 1}"} for key in "ab"},
        }
        for index in range(200)
    }
    schema = {"$defs": doubling, "type": "object", "properties": {"root": {"$ref": "#/$defs/n0"}}}
    tool = Tool(name="grow", description="d", parameters_json=json.dumps(schema))
    assert ";root object" in text.templates.render(_offered(tool))


@pytest.mark.parametrize(
    "tool",
    [
        Tool(name="bare"),
        Tool(name="bare", description="d"),
        Tool(name="bare", parameters_json='{"type": "object", "properties": {"a": {}, "b": true}}'),
        Tool(name="bare", parameters_json="{}"),
        Tool(name="bare", parameters_json='{"properties": null, "required": null}'),
        Tool(
            name="bare",
            parameters_json='{"properties": {"a": {"allOf": [{"properties": {"x": {}, "y": true}}]}, '
            '"b": {"type": "array"}, "c": {"items": {"properties": {"z": {}}}}}}',
        ),
    ],
    ids=["nothing", "no-parameters", "no-description", "empty", "nulls", "nested"],
)
@pytest.mark.parametrize(
    "reads",
    [
        READS_FIELDS.partition("{% for m")[0],
        "{{ tools[0].function.description.split('.')[0] }}{{ tools[0].function.parameters.keys() }}bare",
        "{% for n, p in tools[0].function.parameters.properties | items %}{{ p.description | trim }}"
        "{{ p.type.upper() }}{% endfor %}{{ tools[0].function.parameters.required | length }}bare",
        "{% macro of(p) %}{{ p.type + p.description }}{% if p.type == 'object' %}{{ p.required | join }}"
        "{% for n, each in p.properties | items %}{{ of(each) }}{% endfor %}{% elif p.type == 'array' %}"
        "{{ of(p['items']) }}{% endif %}{% endmacro %}{% for n, p in tools[0].function.parameters.properties "
        "| items %}{{ of(p) }}{% endfor %}bare",
    ],
    ids=["fields", "methods", "deep", "nested"],
)
def test_what_a_client_may_leave_out_of_a_tool_is_given(tool: Tool, reads: str, tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), reads + "{{ messages[0].content }}"))
    assert "bare" in text.templates.render(_offered(tool))


def test_a_tools_schema_nested_too_deep_is_refused_by_its_field(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), READS_FIELDS))
    for levels in (129, 490, 100_000):
        deep = '{"items":' * levels + "{}" + "}" * levels
        with pytest.raises(MillraceError, match="128") as caught:
            text.templates.render(_offered(Tool(name="deep", description="d", parameters_json=deep)))
        assert caught.value.field == "tools[0].function.parameters"
