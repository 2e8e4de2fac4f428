"""Suites: whatever is wrong is named with file and line, before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from services.gate.cases import LAYERS
from services.gate.suite import DEFAULT, build_cases, read_suite


def refusal(tmp_path: Path, text: str, **files: str) -> str:
    """What a suite with these files beside it is refused with."""
    (tmp_path / "suite.toml").write_text(text)
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    with pytest.raises(ConfigError) as caught:
        build_cases(read_suite(tmp_path / "suite.toml"), tmp_path, 1024, 4.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tasks]\n", "tasks"),
        ("[task]\nthreshold = 1\n", "threshold"),
        ("[task]\ndelta = 2\n", "$.task.delta"),
        ("[task]\nfile = 'none.jsonl'\n", "none.jsonl"),
        ("[long_context]\nkinds = ['double']\n", "kinds"),
        ("name = 'empty'\n", "no layer decides"),
        ("[task]\ndecides = false\n", "no layer decides"),
        ("[task\n", "not TOML"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    told = refusal(tmp_path, text)
    assert named in told
    assert "suite.toml" in told or "relative to the suite" in told


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"prompt": "hi", "check": "exact"}, "no answer"),
        ({"prompt": "hi", "check": "exact", "answer": ""}, "expected a text"),
        ({"prompt": "hi", "check": "exact", "answer": "x", "weight": 1}, "weight"),
        ({"prompt": "hi", "answer": "x"}, "check '' is none of [task]"),
        ({"prompt": "hi", "check": "schema", "answer": {}}, "check 'schema' is none of [task]"),
        ({"check": "exact", "answer": "x"}, "either prompt or messages"),
        ({"prompt": "hi", "messages": [], "check": "exact", "answer": "x"}, "either prompt or messages"),
        ({"prompt": "hi", "check": "regex", "answer": "("}, "not a regular expression"),
        ({"prompt": "hi", "check": "numeric", "answer": True}, "expected a number"),
        ({"prompt": "hi", "check": "contains", "answer": []}, "expected text or texts"),
        ({"prompt": "hi", "check": "code", "answer": "assert True"}, "run_code is off"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: object, named: str) -> None:
    right = json.dumps({"id": "right", "prompt": "hi", "check": "exact", "answer": "x"})
    told = refusal(tmp_path, "[task]\nfile = 'tasks.jsonl'\n", tasks=f"{right}\n\n{json.dumps(line)}\n")
    assert named in told
    assert "tasks.jsonl:3" in told


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"prompt": "hi", "check": "schema", "answer": {"type": "intger"}}, "not a JSON schema"),
        ({"prompt": "hi", "check": "tool", "answer": None}, "tools"),
        ({"prompt": "hi", "check": "tool", "answer": {"name": "b"}, "tools": [{}]}, "tools"),
        (
            {
                "prompt": "hi",
                "check": "tool",
                "answer": {"name": "b"},
                "tools": [{"type": "function", "function": {"name": "a"}}],
            },
            "no tool is named 'b'",
        ),
    ],
)
def test_a_structure_that_is_wrong_is_named(tmp_path: Path, line: object, named: str) -> None:
    told = refusal(tmp_path, "[structure]\nfile = 'calls.jsonl'\n", calls=json.dumps(line))
    assert named in told
    assert "calls.jsonl:1" in told


def test_what_is_no_case_is_named(tmp_path: Path) -> None:
    text = "[task]\nfile = 'tasks.jsonl'\n"
    assert "tasks.jsonl:1" in refusal(tmp_path, text, tasks="{'prompt'}\n")
    assert "no cases" in refusal(tmp_path, text, tasks="\n")
    line = json.dumps({"id": "a", "prompt": "hi", "check": "exact", "answer": "x"})
    assert "two cases have the id 'a'" in refusal(tmp_path, text, tasks=f"{line}\n{line}\n")
    assert "text is missing" in refusal(
        tmp_path, "[intrinsic]\nfile = 'texts.jsonl'\n", texts='{"text": ""}\n'
    )


def test_the_default_suite_has_all_layers_and_is_always_the_same() -> None:
    cases = build_cases(DEFAULT, Path(), 2048, 4.0)
    assert {case.layer for case in cases} == set(LAYERS)
    assert len({case.id for case in cases}) == len(cases)
    assert cases == build_cases(DEFAULT, Path(), 2048, 4.0)


def test_needles_are_where_they_should_be_and_texts_as_long() -> None:
    cases = [case for case in build_cases(DEFAULT, Path(), 2048, 4.0) if case.layer == "long_context"]
    assert {(case.length, case.depth) for case in cases} == {
        (length, depth) for length in (512, 1024, 1843) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    for case in cases:
        text = case.body["messages"][0]["content"]
        assert len(text) / 4.0 < case.length
        assert len(text) / 4.0 > case.length * 0.5
        at = text.index(f"is {case.answer[0]}.") / len(text)
        assert abs(at - case.depth) < 0.25
        assert all(answer in text for answer in case.answer)


def test_a_case_more_leaves_the_others_in_their_order(tmp_path: Path) -> None:
    def order(count: int) -> list[str]:
        lines = [
            json.dumps({"id": f"case {index}", "prompt": "hi", "check": "exact", "answer": "x"})
            for index in range(count)
        ]
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
        (tmp_path / "suite.toml").write_text("[task]\nfile = 'tasks.jsonl'\n")
        return [case.id for case in build_cases(read_suite(tmp_path / "suite.toml"), tmp_path, 1024, 4.0)]

    assert [name for name in order(31) if name != "case 30"] == order(30)
    assert order(30) != [f"case {index}" for index in range(30)]
