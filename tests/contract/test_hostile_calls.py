"""What models write at the edges of every family's form: nothing of it is lost, and no cut changes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from contract.formats import JSON, REASONING, SECTIONS, TAGGED
from gateway.text.delta import AnswerPart, TextDelta, TextPart, ThoughtPart, ToolCallDelta
from gateway.text.harmony import HarmonyParser
from gateway.text.reasoning import TextParser, ThinkParser
from gateway.text.tool_calls import PARSERS, marks
from gateway.text.tool_calls.values import ToolTypes
from tests.contract.call_corpus import FAMILIES, TOOLS, turn

TYPES = ToolTypes(TOOLS)
Call = tuple[str, dict[str, Any]]
# Of all families together: what closes calls, arguments, thoughts and answers.
CLOSING = (
    *("</tool_call>", "</think>", "</response>", "<|END_ACTION|>", "<|END_RESPONSE|>", "[/THINK]", "```"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("</parameter>", "</function>", "</arg_value>", "</invoke>", "</｜DSML｜invoke>", "<|/tool_call|>"),
    *("}<tool_call|>", "}<end_function_call>", "<|python_end|>", "<|eom_id|>", ")]", "}]", "}}"),
)
TEXTS = (
    *CLOSING,
    # The other way around: behind a value's closing mark what follows values would end it.
    "".join(reversed(CLOSING)),
    "a\r\nb\r\n",
    "\r\n",
    "\n\n a \t",
    " ",
    "\\u00e9 \\ud83d\\ude42 \\n \\\\",
    "é 🙂 \u2028 \x7f \ufeff ｜",
    '"\'"',
    '\\"',
    "\\",
    "\\\\",
    "{'a': \"b\"}",
    '{"name": "f", "arguments": {"text": "}"}}',
    "[f(text='x')]",
    "null",
    "3",
    "True",
    ", ",
    ": ",
    "functions.f:0",
    "=",
)


def parser_of(name: str) -> TextParser:
    parser: TextParser = PARSERS[name](lambda index: f"id{index}", TYPES)
    if name == "harmony":
        return HarmonyParser(parser, calls_tools=True)
    form = FAMILIES[name].reasoning
    calls = next(iter(marks(name)), "")
    return ThinkParser(parser, opened=False, form=REASONING[form], calls=calls) if form else parser


def read(name: str, pieces: Iterable[str]) -> list[AnswerPart]:
    """The parts of an answer, in order, each of them whole."""
    parser, total = parser_of(name), TextDelta()
    for piece in pieces:
        delta = TextDelta()
        parser.feed(piece, delta)
        total.absorb_text(delta)
    delta = TextDelta()
    parser.finish(delta)
    total.absorb_text(delta)
    return total.runs()


def read_at_all_cuts(name: str, text: str) -> list[AnswerPart]:
    """The same for every cut in two, every cut into characters, and into threes."""
    whole = read(name, [text])
    assert read(name, text) == whole, text
    assert read(name, [text[at : at + 3] for at in range(0, len(text), 3)]) == whole, text
    for at in range(0, len(text), max(1, len(text) // 40)):
        assert read(name, [text[:at], text[at:]]) == whole, (text, at)
    return whole


def said(parts: list[AnswerPart]) -> list[object]:
    """Texts as they are, thoughts in a list, calls with their arguments."""
    found: list[object] = []
    for part in parts:
        match part:
            case TextPart(text):
                found.append(text)
            case ThoughtPart(text):
                found.append([text])
            case ToolCallDelta():
                found.append((part.name, json.loads(part.arguments)))
    return found


def thoughts_of(name: str, thought: str) -> str:
    """A thought as the family writes it, before the answer."""
    if not FAMILIES[name].reasoning:
        return ""
    form = REASONING[FAMILIES[name].reasoning]
    return f"{form.open}{thought}{form.close}"


@pytest.mark.parametrize(
    ("name", "text"),
    # The corpus finds a turn by its head, which the text must not have.
    [(name, text) for name in FAMILIES for text in TEXTS if FAMILIES[name].head not in text],
)
def test_any_text_may_be_an_argument(name: str, text: str) -> None:
    call: Call = ("get_weather", {"text": text, "count": 1, "items": [text]})
    assert said(read_at_all_cuts(name, turn(name, [call]))) == [call]
    other: Call = ("f", {"options": {"names": [text, text]}, "text": f"x{text}"})
    assert said(read_at_all_cuts(name, turn(name, [other]))) == [other]


def without_thoughts(name: str, text: str) -> str:
    """An answer without the empty thought that some templates write."""
    form = REASONING[FAMILIES[name].reasoning or "think"]
    return text.lstrip("\n").partition(form.close)[2] if text.lstrip("\n").startswith(form.open) else text


@pytest.mark.parametrize(
    "given", [{}, {"text": ""}, {"items": []}, {"options": {}}, {"options": {"names": []}}]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_may_be_empty_and_calls_follow_thoughts(name: str, given: dict[str, Any]) -> None:
    call: Call = ("fs-write_2", given)
    calls = [call] if FAMILIES[name].single else [call, ("f", {"count": 2}), call]
    for count in range(1, len(calls) + 1):
        answer = without_thoughts(name, turn(name, calls[:count]))
        assert said(read_at_all_cuts(name, answer)) == calls[:count]
        thought = thoughts_of(name, "I will\ncall {it}.")
        if not thought:
            continue
        for space in ("", "\n", "\n\n"):
            if name == "harmony" and space:
                continue
            found = said(read_at_all_cuts(name, thought + space + answer))
            assert found == [["I will\ncall {it}."], *calls[:count]]


# What stands before the opening mark of a call, and what behind its closing one.
MARKED = {
    **{name: (form.open, form.close) for name, form in JSON.items()},
    **{name: (form.open, form.close) for name, form in TAGGED.items()},
    **{name: (form.open, form.close) for name, form in SECTIONS.items()},
    **dict.fromkeys(("gemma4", "functiongemma"), ("", "")),
    **dict.fromkeys(("mistral", "mistral_v11", "mistral_v13"), ("[TOOL_CALLS]", "")),
}


def texts_between(name: str) -> Iterator[tuple[str, list[object]]]:
    one: Call = ("get_weather", {"text": "a"})
    two: Call = ("f", {"count": 2})
    first, second = (without_thoughts(name, turn(name, [call])) for call in (one, two))
    yield f"{first}\nbetween {{it}} [all]\n{second}", [one, "between {it} [all]", two]
    yield f"before\n\n{first}behind", ["before", one, "behind"]
    yield f"{first}\r\n\r\n{second}\r\n", [one, two]
    yield f"{first}\n\n1. behind: {{x}}", [one, "1. behind: {x}"]


@pytest.mark.parametrize("name", MARKED)
def test_text_stands_between_calls_and_behind_them(name: str) -> None:
    for text, expected in texts_between(name):
        found = said(read_at_all_cuts(name, text))
        stripped = [each.strip() if isinstance(each, str) else each for each in found]
        assert [each for each in stripped if each] == expected, text


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *(("hermes", end) for end in ("</tool_call>", "\n</tool_call>", "}\n</tool_call>")),
        *(("phi4", end) for end in ("<|/tool_call|>", "]<|/tool_call|>")),
        *(("command", end) for end in ("<|END_ACTION|>", "]<|END_ACTION|>", "\n]<|END_ACTION|>")),
        ("granite", "]"),
        ("functools", "]"),
        *((name, SECTIONS[name].close) for name in SECTIONS),
        *((name, SECTIONS[name].call_close + SECTIONS[name].close) for name in SECTIONS),
        *((name, form.close) for name, form in TAGGED.items() if form.call_close),
    ],
)
def test_text_behind_a_call_without_its_end_is_kept(name: str, end: str) -> None:
    call: Call = ("get_weather", {"count": 1})
    whole = without_thoughts(name, turn(name, [call]))
    wanted = end.lstrip("}\n")
    text, found, _ = whole.rpartition(wanted)
    assert found, whole
    behind = "\nThat was the call; {and} this is text."
    for close in ("", end):
        told = said(read_at_all_cuts(name, text + close + behind))
        assert [each.strip() if isinstance(each, str) else each for each in told] == [call, behind.strip()]


@pytest.mark.parametrize("tools", FAMILIES)
@pytest.mark.parametrize("form", [form for form in REASONING if REASONING[form].answer_close])
def test_the_last_closing_tag_ends_a_tagged_answer_and_others_are_text(form: str, tools: str) -> None:
    tags = REASONING[form]
    opens, close = tags.answer_open, tags.answer_close
    calls = next(iter(marks(tools)), "")

    def told(pieces: Iterable[str]) -> str:
        parser = ThinkParser(
            PARSERS[tools](str, TYPES) if tools != "harmony" else PARSERS["hermes"](str, TYPES),
            opened=False,
            form=tags,
            calls=calls,
        )
        total = TextDelta()
        for piece in pieces:
            parser.feed(piece, total)
        parser.finish(total)
        return total.content

    for text, expected in (
        (f"{opens}a{close}", "a"),
        (f"\n{opens}a{close}\n\n", "a"),
        (f"{opens}a {close} b{close}", f"a {close} b"),
        (f"{opens}a{close} b", f"a{close} b"),
        (f"{opens}a{close}{close}", f"a{close}"),
        (f"{opens}a{close}\n{close}\n", f"a{close}\n"),
        (f"{opens}{close}", ""),
        (f"a{close}", f"a{close}"),
        (f"{opens}a{close[:-1]}", f"a{close[:-1]}"),
    ):
        assert told([text]).rstrip("\n") == expected.rstrip("\n"), text
        assert told(text) == told([text])
        for at in range(len(text)):
            assert told([text[:at], text[at:]]) == told([text]), (text, at)


@pytest.mark.parametrize("form", ["granite", "command"])
def test_a_call_may_follow_a_tagged_answer(form: str) -> None:
    tags, call = REASONING[form], ("get_weather", {"text": "a"})
    text = f"{tags.open}hm{tags.close}{tags.answer_open}I look.{tags.answer_close}\n"
    text += without_thoughts(form, turn(form, [call]))
    assert said(read_at_all_cuts(form, text)) == [["hm"], "I look.", call]


@pytest.mark.parametrize(
    ("name", "text", "behind"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>\nyes', "yes"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops} and no end', ""),
        ("command", '<|START_ACTION|>[{"tool_name": "f", "parameters": {} oops}]<|END_ACTION|>yes', "yes"),
    ],
)
def test_a_broken_call_shows_what_is_broken(name: str, text: str, behind: str) -> None:
    parts = read_at_all_cuts(name, text)
    call = parts[0]
    assert isinstance(call, ToolCallDelta)
    assert call.name == "f"
    assert "oops}" in call.arguments
    with pytest.raises(ValueError):
        json.loads(call.arguments)
    assert [part.text.strip() for part in parts[1:]] == ([behind] if behind else [])
