"""Grammars of every format, as the engine would run them: which texts they admit, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from checkpoint.grammar_tokens import grammar_tokenizer_json
from contract.chat import (
    ChoiceFormat,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    ToolChoiceMode,
)
from contract.grammar_cost import PARSER_LIMITS
from runtime.config import ModelConfig
from tests.unit.tokenizer_svc.families import make
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import Built, GrammarRequest, Reasoning, ToolRules, ToolSpec, WorkRefusal
from tokenizer_svc.text.checkpoint import load_checkpoint


class Family:
    """A checkpoint's grammar side."""

    def __init__(self, name: str, folder: Path, model: ModelConfig | None = None) -> None:
        self._read(make(name, folder), model)

    @classmethod
    def at(cls, folder: Path) -> Family:
        """The checkpoint in a folder."""
        family = cls.__new__(cls)
        family._read(folder, None)
        return family

    def _read(self, folder: Path, model: ModelConfig | None) -> None:
        checkpoint = load_checkpoint(folder, model)
        self.format = checkpoint.tool_call_format
        self.tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
        self.matcher_tokenizer = LLTokenizer(
            grammar_tokenizer_json(checkpoint.tokenizer_json), eos_token=list(checkpoint.eos_token_ids)
        )
        self.backend = Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids)

    def build(self, request: GrammarRequest) -> Built | WorkRefusal:
        reply = build(
            request, self.backend, PromptLimitsConfig(max_schema_depth=64, max_artifact_bytes=1 << 20)
        )
        outcome = reply.built or reply.refused
        assert outcome is not None
        return outcome

    def accepts(self, request: GrammarRequest, text: str) -> bool:
        return self.admitting(request)(text)

    def admitting(self, request: GrammarRequest) -> Callable[[str], bool]:
        """Whether the grammar, built once, accepts a text."""
        built = self.build(request)
        assert isinstance(built, Built), built

        def accepts(text: str) -> bool:
            matcher = self.matcher(built)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

        return accepts

    def matcher(self, built: Built) -> LLMatcher:
        limits = LLParserLimits(**PARSER_LIMITS)
        return LLMatcher(self.matcher_tokenizer, built.payload.decode(), limits=limits)

    def written(self, request: GrammarRequest) -> str:
        """The text of a walk that takes the first token that the masks allow."""
        built = self.build(request)
        assert isinstance(built, Built), built
        matcher = self.matcher(built)
        ids: list[int] = []
        while not matcher.is_accepting():
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            ids.append((allowed & -allowed).bit_length() - 1)
            assert matcher.try_consume_tokens(ids[-1:]) == 1, matcher.get_error()
        assert not any(self.matcher_tokenizer.is_special_token(each) for each in ids)
        return str(self.tokenizer.decode(ids))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen_tools", tmp_path_factory.mktemp("qwen"))


def schema_format(schema: Any, *, strict: bool = True) -> GrammarRequest:
    return GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema), strict=strict))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (JsonObjectFormat(), ['{"a": [1, {"b": null}]}', "{}"], ["[]", "1", '{"a"}']),
        (RegexFormat(r"\d{2,3}/[a-z]+"), ["12/a", "123/xyz"], ["1/a", "12/", "12/a "]),
        (
            ChoiceFormat(('yes "quoted"', "no\nline", "日本")),
            ['yes "quoted"', "no\nline", "日本"],
            ["yes", "nope"],
        ),
        (LarkFormat('start: "a" NUM\nNUM: /[0-9]+/\n'), ["a1", "a42"], ["a", "1"]),
        (
            EbnfFormat('root ::= item ("," item)*\nitem ::= [a-c]+ | "x" digit\ndigit ::= [0-9]'),
            ["abc,x1"],
            ["d", "a,"],
        ),
        (
            EbnfFormat('root ::= "a" # "one\n  # of\n  | "#b\\"|" [^"#|\\n]\n  | "c"\n# end'),
            ["a", '#b"|x', "c"],
            ["b", '#b"|#', "d"],
        ),
    ],
)
def test_formats(qwen: Family, form: Any, good: list[str], bad: list[str]) -> None:
    request = GrammarRequest(response_format=form)
    assert [text for text in good if not qwen.accepts(request, text)] == []
    assert [text for text in bad if qwen.accepts(request, text)] == []


SPELLED = "a<|im_end|>b<think>"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ChoiceFormat((SPELLED,)), SPELLED),
        (RegexFormat(r"a<\|im_end\|>b<think>"), SPELLED),
        (LarkFormat(f'start: "{SPELLED}"'), SPELLED),
        (JsonSchemaFormat(json.dumps({"const": SPELLED})), json.dumps(SPELLED)),
    ],
)
@pytest.mark.parametrize("reasoning", Reasoning)
def test_text_that_spells_named_tokens_can_be_written(
    qwen: Family, form: Any, text: str, reasoning: Reasoning
) -> None:
    assert qwen.written(GrammarRequest(response_format=form)) == text
    built = qwen.build(GrammarRequest(response_format=form, reasoning=reasoning))
    assert isinstance(built, Built)
    assert b"no_forcing" in built.payload
    plain = qwen.build(GrammarRequest(response_format=ChoiceFormat(("a", "b"))))
    assert isinstance(plain, Built)
    assert b"no_forcing" not in plain.payload


def test_a_choice_may_hold_any_character(qwen: Family) -> None:
    for code in (*range(0x21), 0x7F, 0x85, 0x2028, 0xFEFF, 0xFFFF, 0x1F600):
        request = GrammarRequest(response_format=ChoiceFormat((f"a{chr(code)}b", "c")))
        assert qwen.accepts(request, f"a{chr(code)}b"), hex(code)


def test_an_object_may_have_hundreds_of_optional_properties(qwen: Family) -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(700)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert qwen.accepts(schema_format(schema), '{"p3":1,"p650":2}')


@pytest.mark.parametrize(
    ("form", "field", "part"),
    [
        (RegexFormat("(a"), "response_format.regex", "regex parse error"),
        (RegexFormat("a\\"), "response_format.regex", "backslash"),
        (RegexFormat("(?x) a # one\n b"), "response_format.regex", "flag x"),
        (RegexFormat("x(a{1000}){1000}"), "response_format.regex", "repeat and list less"),
        (
            JsonSchemaFormat('{"type": "string", "pattern": "^(a{1000}){1000}$"}'),
            "response_format.json_schema",
            "pattern at /pattern",
        ),
        (RegexFormat("(?=a)b"), "response_format.regex", "look"),
        (LarkFormat("start: nothing"), "response_format.lark", "nothing"),
        (LarkFormat("start: start"), "response_format.lark", "'start'"),
        (EbnfFormat("root ::= ["), "response_format.ebnf", "EBNF"),
        (JsonSchemaFormat("{"), "response_format.json_schema", "not valid JSON"),
        (JsonSchemaFormat("[]"), "response_format.json_schema", "object or a boolean"),
        (JsonSchemaFormat('{"$ref": "#/nowhere"}'), "response_format.json_schema", "$ref at /$ref"),
        (JsonSchemaFormat('{"$ref": "#"}'), "response_format.json_schema", "without end"),
        (
            JsonSchemaFormat('{"type": "string", "minLength": 3, "maxLength": 1}'),
            "response_format.json_schema",
            "no value",
        ),
        (
            JsonSchemaFormat('{"type": "array", "uniqueItems": true}'),
            "response_format.json_schema",
            "/uniqueItems",
        ),
        (JsonSchemaFormat('{"items":' * 70 + "{}" + "}" * 70), "response_format.json_schema", "deep"),
    ],
)
def test_refusals_say_why(qwen: Family, form: Any, field: str, part: str) -> None:
    refused = qwen.build(GrammarRequest(response_format=form))
    assert isinstance(refused, WorkRefusal)
    assert refused.field == field
    assert part in refused.message


@pytest.mark.parametrize("form", [JsonObjectFormat(), JsonSchemaFormat('{"type": "object"}')])
def test_white_space_is_a_space_after_colons_and_commas_or_a_line_break_after_commas(
    qwen: Family, form: Any
) -> None:
    request = GrammarRequest(response_format=form)
    lines = '{"a": 1,\n  "b": [2,\n    {}]}'
    for text in ('{"a": 1, "b": [2, {}]}', '{"a":1,"b":[2,{}]}', '{"a": "x  y"}', lines, '{"a": 1,\n"b": 2}'):
        assert qwen.accepts(request, text)
    for text in (
        '{ "a": 1}',
        '{"a" : 1}',
        '{"a":  1}',
        '{"a": 1 }',
        ' {"a": 1}',
        '{"a": 1,\n\n"b": 2}',
        '{"a":\n1}',
        "{\n}",
        '{"a": 1,\n' + " " * 33 + '"b": 2}',
    ):
        assert not qwen.accepts(request, text)


def test_not_strict_reports_what_is_not_enforced(qwen: Family) -> None:
    built = qwen.build(schema_format({"type": "array", "uniqueItems": True, "maxItems": 4}, strict=False))
    assert isinstance(built, Built)
    assert built.enforcement is not None
    assert [each.keyword for each in built.enforcement.unenforced] == ["uniqueItems"]
    assert {each.keyword for each in built.enforcement.enforced} == {"type", "maxItems"}


OVERLAPPING = {"^a": {"type": "string"}, "b$": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "places", "admitted"),
    [
        (
            {"type": "object", "patternProperties": OVERLAPPING, "additionalProperties": False},
            {"/patternProperties", "/additionalProperties"},
            '{"ax": "y"}',
        ),
        (
            {
                "$ref": "#/$defs/a~0b",
                "$defs": {"a~b": {"properties": {"x": {"patternProperties": OVERLAPPING}}}},
            },
            {"/$defs/a~0b/properties/x/patternProperties"},
            '{"x": {"a": "b"}}',
        ),
        (
            {
                "properties": {
                    "even": {"multipleOf": 2},
                    "large": {"multipleOf": 12345678901},
                    "larger": {"items": [{}, {"multipleOf": 23456789012}]},
                }
            },
            {"/properties/large/multipleOf", "/properties/larger/items/1/multipleOf"},
            '{"large": 12345678901}',
        ),
        ({"type": "integer", "not": {"multipleOf": 12345678901}}, {"/not/multipleOf"}, "1"),
    ],
)
def test_what_only_the_back_end_stops_at_is_named(
    qwen: Family, schema: dict[str, Any], places: set[str], admitted: str
) -> None:
    if "items" in json.dumps(schema):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    refused = qwen.build(GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema))))
    assert isinstance(refused, WorkRefusal)
    assert any(f" at {place} cannot be enforced" in refused.message for place in places), refused.message
    lenient = GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema), strict=False))
    built = qwen.build(lenient)
    assert isinstance(built, Built), built
    assert built.enforcement is not None
    assert {each.path for each in built.enforcement.unenforced} == places
    assert not built.enforcement.approximated
    assert qwen.accepts(lenient, admitted)
    if "even" in json.dumps(schema):
        assert not qwen.accepts(lenient, '{"even": 3}')


@pytest.mark.parametrize("strict", [True, False])
def test_a_pattern_that_is_none_is_refused_by_its_place(qwen: Family, strict: bool) -> None:
    schema = {"properties": {"x": {"type": "string", "pattern": "["}}}
    refused = qwen.build(GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema), strict=strict)))
    assert isinstance(refused, WorkRefusal)
    assert "pattern at /properties/x/pattern cannot be enforced" in refused.message
    assert "strict" not in refused.message


def test_a_list_in_a_recursive_definition(qwen: Family) -> None:
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "child": {"$ref": "#/$defs/tree", "minProperties": 1},
                },
                "additionalProperties": False,
            }
        },
    }
    request = schema_format(tree)
    assert qwen.accepts(request, '{"value": 1, "child": {"value": 2, "child": {"value": 3}}}')
    assert qwen.accepts(request, "{}")
    assert not qwen.accepts(request, '{"value": 1, "child": {}}')
    assert not qwen.accepts(request, '{"value": 1, "child": {"value": 2, "child": {}}}')


def test_an_unsatisfiable_definition_leaves_the_rest(qwen: Family) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/never"}, {"type": "null"}]}},
        "required": ["a"],
        "$defs": {"never": {"allOf": [{"type": "string"}, {"pattern": "^a$"}, {"pattern": "^b$"}]}},
    }
    assert qwen.accepts(schema_format(schema), '{"a": null}')
    assert not qwen.accepts(schema_format(schema), '{"a": "a"}')


def test_reasoning_comes_first_where_it_is_open(qwen: Family) -> None:
    request = GrammarRequest(response_format=JsonObjectFormat(), reasoning=Reasoning.OPEN)
    assert qwen.accepts(request, 'let me see {"a"\n</think>\n\n{"a": 1}')
    assert not qwen.accepts(request, '{"a": 1}')


THOUGHT = '<think>\nlet me see {"a": </tool_call> [\n</think>\n\n'


@pytest.mark.parametrize("reasoning", Reasoning)
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (JsonObjectFormat(), '{"a": 1}'),
        (JsonSchemaFormat('{"type": "integer"}'), "7"),
        (RegexFormat("[ab]+"), "ab"),
        (ChoiceFormat(("x", "y")), "y"),
        (LarkFormat('start: "x" "y"'), "xy"),
        (EbnfFormat('root ::= "x" "y"'), "xy"),
    ],
)
def test_thoughts_are_free_and_the_answer_is_not(
    qwen: Family, reasoning: Reasoning, form: Any, answer: str
) -> None:
    request = GrammarRequest(response_format=form, reasoning=reasoning)
    opened = THOUGHT.removeprefix("<think>")
    for space in ("\n", "\n\n"):
        assert qwen.accepts(request, space + THOUGHT + answer) is (reasoning is not Reasoning.NONE)
    assert qwen.accepts(request, answer) is (reasoning is not Reasoning.OPEN)
    assert qwen.accepts(request, THOUGHT + answer) is (reasoning is not Reasoning.NONE)
    assert qwen.accepts(request, opened + answer) is (reasoning is Reasoning.OPEN)
    for text in (THOUGHT, opened, THOUGHT + "no", opened + "no", "no", "<think>" + answer):
        assert not qwen.accepts(request, text)
    # After the thoughts' end nothing but the answer comes, however the end is written.
    assert not qwen.accepts(request, f"{THOUGHT}more</think>{answer}")


def test_thoughts_come_before_calls_that_are_required(family: tuple[str, Family]) -> None:
    name, side = family
    plain = rules(side, ToolChoiceMode.REQUIRED)
    request = msgspec.structs.replace(plain, reasoning=Reasoning.OPTIONAL)
    one, _, _, wrong = CALLS[name]
    assert side.accepts(request, one)
    assert side.accepts(request, f"<think>\nhm\n</think>\n\n{one}")
    assert not side.accepts(request, f"<think>\nhm\n</think>\n\n{wrong}")
    assert not side.accepts(plain, f"<think>\nhm\n</think>\n\n{one}")


@pytest.mark.parametrize(
    "parameters",
    ["", "{}", '{"type": "object", "properties": {}}', '{"properties": {}, "required": []}'],
)
@pytest.mark.parametrize("mode", ToolChoiceMode)
def test_a_tool_without_parameters_is_called_without_arguments(
    family: tuple[str, Family], parameters: str, mode: ToolChoiceMode
) -> None:
    if mode is ToolChoiceMode.NONE:
        return
    name, side = family
    tool = ToolSpec(name="now", parameters_json=parameters)
    request = rules(side, mode, (tool,))
    call = CALLS[name][2]
    assert side.accepts(request, call)
    assert not side.accepts(request, call.replace("{}", '{"invented": 1}'))


@pytest.mark.parametrize(
    "parameters", ['{"type": "object"}', '{"properties": {}, "additionalProperties": true}']
)
def test_a_tool_whose_arguments_are_any_object_keeps_them(qwen: Family, parameters: str) -> None:
    request = rules(qwen, ToolChoiceMode.REQUIRED, (ToolSpec(name="now", parameters_json=parameters),))
    assert qwen.accepts(request, CALLS["qwen_tools"][2].replace("{}", '{"any": 1}'))


TOOLS = (
    ToolSpec(
        name="get_weather",
        parameters_json=json.dumps(
            {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            }
        ),
        strict=True,
    ),
    ToolSpec(name="now"),
)
# Per family: one call, two calls, a call of the second tool, and the same call with wrong arguments.
CALLS = {
    "qwen_tools": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Bern"}}\n</tool_call>',
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Bern"}}',
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Bern"}}',
        '<|python_tag|>{"name": "now", "parameters": {}}',
        '{"name": "get_weather", "parameters": {"town": "Bern"}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, '
        '{"name": "get_weather", "arguments": {"city": "Bern"}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"town": "Bern"}}]',
    ),
    "mistral_v11": (
        '[TOOL_CALLS]get_weather[CALL_ID]aB3456789[ARGS]{"city": "Bern"}',
        "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}"
        '[TOOL_CALLS]get_weather[CALL_ID]aaaaaaaaa[ARGS]{"city": "Bern"}',
        "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}",
        '[TOOL_CALLS]get_weather[CALL_ID]aB3456789[ARGS]{"town": "Bern"}',
    ),
    "mistral_v13": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}',
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}',
        "[TOOL_CALLS]now[ARGS]{}",
        '[TOOL_CALLS]get_weather[ARGS]{"town": "Bern"}',
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"town": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bern"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"town": "Bern"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}


@pytest.fixture(scope="module", params=sorted(CALLS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    return request.param, Family(request.param, tmp_path_factory.mktemp(request.param))


def rules(
    family: Family, mode: ToolChoiceMode, tools: tuple[ToolSpec, ...] = TOOLS, parallel: bool = True
) -> GrammarRequest:
    return GrammarRequest(tools=ToolRules(tools=tools, mode=mode, parallel=parallel, format=family.format))


def test_required_calls(family: tuple[str, Family]) -> None:
    name, side = family
    one, two, other, wrong = CALLS[name]
    request = rules(side, ToolChoiceMode.REQUIRED)
    assert all(side.accepts(request, text) for text in (one, two, other))
    assert not any(side.accepts(request, text) for text in (wrong, "Hello", ""))


@pytest.mark.parametrize("name", ["hermes", *sorted(CALLS.keys() - {"qwen_tools"})])
def test_required_calls_where_the_model_has_no_format_but_a_named_parser(name: Any, tmp_path: Path) -> None:
    side = Family("chatml", tmp_path, ModelConfig(tool_call_parser=name))
    assert side.format == name
    *good, wrong = CALLS.get(name, CALLS["qwen_tools"])
    request = rules(side, ToolChoiceMode.REQUIRED)
    assert all(side.accepts(request, text) for text in good)
    assert not any(side.accepts(request, text) for text in (wrong, "Hello", ""))


def test_one_call_where_parallel_ones_are_off(family: tuple[str, Family]) -> None:
    name, side = family
    one, two, _, _ = CALLS[name]
    request = rules(side, ToolChoiceMode.REQUIRED, parallel=False)
    assert side.accepts(request, one)
    assert not side.accepts(request, two)


def test_a_named_call(family: tuple[str, Family]) -> None:
    name, side = family
    one, _, other, _ = CALLS[name]
    request = rules(side, ToolChoiceMode.NAMED, TOOLS[:1], parallel=False)
    assert side.accepts(request, one)
    assert not side.accepts(request, other)


def test_optional_calls_after_free_text(family: tuple[str, Family]) -> None:
    name, side = family
    one, two, _, wrong = CALLS[name]
    request = rules(side, ToolChoiceMode.AUTO)
    assert all(side.accepts(request, text) for text in ("It is 3 o'clock.\nSo.", one, two))
    assert not side.accepts(request, wrong)
    if name != "llama3":
        assert side.accepts(request, "I will look.\n" + one)
        assert not side.accepts(request, "I will look.\n" + wrong)


def test_a_mark_in_thoughts_begins_no_call(qwen: Family) -> None:
    plain = rules(qwen, ToolChoiceMode.AUTO)
    optional = msgspec.structs.replace(plain, reasoning=Reasoning.OPTIONAL)
    thoughts = "<think>\nI could write <tool_call> or </tool_call>\n</think>\n\n"
    for answer in ("Hello", "", CALLS["qwen_tools"][0]):
        assert qwen.accepts(optional, thoughts + answer)
    assert not qwen.accepts(optional, "I could write <tool_call> or not")


def test_thinking_before_an_optional_call(qwen: Family) -> None:
    request = rules(qwen, ToolChoiceMode.AUTO)
    assert qwen.accepts(request, "<think>\nhm\n</think>\n\n" + CALLS["qwen_tools"][0])


def test_tools_or_a_schema(qwen: Family) -> None:
    request = GrammarRequest(
        response_format=JsonSchemaFormat('{"type": "object", "properties": {"x": {"type": "null"}}}'),
        tools=ToolRules(tools=TOOLS, mode=ToolChoiceMode.AUTO, parallel=True, format=qwen.format),
    )
    assert qwen.accepts(request, CALLS["qwen_tools"][0])
    assert qwen.accepts(request, '{"x": null}')
    assert not qwen.accepts(request, '{"x": 1}')


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**400], ids=["low", "high", "far"])
def test_numbers_of_any_size_cross_to_a_worker(qwen: Family, number: int) -> None:
    schema = {"properties": {"x": {"type": "integer", "minimum": number}}, "note": [number]}
    tool = ToolSpec(name="far", parameters_json=json.dumps(schema))
    request = rules(qwen, ToolChoiceMode.REQUIRED, (tool,))
    crossed = msgspec.msgpack.decode(request.encoded().payload, type=GrammarRequest)
    assert crossed.tools is not None
    assert crossed.tools.tools[0].parameters == schema
    assert qwen.build(crossed) is not None


def test_a_tool_that_cannot_be_enforced_is_named(qwen: Family) -> None:
    hard = ToolSpec(
        name="hard",
        parameters_json=json.dumps(
            {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
        ),
        strict=True,
    )
    refused = qwen.build(rules(qwen, ToolChoiceMode.REQUIRED, (TOOLS[1], hard)))
    assert isinstance(refused, WorkRefusal)
    assert refused.field == "tools[1].function.parameters"
    assert "'hard'" in refused.message
    assert "uniqueItems" in refused.message
    lenient = ToolSpec(name="hard", parameters_json=hard.parameters_json)
    built = qwen.build(rules(qwen, ToolChoiceMode.REQUIRED, (TOOLS[1], lenient)))
    assert isinstance(built, Built)
    assert built.enforcement is not None
    assert built.enforcement.unenforced[0].path == "/tools/1/parameters/properties/x/uniqueItems"
