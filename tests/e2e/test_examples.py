"""What people copy and paste works as it stands: examples of the README, of their page, and of a start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.e2e.stack import LIMIT_S, Stack

README = (ROOT / "README.md").read_text(encoding="utf-8")
_EXAMPLES = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
_PYTHON = re.findall(r"```python\n(.*?)```", _EXAMPLES, re.DOTALL)
_CURL = [block for block in re.findall(r"```\n(.*?)```", README, re.DOTALL) if block.startswith("curl")]


def run(stack: Stack, *command: str, stdin: str = "") -> str:
    """Standard output of a command in an environment that finds the stack."""
    finished = subprocess.run(
        command,
        env={**os.environ, "MILLRACE_STATE_DIR": str(stack.directory)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def here(stack: Stack, example: str) -> str:
    """The example with the address and name of this stack."""
    return example.replace("127.0.0.1:8080", stack.address).replace("millrace-nano", stack.model)


def test_there_are_examples() -> None:
    assert len(_PYTHON) >= 2
    assert _CURL


@pytest.mark.parametrize("example", _PYTHON, ids=["openai", "grpc"])
def test_python_examples(stack: Stack, example: str) -> None:
    assert run(stack, sys.executable, "-c", here(stack, example)).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_example_of_the_readme(stack: Stack) -> None:
    shown = run(stack, "bash", "-c", here(stack, _CURL[0]))
    assert shown.startswith("data: {")
    assert shown.rstrip().endswith("data: [DONE]")


def printed(stack: Stack, title: str) -> str:
    """One of the examples that the start printed, without its indent."""
    text = stack.output.read_text(encoding="utf-8").split(f"\n{title}:\n")[1].split("\n\n")[0]
    return "\n".join(line.removeprefix("  ") for line in text.splitlines())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_printed_curl_example(stack: Stack) -> None:
    assert "data: [DONE]" in run(stack, "bash", "-c", printed(stack, "curl"))


def test_printed_sdk_example(stack: Stack) -> None:
    assert run(stack, sys.executable, "-c", printed(stack, "openai SDK")).strip()


def test_commands_against_the_running_stack(stack: Stack) -> None:
    def millrace(*arguments: str, stdin: str = "") -> str:
        return run(stack, sys.executable, "-m", "services.cli", *arguments, stdin=stdin)

    assert stack.model in millrace("models")
    options = ("--temperature", "0", "--max-tokens", "8")
    answer = millrace("chat", "Hello!", *options)
    assert answer.strip()
    assert millrace("chat", *options, stdin="Hello!") == answer
    assert millrace("generate", "Once upon", *options).strip()
    number = millrace("chat", "A number?", "--regex", "[0-9]{3}")
    assert re.fullmatch(r"[0-9]{3}\n", number)
    for command in (
        ["trace", "last"],
        ["why", "last"],
        ["keys", "list"],
        ["usage", "--by", "tenant"],
        ["plan"],
    ):
        assert millrace(*command).strip() or command[0] == "keys"
