"""What each check takes for right, and what holds the programs that models write."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.errors import ConfigError
from services.gate.cases import CHAT, Case, Pair, ServerAnswer, ToolInvocation
from services.gate.language import language_of
from services.gate.sandbox import Sandbox
from services.gate.scoring import Scorer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer"}},
                "required": ["minutes"],
            },
        },
    }
]
RIGHT_CALL = {"name": "set_timer", "arguments": {"minutes": 5}}


def score(check: str, wanted: Any, answer: ServerAnswer, **more: Any) -> float:
    """The candidate's score, beside a baseline that was refused."""
    case = Case(
        id="x",
        layer="task",
        question="x",
        path=CHAT,
        body={"tools": TOOLS},
        check=check,
        answer=wanted,
        **more,
    )
    pair = Pair(case=case, baseline=ServerAnswer(refusal="400"), candidate=answer)
    found = Scorer(seeds_hold=True).score(pair)
    assert found.baseline == 0.0
    assert found.difference == -found.candidate
    return found.candidate


@pytest.mark.parametrize(
    ("check", "wanted", "text", "expected"),
    [
        ("exact", "Oslo", " Oslo\n", 1.0),
        ("exact", "Oslo", "Oslo.", 0.0),
        ("contains", ["Oslo", "Rome"], "Rome, then Oslo", 1.0),
        ("contains", ["Oslo", "Rome"], "Rome", 0.0),
        ("regex", r"^\d+$", "12", 1.0),
        ("json", {"a": [1, 2]}, '```json\n{"a": [1, 2]}\n```', 1.0),
        ("json", {"a": [1, 2]}, '{"a": [2, 1]}', 0.0),
        ("json", {"a": 1}, "a is 1", 0.0),
        ("numeric", 1234.5, "First 7, so it is 1,234.5.", 1.0),
        ("numeric", 12, "12 or 13", 0.0),
        ("numeric", 12, "twelve", 0.0),
        ("schema", {"type": "integer"}, "5", 1.0),
        ("schema", {"type": "integer"}, "5.5", 0.0),
        ("schema", {"type": "integer"}, "```\n5\n```", 0.0),
        ("refusal", True, "I'm sorry, but I can't help with that.", 1.0),
        ("refusal", False, "I cannot do that", 0.0),
        ("refusal", False, "Once upon a time", 1.0),
        ("language", "de", "Das ist nicht der Weg, den ich gehe.", 1.0),
        ("language", "de", "That is not the way", 0.0),
        ("format", r"\{.*\}", '{"a": 1}', 1.0),
        ("format", r"\{.*\}", 'Here: {"a": 1}', 0.0),
        ("needle", ["12", "105"], "12 is in [105]", 1.0),
        ("needle", ["12", "105"], "12 is in [1050]", 0.5),
    ],
)
def test_checks(check: str, wanted: Any, text: str, expected: float) -> None:
    assert score(check, wanted, ServerAnswer(text=text)) == expected


def test_a_number_may_be_off_by_its_tolerance() -> None:
    assert score("numeric", 10, ServerAnswer(text="10.4"), tolerance=0.5) == 1.0
    assert score("numeric", 10, ServerAnswer(text="10.6"), tolerance=0.5) == 0.0


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("set_timer", '{"minutes": 5}')], 1.0),
        ([("set_timer", '{"minutes": 6}')], 0.5),
        ([("set_timer", '{"minutes": "5"}')], 0.0),
        ([("set_timer", "5 minutes")], 0.0),
        ([("get_weather", '{"minutes": 5}')], 0.0),
        ([("set_timer", '{"minutes": 5}')] * 2, 0.0),
        ([], 0.0),
    ],
)
def test_calls(calls: list[tuple[str, str]], expected: float) -> None:
    answer = ServerAnswer(calls=tuple(ToolInvocation(*each) for each in calls))
    assert score("tool", RIGHT_CALL, answer) == expected
    assert score("tool", None, answer) == float(not calls)


def test_what_is_refused_is_lost() -> None:
    assert score("refusal", True, ServerAnswer(text="I cannot", refusal="500: broken")) == 0.0


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Это не так просто", "ru"),
        ("今日は天気がいい", "ja"),
        ("今天天气很好", "zh"),
        ("Le chat est dans la maison", "fr"),
        ("12345", None),
    ],
)
def test_languages(text: str, language: str | None) -> None:
    assert language_of(text) == language


def _tokens_case() -> Case:
    return Case(id="x", layer="tokens", question="x", path=CHAT, body={}, check="tokens")


def test_tokens_are_compared_with_what_the_baseline_does_itself() -> None:
    first = ServerAnswer(tokens=("a", "b", "c", "d"), logprobs=(-1.0,) * 4)
    other = ServerAnswer(tokens=("a", "b", "x", "y"), logprobs=(-1.0,) * 4)

    def difference(control: ServerAnswer, candidate: ServerAnswer) -> float:
        pair = Pair(case=_tokens_case(), baseline=first, candidate=candidate, control=control)
        return Scorer(seeds_hold=True).score(pair).difference

    assert difference(first, first) == 0.0
    assert difference(first, other) == 0.25
    assert difference(other, other) == 0.0
    assert difference(other, first) == -0.25
    assert difference(first, ServerAnswer(refusal="500")) == 1.0
    off = ServerAnswer(tokens=first.tokens, logprobs=(-1.05,) * 4)
    assert difference(first, off) == pytest.approx(0.25)


# --- programs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox("confined")
    except ConfigError:
        # Where no namespace can be made, all but the network is tried.
        return Sandbox("with network")


def test_a_program_passes_its_test(sandbox: Sandbox) -> None:
    assert sandbox.passes("def add(a, b):\n    return a + b", "assert add(2, 3) == 5")
    assert not sandbox.passes("def add(a, b):\n    return a - b", "assert add(2, 3) == 5")
    assert not sandbox.passes("def add(a, b)", "pass")
    assert not sandbox.passes("import os\nos._exit(0)", "assert False")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(4 << 30)",
        "open('big', 'wb').write(bytes(8 << 20))",
        "files = [open('/dev/null') for _ in range(200)]",
    ],
    ids=["processor", "memory", "disk", "files"],
)
def test_a_program_is_held_to_its_limits(sandbox: Sandbox, program: str) -> None:
    assert not sandbox.passes(program, "pass")


def test_a_program_sees_no_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_API_KEY", "secret")
    assert sandbox.passes("import os", "assert 'MILLRACE_API_KEY' not in os.environ")


def test_a_confined_program_reaches_no_network() -> None:
    try:
        confined = Sandbox("confined")
    except ConfigError as error:
        pytest.skip(str(error))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert not confined.passes(program, "pass")
        assert Sandbox("with network").passes(program, "pass")


def test_what_a_program_starts_ends_with_it(sandbox: Sandbox, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"""
import os, time
child = os.fork()
if not child:
    time.sleep(600)
open({str(note)!r}, "w").write(str(child))
"""
    assert sandbox.passes(program, "pass")
    child = int(note.read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        pass
