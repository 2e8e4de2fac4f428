"""Reasoning and tool-call parsers: every cut of a text gives the same answer, and nothing gets lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.outputs import FinishReason, TokenLogprobs
from gateway.engines.types import EngineOutput
from gateway.pipeline.delta import ChoiceStream
from gateway.text.choice import ChoiceText, TextOptions
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import TokenTexts
from tests.unit.gateway.rig.vocabulary import encode
from tests.unit.gateway.text.test_detokenizer import VOCABULARY

TEXTS = TokenTexts(VOCABULARY)


def read(text: str, at: list[int], options: TextOptions) -> tuple[str, str, list[tuple[str, str, str]]]:
    """(content, reasoning, [(id, name, arguments)]) of a text fed in pieces."""
    choice = ChoiceText(TEXTS, options, lambda index: f"id{index}")
    ids = encode(text)
    bounds = [0, *sorted(at), len(ids)]
    total = TextDelta()
    calls: dict[int, list[str]] = {}
    for start, end in itertools.pairwise(bounds):
        delta = TextDelta()
        choice.feed(ids[start:end], delta)
        _add(delta, total, calls)
    delta = TextDelta()
    choice.finish(delta)
    _add(delta, total, calls)
    return total.content, total.reasoning, [(c[0], c[1], c[2]) for c in calls.values()]


def _add(delta: TextDelta, total: TextDelta, calls: dict[int, list[str]]) -> None:
    total.absorb_text(delta)
    for piece in delta.tool_calls:
        call = calls.setdefault(piece.index, ["", "", ""])
        call[0] += piece.id
        call[1] += piece.name
        call[2] += piece.arguments


HERMES = TextOptions(tool_call_format="hermes", reasoning_format="think")
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "\n",
    '{"name": "add", "arguments": {"a": [1, "}"]}}',
    '{"arguments": {"b": 2}, "name": "late"}',
    '{"name": "text", "arguments": "{\\"a\\": 1}"}',
    '{"name": 3}',
    "{",
    "hello",
    "<think>",
    "</think>",
    "é",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
cuts = st.lists(st.integers(0, 200), max_size=8)


@given(texts, cuts, st.booleans())
def test_every_cut_gives_the_same_answer(text: str, at: list[int], opened: bool) -> None:
    options = TextOptions(tool_call_format="hermes", reasoning_format="think", reasoning_opened=opened)
    length = len(text.encode())
    assert read(text, [min(cut, length) for cut in at], options) == read(text, [], options)
    assert read(text, list(range(length)), options) == read(text, [], options)


@pytest.mark.parametrize("stop", ["\n\n", "think", "STOP", ">"])
@given(cuts, st.booleans())
def test_a_stop_string_is_looked_for_in_the_answer_alone(stop: str, at: list[int], opened: bool) -> None:
    thoughts = f"I think {stop} of\n\nit"
    text = f"{'' if opened else '<think>'}\n{thoughts}\n</think>\n\nthe answer{stop} and more"
    options = TextOptions(reasoning_format="think", reasoning_opened=opened, stop=(stop,))
    content, reasoning, _ = read(text, [min(cut, len(text)) for cut in at], options)
    assert (content, reasoning) == ("the answer", thoughts)


@pytest.mark.parametrize("space", ["", "\n", "\n\n"])
@given(cuts)
def test_thoughts_may_begin_after_line_breaks(space: str, at: list[int]) -> None:
    text = f"{space}<think>hm</think>\n\n{{}}"
    options = TextOptions(reasoning_format="think")
    assert read(text, [min(cut, len(text)) for cut in at], options)[:2] == ("{}", "hm")
    assert read(f"{space}{{}}", [0], options)[0] == f"{space}{{}}"


@pytest.mark.parametrize("with_logprobs", [False, True])
@given(cuts, st.booleans(), st.integers(0, 40))
def test_a_stop_id_is_looked_for_in_the_answer_alone(
    with_logprobs: bool, at: list[int], opened: bool, min_tokens: int
) -> None:
    text = f"{'' if opened else '<think>'}\nwith ! in it\n</think>\n\nthe answer! and more! of it"
    ids = encode(text)
    (stop,) = encode("!")
    options = TextOptions(
        reasoning_format="think",
        reasoning_opened=opened,
        stop_token_ids=frozenset({stop}),
        min_tokens=min_tokens,
    )
    choice = ChoiceStream(0, TEXTS, options, str, with_logprobs=with_logprobs)
    content, reasoning, reason = "", "", None
    sent: list[int] = []
    bounds = [0, *sorted(min(cut, len(ids)) for cut in at), len(ids)]
    for start, end in itertools.pairwise(bounds):
        logprobs = tuple(TokenLogprobs(each, -1.0) for each in ids[start:end])
        delta = choice.feed(EngineOutput(0, ids[start:end], logprobs=logprobs))
        if delta is not None:
            content, reasoning = content + delta.content, reasoning + delta.reasoning
            sent, reason = sent + list(delta.token_ids), delta.finish_reason
        if reason is not None:
            break
    first = ids.index(stop, len(encode(text.partition("</think>")[0])))
    assert reasoning == "with ! in it"
    assert reason is FinishReason.STOP
    assert content == ("the answer" if first >= min_tokens else "the answer! and more")
    assert sent == ids[: len(sent)]
    assert ids[len(sent)] == stop


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=8)), max_size=3))
def test_arguments_arrive_as_the_model_wrote_them(arguments: dict[str, object]) -> None:
    written = json.dumps(arguments)
    text = f'before\n<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>\n'
    content, _, calls = read(text, [], HERMES)
    assert content == "before"
    assert calls == [("id0", "f", written)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", "", [])),
        ("<think>\nso\n</think>\n\nanswer", ("answer", "so", [])),
        ("say <think> aloud", ("say <think> aloud", "", [])),
        ("<think>never ends", ("", "never ends", [])),
        ("<tool_call>not json</tool_call>", ("<tool_call>not json</tool_call>", "", [])),
        ('<tool_call>{"name": "f", "argu', ("", "", [("id0", "f", "")])),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"x": 1',
            ("", "", [("id0", "f", "{}"), ("id1", "g", '{"x": 1')]),
        ),
        ("ends with <tool_c", ("ends with <tool_c", "", [])),
    ],
)
def test_examples(text: str, expected: object) -> None:
    assert read(text, [], HERMES) == expected


def test_without_tools_the_markers_are_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(text, [], TextOptions()) == (text, "", [])


def test_one_call_ends_the_text_when_only_one_is_allowed() -> None:
    options = TextOptions(tool_call_format="hermes", single_tool_call=True)
    choice = ChoiceText(TEXTS, options, str)
    choice.feed(encode('<tool_call>{"name": "f", "arguments": {}}'), TextDelta())
    assert choice.ended


FORMATS = {
    "hermes": [*FRAGMENTS],
    "llama3": [
        "<|python_tag|>",
        "<|python",
        '{"name": "add", "parameters": {"a": [1, "}"]}}',
        '{"name": "Bob", "age": 3}',
        '{"parameters": {}, "name": "f"}',
        "; ",
        "\n",
        "{",
        "text",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL",
        '[{"name": "add", "arguments": {"a": 1}}',
        ', {"name": "sub", "arguments": {}}',
        "]",
        'add[ARGS]{"a": {"b": "]"}}',
        "sub[CALL_ID]x9[ARGS]{}",
        "text",
        "{",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        '<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{"b": "{"}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>sub<｜tool▁sep｜><｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n[1]<｜tool▁call▁end｜>",
        "<｜tool",
        "\n",
        "text {",
    ],
}

FORMATS["deepseek_v31"] = FORMATS["deepseek"]
# What no format has: every byte the model can make, and the markers of the others.
NOISE = [*'{}[]",:\\ \n<|>', "\x00", "🙂", "é", "<think>", "</think>", "null", '"name"', '"arguments"']


@given(st.data(), st.booleans(), st.booleans())
@pytest.mark.parametrize("name", FORMATS)
def test_malformed_outputs_never_fail_and_lose_no_chunk_order(
    name: str, data: st.DataObject, reasons: bool, opened: bool
) -> None:
    pieces = st.sampled_from([*FORMATS[name], *NOISE])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    options = TextOptions(
        tool_call_format=name,
        reasoning_format="think" if reasons else "",
        reasoning_opened=opened and reasons,
    )
    whole = read(text, [], options)
    assert read(text, list(range(len(text.encode()))), options) == whole
    assert all(call[1] for call in whole[2]), "every call has a name"


SHORT = {
    "hermes": '\n<tool_call>{"name":"f","arguments":{}}</tool_call>\nx',
    "llama3": '<|python_tag|>{"name":"f","parameters":{}}; {"name":"g","parameters":{}} x',
    "mistral": 'a[TOOL_CALLS][{"name":"f","arguments":{}}]',
    "deepseek": "a \n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜> y",
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_pairs_of_cuts_of_a_short_output(name: str) -> None:
    options = TextOptions(tool_call_format=name, reasoning_format="think")
    whole = read(SHORT[name], [], options)
    for pair in itertools.combinations(range(len(SHORT[name].encode())), 2):
        assert read(SHORT[name], list(pair), options) == whole, pair


@given(st.data(), cuts)
@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_of_every_format_gives_the_same_answer(
    name: str, data: st.DataObject, at: list[int]
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FORMATS[name]), max_size=6)))
    options = TextOptions(tool_call_format=name)
    length = len(text.encode())
    whole = read(text, [], options)
    assert read(text, [min(cut, length) for cut in at], options) == whole
    assert read(text, list(range(length)), options) == whole


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3", '{"name": "f", "parameters": {"x": 1}}', ("", "", [("id0", "f", '{"x": 1}')])),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
            ("", "", [("id0", "f", "{}"), ("id1", "g", '{"y": 2}')]),
        ),
        ("llama3", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', "", [])),
        ("llama3", 'see {"name": "f", "parameters": {}}', ('see {"name": "f", "parameters": {}}', "", [])),
        ("llama3", "<|python", ("<|python", "", [])),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"x": 1}{"y": 2}g{}',
            ("", "", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")]),
        ),
        ("mistral", "[TOOL_CALLS][ARGS]{}", ("[TOOL_CALLS][ARGS]{}", "", [])),
        (
            "mistral",
            'ok[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            ("ok", "", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")]),
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]9[ARGS]{}',
            ("", "", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")]),
        ),
        ("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", "", [])),
        (
            "deepseek",
            "sure\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            ("sure", "", [("id0", "f", '{"x": 1}'), ("id1", "g", "{}")]),
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
            'function<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ("", "", [("id0", "f", "{}"), ("id1", "function", '{"x": 1}')]),
        ),
        ("deepseek", "<｜tool▁calls▁begin｜>x", ("<｜tool▁calls▁begin｜>x", "", [])),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>y",
            ("<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>y", "", []),
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
            ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", "", []),
        ),
        # Without arguments; the next call's are not its own.
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁call▁begin｜>"
            'g<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ("", "", [("id0", "f", "{}"), ("id1", "g", '{"x": 1}')]),
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ("", "", [("id0", "f", "{}")]),
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n[1]<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n[1]<｜tool▁call▁end｜>"
                "<｜tool▁calls▁end｜>",
                "",
                [],
            ),
        ),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', ("", "", [("id0", "f", "{}")])),
        ("mistral", '[TOOL_CALLS] {"nam": "f"}', ('[TOOL_CALLS] {"nam": "f"}', "", [])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("id0", "f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', ("", "", [("id0", "f", "{}")])),
    ],
)
def test_formats(name: str, text: str, expected: object) -> None:
    assert read(text, [], TextOptions(tool_call_format=name)) == expected
