"""Every family's calls: known by what its template writes, read at every cut, led by its grammar, and written
again by the template as they were read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import get_args

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.chat import Tool
from contract.formats import REASONING, UNKNOWN_FORMAT, ToolCallFormat
from gateway.text.delta import TextDelta
from gateway.text.harmony import HarmonyParser
from gateway.text.reasoning import TextParser, ThinkParser
from gateway.text.tool_calls import PARSERS, marks
from gateway.text.tool_calls.values import ToolTypes, typed_value
from tests.contract.call_corpus import FAMILIES, NAMES, SCHEMA, TOOLS, corpus, source_of, turn
from tokenizer_svc.text.formats import reasoning_format, tool_call_format

VALIDATOR = jsonschema_rs.validator_for(SCHEMA)
TYPES = ToolTypes(TOOLS)
Read = tuple[str, str, list[tuple[str, str, str]]]
# Between two cuts of one reading, in characters: no mark is that long, so that no cut can hide what another
# does, and all cuts of a form are made in that many readings.
STRIDE = 37


def cuts(text: str, stride: int) -> Iterator[list[str]]:
    """The text in pieces of `stride`, which begin at every character: each cut is in one of the lists."""
    for first in range(1, min(stride, len(text)) + 1):
        yield [text[:first], *(text[at : at + stride] for at in range(first, len(text), stride))]


def read(name: str, pieces: Iterable[str], types: ToolTypes = TYPES, *, is_cut: bool = False) -> Read:
    """(content, reasoning, [(id, name, arguments)])"""
    called = PARSERS[name](lambda index: f"id{index}", types)
    parser: TextParser = called
    reasoning = FAMILIES[name].reasoning
    if name == "harmony":
        parser = HarmonyParser(parser, calls_tools=True)
    elif reasoning:
        parser = ThinkParser(parser, opened=False, form=REASONING[reasoning])
    total, delta = TextDelta(), TextDelta()
    calls: dict[int, list[str]] = {}
    for piece in [*pieces, None]:
        delta = TextDelta()
        if piece is None:
            if is_cut:
                called.cut()
            parser.finish(delta)
        else:
            parser.feed(piece, delta)
        total.absorb_text(delta)
        for part in delta.tool_calls:
            call = calls.setdefault(part.index, ["", "", ""])
            call[:] = [call[0] + part.id, call[1] + part.name, call[2] + part.arguments]
    return total.content, total.reasoning, [(call[0], call[1], call[2]) for call in calls.values()]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_known_by_what_the_template_writes(name: str) -> None:
    assert tool_call_format({"default": source_of(name)}, set(), {"bos_token": ""}) == name
    assert reasoning_format({"default": source_of(name)}, set()) == FAMILIES[name].reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_is_read_however_long_an_api_lets_it_be(name: str) -> None:
    called = "mcp-" + "n" * 126
    types = ToolTypes((Tool(name=called, parameters_json=json.dumps(SCHEMA)),))
    text = turn(name, [(called, {"text": "x"})])
    _, _, ((_, read_name, arguments),) = read(name, text, types)
    assert (read_name, json.loads(arguments)) == (called, {"text": "x"})


@pytest.mark.parametrize("lead", ["", "I will look.\n\n"])
@pytest.mark.parametrize("end", ["\n</tool_call>", "", "\n</tool_call>\n"])
def test_qwen_calls_an_offered_tool_without_the_opening_mark(lead: str, end: str) -> None:
    call = "<function=get_weather>\n<parameter=text>\nx\n</parameter>\n</function>"
    two = [("id0", "get_weather", '{"text": "x"}'), ("id1", "get_weather", '{"text": "x"}')]
    for calls, expected in ((call, two[:1]), (f"{call}\n</tool_call>\n<tool_call>\n{call}", two)):
        text = lead + calls + end
        whole = read("qwen_xml", [text])
        assert (whole[0].strip(), whole[2]) == (lead.strip(), expected)
        assert all(read("qwen_xml", [text[:at], text[at:]]) == whole for at in range(len(text)))
        assert read("qwen_xml", text) == whole
    for no_call in (
        call.replace("get_weather", "elsewhere"),
        "It is written <function=get_weather>, then its arguments.",
    ):
        assert read("qwen_xml", no_call) == (no_call, "", [])
    # No grammar has led what stands there, and strict tools are called by what follows their schemas alone.
    strict = ToolTypes([msgspec.structs.replace(tool, strict=True) for tool in TOOLS])
    for types in (ToolTypes(()), strict):
        assert read("qwen_xml", call, types) == (call, "", [])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama4", '[get_weather(text="x")]'),
        ("llama3", '{"name": "get_weather", "parameters": {"text": "x"}}'),
    ],
)
def test_llamas_call_an_offered_tool_behind_text(name: str, call: str) -> None:
    strict = ToolTypes([msgspec.structs.replace(tool, strict=True) for tool in TOOLS])
    for lead in ("Let me check.", "Let me check.\n\n", "[1] See {1}: ", 'A [ or {"name": '):
        text = lead + call
        whole = read(name, [text])
        assert whole[0] == lead
        assert [each[1:] for each in whole[2]] == [("get_weather", '{"text": "x"}')]
        assert read(name, text) == whole
        assert all(read(name, [text[:at], text[at:]]) == whole for at in range(len(text)))
        for types in (ToolTypes(()), strict):
            assert read(name, text, types) == (text, "", [])
        for no_call in (text.replace("get_weather", "elsewhere"), text[: len(lead) + 12], lead):
            assert read(name, no_call) == read(name, [no_call]) == (no_call, "", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_corpus_is_read_whole_and_at_every_cut(name: str) -> None:
    num_forms = 0
    for text, content, calls in corpus(name):
        whole = read(name, [text])
        assert whole[0].strip() == content, text
        assert [(each[1], json.loads(each[2])) for each in whole[2]] == calls, text
        assert all(VALIDATOR.is_valid(json.loads(each[2])) for each in whole[2]), text
        assert read(name, text) == whole, text
        for pieces in cuts(text, STRIDE):
            assert read(name, pieces) == whole, pieces
        if num_forms % 12 == 0:
            for pieces in cuts(text, len(text)):
                assert read(name, pieces) == whole, pieces
        num_forms += 1
    assert num_forms >= 40


@pytest.mark.parametrize("name", FAMILIES)
def test_no_mark_is_as_long_as_what_lies_between_two_cuts(name: str) -> None:
    assert max(map(len, marks(name)), default=0) < STRIDE


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_read_is_written_again(name: str) -> None:
    for text, content, _ in itertools.islice(corpus(name), 12):
        read_calls = [(each[1], json.loads(each[2])) for each in read(name, [text])[2]]
        assert turn(name, read_calls, content) == text


@pytest.mark.parametrize("name", get_args(ToolCallFormat))
def test_every_format_has_a_corpus(name: str) -> None:
    assert name in FAMILIES


# Formats in which the name is told as soon as it is whole.
TOLD_EARLY = ("hermes", "granite", "phi4", "functools", "command", "mistral", "harmony", "glm47")
# How calls begin that have no mark.
UNMARKED = tuple(
    before + each + after for before, after in (("[", "("), ('{"name": "', '"')) for each in NAMES
)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_call_that_is_cut_is_text(name: str) -> None:
    form = REASONING.get(FAMILIES[name].reasoning)
    openings = (*marks(name), *UNMARKED, "to=f", form.open if form else "")
    begins = tuple(mark[:end] for mark in openings for end in range(1, len(mark)))
    named = False
    for number, (text, _, _) in enumerate(itertools.islice(corpus(name), 0, None, 3)):
        content, _, calls = read(name, [text])
        for at in range(len(text)):
            part = read(name, [text[:at]], is_cut=True)
            # By characters, which takes the most, at other places of each text.
            if at % 16 == number % 16:
                assert read(name, text[:at], is_cut=True) == part, (text, at)
            said = part[0].rstrip()
            if not content.startswith(said):
                # A mark that was not read whole.
                equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(content, said, strict=False))
                assert said[len(list(equal)) :].strip().endswith(begins), (text, at, part)
            for cut, whole in zip(part[2], calls, strict=False):
                assert cut[1] == whole[1], (text, at)
                assert whole[2].startswith(cut[2]), (text, at)
            assert len(part[2]) <= len(calls)
            named = named or (bool(part[2]) and len(part[2]) > len(read(name, [text[:at]])[2]))
    # What has its name is there before it has arguments; where names are told early, they are told anyhow.
    assert named or name in TOLD_EARLY


NOISE = (
    *'{}[]()",:=\\ \n<|>',
    "text",
    "null",
    "get_weather",
    "functions.f:0",
    '"name"',
    "call:",
    "json",
    "🙂",
)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_malformed_calls_read_the_same_at_every_cut(name: str, data: st.DataObject) -> None:
    text = turn(name, [("get_weather", {"text": "}", "count": 1})])
    at = data.draw(st.integers(0, len(text)))
    pieces = data.draw(
        st.lists(st.sampled_from([*marks(name), *NOISE, text, text[:at], text[at:]]), max_size=8)
    )
    joined = "".join(pieces)
    whole = read(name, [joined])
    assert read(name, joined) == whole
    assert read(name, pieces) == whole
    assert all(each[1] for each in whole[2]), "every call has a name"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen_xml", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("glm", '<tool_call>{"name": "f"}</tool_call>'),
        ("glm47", "<tool_call> f and g </tool_call>"),
        ("minimax", "<minimax:tool_call>\nnothing\n</minimax:tool_call>"),
        ("deepseek_v32", "<｜DSML｜function_calls>x"),
        (
            "deepseek_v32",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ),
        ("kimi", "<|tool_calls_section_begin|>none<|tool_calls_section_end|>"),
        ("gemma4", "<|tool_call>call:f{text:}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:f{text}<end_function_call>"),
        ("llama4", "[1, 2, 3]"),
        ("llama4", "[see (this)](https://a.b)"),
        ("llama4", "[f(1)]"),
        ("granite", "<|tool_call|>{}"),
        ("phi4", "<|tool_call|>[]<|/tool_call|>"),
        ("functools", "functools is a module of Python: functools[0]"),
        ("command", '<|START_ACTION|>[{"tool_call_id": "0"}]<|END_ACTION|>'),
        ("harmony", "no message at all"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert read(name, [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "text", "thoughts", "content"),
    [
        ("qwen_xml", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("granite", "<think>hm</think><response>yes</response>", "hm", "yes"),
        ("granite", "<response>yes</response>", "", "yes"),
        ("command", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", "hm", "yes"),
        ("gemma4", "<|channel>thought\nhm<channel|>yes", "hm", "yes"),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
            "hm",
            "yes",
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>final<|message|> yes",
            "",
            "So: yes",
        ),
        (
            "harmony",
            "<|channel|>commentary to=assistant<|message|>So:<|end|>"
            "<|start|>assistant<|channel|>final to=user<|message|> yes",
            "",
            "So: yes",
        ),
    ],
)
def test_thoughts(name: str, text: str, thoughts: str, content: str) -> None:
    assert read(name, [text]) == (content, thoughts, [])
    assert read(name, text) == (content, thoughts, [])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=f<|message|>",
    ],
)
def test_harmony_calls_with_the_recipient_on_either_side(header: str) -> None:
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert read("harmony", before + header + '{"count": 1}<|call|>') == (
        "",
        "hm",
        [("id0", "f", '{"count": 1}')],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|python_tag|>f.call(text="a) b", count=1)', ("", [("id0", "f", '{"text": "a) b", "count": 1}')])),
        ('<|python_tag|>print("f.call(1)")', ('<|python_tag|>print("f.call(1)")', [])),
        ("<|python_tag|>f.call(1)", ("<|python_tag|>f.call(1)", [])),
        ("<|python_tag|>f.call(text=", ("<|python_tag|>f.call(text=", [])),
    ],
)
def test_python_behind_its_tag(text: str, expected: object) -> None:
    for pieces in ([text], text):
        content, _, calls = read("llama3", pieces)
        assert (content, calls) == expected


@pytest.mark.parametrize("name", ["glm", "glm47"])
def test_glm_is_read_with_line_breaks_and_without(name: str) -> None:
    given = {"text": "a\n", "count": 3}
    calls = [("f", given), ("f", {})]
    for text in (turn("glm", calls), turn("glm47", calls)):
        for pieces in ([text], text, *cuts(text, STRIDE)):
            content, _, found = read(name, pieces)
            assert [(each[1], json.loads(each[2])) for each in found] == calls
            assert not content.strip()


def test_harmony_calls_a_tool_whatever_its_name() -> None:
    for called in ("assistant", "user", "assistants"):
        text = turn("harmony", [(called, {"count": 1})])
        assert read("harmony", text)[2] == [("id0", called, '{"count": 1}')]


def test_ids_that_templates_need_back_are_the_models() -> None:
    text = turn("kimi", [("f", {}), ("f", {})])
    assert [call[0] for call in read("kimi", [text])[2]] == ["functions.f:0", "functions.f:1"]
    twice = text.replace("f:1", "f:0")
    assert [call[0] for call in read("kimi", [twice])[2]] == ["functions.f:0", "functions.f:1"]
    bare = text.replace("functions.f:1", "f")
    assert [call[:2] for call in read("kimi", [bare])[2]][1] == ("functions.f:1", "f")


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("42", "count", 42),
        ("42", "text", "42"),
        ("True", "flag", True),
        ("{'x': 1}", "point", {"x": 1}),
        ("null", "maybe", None),
        ("None", "maybe", None),
        ("None", "size", None),
        ("None", "text", "None"),
        ("None", "count", "None"),
        ("nulls", "maybe", "nulls"),
        ("null", "size", None),
        ("much", "count", "much"),
        ("[1]", "unknown", [1]),
        ("plain", "unknown", "plain"),
    ],
)
def test_values_get_the_types_of_the_schema(written: str, key: str, value: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(read("qwen_xml", [text])[2][0][2]) == {key: value}


def test_texts_arrive_while_they_are_written() -> None:
    text = turn("qwen_xml", [("f", {"text": "x" * 1000})])
    parser = PARSERS["qwen_xml"](str, TYPES)
    delta = TextDelta()
    parser.feed(text[: len(text) // 2], delta)
    assert sum(len(piece.arguments) for piece in delta.tool_calls) > 400


def test_an_unknown_format_is_said_and_read_as_no_other(caplog: pytest.LogCaptureFixture) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>!{{ c.function.name }}"
        "{% endfor %}{% endfor %}"
    )
    assert tool_call_format({"default": template}, {"<|python_tag|>"}, {}) == UNKNOWN_FORMAT
    assert "<tool_call>!probe_name" in caplog.text
    assert "--tool-call-parser" in caplog.text


@pytest.mark.parametrize(
    "value", ["{1, 2}", "{(1, 2): 3}", "[b'x']", "[1j]", "[...]", "['\\ud800']", "{'a': {1}}"]
)
def test_what_python_has_and_json_has_not_is_a_text(value: str) -> None:
    for kinds in (frozenset[str](), frozenset({"object", "array"})):
        assert json.loads(typed_value(value, kinds)) == value


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    arguments = TYPES.written("f", {"items": ["\ud800"], "text": "a\udfff"})
    assert json.loads(arguments.encode()) == {"items": ["\ufffd"], "text": "a\ufffd"}
