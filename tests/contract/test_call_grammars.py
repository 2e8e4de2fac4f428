"""Grammars lead every family to calls as its template writes them, required and after free text alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.chat import Conversation, JsonSchemaFormat, Message, Role, ToolCall, ToolChoiceMode
from gateway.text.choice import ChoiceText, TextOptions, shown_ids
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import TokenTexts
from gateway.text.thinking import thinking_tags
from gateway.tokenizer.client import vocabulary
from tests.contract.call_corpus import ARGUMENTS, FAMILIES, SCHEMA, TOOLS, turn
from tests.contract.test_call_formats import read
from tests.unit.tokenizer_svc.building import Text
from tests.unit.tokenizer_svc.families import MORE, make
from tests.unit.tokenizer_svc.test_grammars import Family
from tests.unit.tokenizer_svc.test_led_input import ADDED, PATCH, UPDATED
from tokenizer_svc.grammar.request import (
    Built,
    GrammarRequest,
    Reasoning,
    ToolRules,
    ToolSpec,
    WorkRefusal,
)
from tokenizer_svc.messages.wire import vocabulary_response
from tokenizer_svc.text.checkpoint import load_checkpoint

SPECS = tuple(ToolSpec(name=tool.name, parameters_json=tool.parameters_json) for tool in TOOLS)
# Values in the order of the schema, which is that of grammars; Gemma's templates sort.
ORDER = list(SCHEMA["properties"])


def ordered(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    place = {key: index for index, key in enumerate(ORDER)}
    keys = sorted(arguments) if "gemma" in name else sorted(arguments, key=lambda key: place.get(key, 0))
    return {key: arguments[key] for key in keys}


@pytest.fixture(scope="module", params=sorted(MORE))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    return request.param, Family(request.param, tmp_path_factory.mktemp(request.param))


def rules(
    name: str, mode: ToolChoiceMode, tools: tuple[ToolSpec, ...] = SPECS, **more: Any
) -> GrammarRequest:
    return GrammarRequest(tools=ToolRules(tools=tools, mode=mode, parallel=True, format=name), **more)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """The calls without the thoughts that the template may put before them."""
    text = turn(name, [(called, ordered(arguments, name)) for called, arguments in calls])
    for empty in ("<think></think>", "<|START_THINKING|><|END_THINKING|>"):
        text = text.lstrip("\n").removeprefix(empty)
    return text.lstrip("\n")


def test_the_checkpoint_has_the_format(family: tuple[str, Family]) -> None:
    name, side = family
    assert side.format == name


@pytest.mark.parametrize("mode", [ToolChoiceMode.REQUIRED, ToolChoiceMode.AUTO])
def test_what_templates_write_is_what_grammars_admit(
    family: tuple[str, Family], mode: ToolChoiceMode
) -> None:
    name, side = family
    matches = side.admitting(rules(name, mode))
    for arguments in ARGUMENTS:
        # What holds a closing mark itself cannot be led.
        if "</parameter>" not in arguments.get("text", ""):
            assert matches(written(name, ("f", arguments))), (written(name, ("f", arguments)), name)
    if not FAMILIES[name].single:
        both = written(name, ("get_weather", {"text": "a"}), ("f", {"count": 1}))
        assert matches(both), both


@pytest.mark.parametrize("mode", [ToolChoiceMode.REQUIRED, ToolChoiceMode.AUTO])
@pytest.mark.parametrize(
    "wrong",
    [("g", {}), ("f", {"count": "many"}), ("f", {"flag": 3}), ("f", {"kind": "d"}), ("f", {"new": 1})],
)
def test_calls_that_the_tools_do_not_allow_are_not_written(
    family: tuple[str, Family], mode: ToolChoiceMode, wrong: tuple[str, dict[str, Any]]
) -> None:
    name, side = family
    assert not side.admitting(rules(name, mode))(written(name, wrong))


def test_text_without_a_call_is_free_when_calls_are_optional(family: tuple[str, Family]) -> None:
    name, side = family
    text = "It is 3 o'clock.\nSo [1]."
    if name == "harmony":
        text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    assert side.admitting(rules(name, ToolChoiceMode.AUTO))(text)
    assert not side.admitting(rules(name, ToolChoiceMode.REQUIRED))(text)


def test_required_arguments_of_a_strict_tool_are_written(family: tuple[str, Family]) -> None:
    name, side = family
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string", "maxLength": 4},
            "k": {"enum": ["a"]},
        },
        "required": ["n", "k"],
        "additionalProperties": False,
    }
    tool = ToolSpec(name="f", parameters_json=json.dumps(schema), strict=True)
    request = rules(name, ToolChoiceMode.REQUIRED, (tool,))
    text = written(name, ("f", {"n": 5, "k": "a"}))
    assert side.accepts(request, text)
    assert [json.loads(each[2]) for each in read(name, [text])[2]] == [{"n": 5, "k": "a"}]
    assert not side.accepts(request, written(name, ("f", {"n": 5})))


def test_a_tool_that_says_nothing_of_its_arguments_takes_any(family: tuple[str, Family]) -> None:
    name, side = family
    tool = ToolSpec(name="f", parameters_json='{"type": "object"}')
    admits = side.admitting(rules(name, ToolChoiceMode.AUTO, (tool,)))
    assert admits(written(name, ("f", {"a": "b", "c": 1})))
    assert admits(written(name, ("f", {})))
    nothing = ToolSpec(name="f", parameters_json='{"type": "object", "properties": {}}')
    assert not side.accepts(rules(name, ToolChoiceMode.AUTO, (nothing,)), written(name, ("f", {"a": "b"})))


@pytest.mark.parametrize(
    "bounds", [{"minLength": 2, "maxLength": 3.0}, {"maxLength": 10**9}, {"minLength": 2}]
)
def test_lengths_of_texts(family: tuple[str, Family], bounds: dict[str, Any]) -> None:
    name, side = family
    schema = {"type": "object", "properties": {"s": {"type": "string", **bounds}}, "required": ["s"]}
    tool = ToolSpec(name="f", parameters_json=json.dumps(schema))
    admits = side.admitting(rules(name, ToolChoiceMode.REQUIRED, (tool,)))
    assert admits(written(name, ("f", {"s": "abc"})))
    assert admits(written(name, ("f", {"s": "a"}))) is ("minLength" not in bounds)
    assert admits(written(name, ("f", {"s": "abcd"}))) is (3.0 not in bounds.values())


def test_a_strict_tool_whose_texts_cannot_be_led_is_refused(family: tuple[str, Family]) -> None:
    name, side = family
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "pattern": "^a+$"}},
        "required": ["s"],
        "additionalProperties": False,
    }
    tool = ToolSpec(name="f", parameters_json=json.dumps(schema), strict=True)
    outcome = side.build(rules(name, ToolChoiceMode.AUTO, (tool,)))
    if isinstance(outcome, Built):
        assert not side.accepts(
            rules(name, ToolChoiceMode.AUTO, (tool,)), written(name, ("f", {"text": "b"}))
        )
        return
    assert isinstance(outcome, WorkRefusal)
    assert outcome.field == "tools[0].function.parameters"
    assert "pattern at /tools/0/parameters/properties/s/pattern cannot be enforced" in outcome.message


THINKING = {
    "harmony": ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    "gemma4": ("<|channel>thought\nhm<channel|>", ""),
    "command": ("<|START_THINKING|>hm<|END_THINKING|>", "<|START_RESPONSE|>"),
    "granite": ("<think>hm</think>", "<response>"),
    "kimi": ("<think>hm</think>", ""),
}


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_come_before_what_is_led(name: str, tmp_path: Any) -> None:
    side = Family(name, tmp_path)
    thoughts, opens = THINKING[name]
    tags = {"harmony": "harmony", "gemma4": "gemma4", "command": "command", "granite": "granite"}.get(
        name, "think"
    )
    form = JsonSchemaFormat('{"type": "object", "properties": {"x": {"type": "null"}}}')
    request = GrammarRequest(response_format=form, reasoning=Reasoning.OPTIONAL, reasoning_format=tags)
    closes = {"<response>": "</response>", "<|START_RESPONSE|>": "<|END_RESPONSE|>"}.get(opens, "")
    assert side.accepts(request, f'{thoughts}{opens}{{"x": null}}{closes}')
    assert not side.accepts(request, f'{thoughts}{opens}{{"x": 1}}{closes}')
    required = rules(name, ToolChoiceMode.REQUIRED, reasoning=Reasoning.OPTIONAL, reasoning_format=tags)
    assert side.accepts(required, thoughts + written(name, ("f", {"count": 1})))


@pytest.mark.parametrize("broken", ['{"city": "Ber', '"text"', "[1]", "7", "null", ""])
def test_broken_arguments_in_a_history_stay_usable(
    family: tuple[str, Family], broken: str, tmp_path: Path
) -> None:
    name, _ = family
    text = Text(make(name, tmp_path))
    call = ToolCall(id="call_1", name="get_weather", arguments_json=broken)
    messages = (
        Message(role=Role.USER, content="Weather?"),
        Message(role=Role.ASSISTANT, tool_calls=(call,)),
        Message(
            role=Role.TOOL, content="sunny in all of the land", tool_call_id="call_1", name="get_weather"
        ),
        Message(role=Role.USER, content="Thanks"),
    )
    rendered = text.templates.render(Conversation(messages=messages))
    assert "get_weather" in rendered
    assert "sunny in all of the land" in rendered
    if "Ber" in broken:
        assert "Ber" in rendered


def test_ids_of_other_servers_get_the_form_that_the_template_needs(tmp_path: Path) -> None:
    text = Text(make("kimi", tmp_path))
    calls = tuple(ToolCall(id=id_, name="f", arguments_json="{}") for id_ in ("functions.f:1", "call_9"))
    messages = (
        Message(role=Role.USER, content="q"),
        Message(role=Role.ASSISTANT, tool_calls=calls),
        Message(role=Role.TOOL, content="one", tool_call_id="call_9"),
    )
    rendered = text.templates.render(Conversation(messages=messages))
    assert "<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{}" in rendered
    assert "## Return of functions.f:2" in rendered


def test_calls_come_through_as_the_tokens_of_the_checkpoint(
    family: tuple[str, Family], tmp_path: Path
) -> None:
    """Control tokens that a format is made of are shown to parsers, whatever special ones are hidden."""
    name, side = family
    checkpoint = load_checkpoint(make(name, tmp_path))
    known = vocabulary(vocabulary_response(checkpoint))
    options = TextOptions(
        tool_call_format=known.tool_call_format,
        reasoning_format=known.reasoning_format,
        tools=TOOLS,
        thinking=thinking_tags(known) if known.reasoning_format else None,
    )
    plain = TokenTexts(known)
    texts = TokenTexts(known, shown_ids=shown_ids(plain, options))
    for arguments in ARGUMENTS:
        choice, total = ChoiceText(texts, options, str), TextDelta()
        for token_id in side.tokenizer.encode(turn(name, [("f", arguments)]), add_special_tokens=False).ids:
            delta = TextDelta()
            choice.feed([token_id], delta)
            total.absorb_text(delta)
        choice.finish(total)
        assert [(each[0], json.loads(each[1])) for each in choice.tool_calls()] == [("f", arguments)]
        if name == "harmony":
            assert choice.num_reasoning_tokens == 0, "headers are no thoughts"
        assert not total.content.strip()


INPUT = json.dumps({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]})


def input_tool(grammar: str, syntax: str = "lark", **more: Any) -> ToolSpec:
    return ToolSpec(name="f", parameters_json=INPUT, input_syntax=syntax, input_grammar=grammar, **more)


@pytest.mark.parametrize("mode", [ToolChoiceMode.REQUIRED, ToolChoiceMode.AUTO])
def test_the_input_of_a_tool_follows_its_grammar(family: tuple[str, Family], mode: ToolChoiceMode) -> None:
    name, side = family
    other = ToolSpec(name="get_weather", parameters_json='{"type": "object", "properties": {}}')
    admits = side.admitting(rules(name, mode, (other, input_tool(PATCH))))
    for text in (ADDED, UPDATED):
        call = written(name, ("f", {"input": text}))
        assert admits(call), call
        assert [json.loads(each[2]) for each in read(name, [call])[2]] == [{"input": text}]
    assert admits(written(name, ("get_weather", {})))
    for wrong in (UPDATED + "x", UPDATED.replace("Begin", "Began"), ""):
        assert not admits(written(name, ("f", {"input": wrong}))), wrong
    pattern = side.admitting(rules(name, mode, (input_tool(r'(?s:.)*"[a-z]+"\\\n?', "regex"),)))
    assert pattern(written(name, ("f", {"input": 'x\n "ab"\\'})))
    assert not pattern(written(name, ("f", {"input": 'x\n "ab"'})))


@pytest.mark.parametrize(
    ("grammar", "syntax", "field", "named"),
    [
        ('start: "a', "lark", "grammar", "1(10)"),
        ("start: nobody", "lark", "grammar", "nobody"),
        ('begin: "a"', "lark", "grammar", "start"),
        ('start: "a" start', "lark", "grammar", "no finite text"),
        ("start: /[/", "lark", "grammar", "invalid regex"),
        ("(a", "regex", "grammar", "invalid regex"),
        ("a(?=b)", "regex", "grammar", "look-around"),
        ("start: /a/", "ebnf", "syntax", "lark, regex"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_field_and_cause(
    family: tuple[str, Family], grammar: str, syntax: str, field: str, named: str
) -> None:
    name, side = family
    first = ToolSpec(name="get_weather")
    request = rules(name, ToolChoiceMode.AUTO, (first, input_tool(grammar, syntax)))
    refused = side.build(request)
    assert isinstance(refused, WorkRefusal)
    assert refused.field == f"tools[1].function.input_{field}"
    assert named in refused.message
    assert "tool 'f'" in refused.message


def test_a_grammar_that_cannot_be_led_inside_of_a_call_is_told(family: tuple[str, Family]) -> None:
    name, side = family
    free = 'start: %json {"type": "object"}'
    built = side.build(rules(name, ToolChoiceMode.AUTO, (input_tool(free),)))
    assert isinstance(built, Built)
    assert built.enforcement is not None
    (lost,) = built.enforcement.unenforced
    assert (lost.keyword, lost.path) == ("input_grammar", "/tools/0/input_grammar")
    assert "%json" in lost.note
    assert side.admitting(rules(name, ToolChoiceMode.AUTO, (input_tool(free),)))(
        written(name, ("f", {"input": "anything"}))
    )
    refused = side.build(rules(name, ToolChoiceMode.AUTO, (input_tool(free, strict=True),)))
    assert isinstance(refused, WorkRefusal)
    assert refused.field == "tools[0].function.input_grammar"
