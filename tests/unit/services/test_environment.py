"""No variable that is missing, or names a place that is none, ends a command in a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# As for a user whom the system's table of users does not have: without HOME there is no directory.
_RUN = """
import os, sys
os.path.expanduser = lambda path: path if "HOME" not in os.environ else path.replace("~", os.environ["HOME"])
from typer.testing import CliRunner
from services.cli.app import app
for command in sys.argv[1:]:
    result = CliRunner().invoke(app, command.split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    print(f"{command}: {result.exit_code}", result.output, sep="\\n")
"""
_COMMANDS = (
    "up --model test/other",
    "up --model ~/checkpoint",
    "up --adapter conf=~/adapter --model test/other",
    "up --engine vllm --model test/other",
    "plan --model test/other",
    "plan --model ~/checkpoint",
    "status",
    "stop",
    "chat hi",
    "doctor",
)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOME": "/nonexistent/home"},
        {"HOME": "/dev/null"},
        {"HF_HOME": "/dev/null"},
        {"HF_HOME": "~/nowhere"},
        {"HF_HUB_CACHE": "/dev/null/cache"},
        {"TMPDIR": "/nonexistent"},
        {"XDG_DATA_HOME": "/dev/null"},
        {"XDG_CACHE_HOME": "/dev/null"},
        {"XDG_CONFIG_HOME": "/dev/null", "XDG_STATE_HOME": "/dev/null"},
    ],
    ids=str,
)
def test_commands_end_with_a_sentence(variables: dict[str, str], tmp_path: Path) -> None:
    environ = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "MILLRACE_STATE_DIR": str(tmp_path / "state"),
        **variables,
    }
    found = subprocess.run(
        [sys.executable, "-c", _RUN, *_COMMANDS], env=environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stdout + found.stderr
    # Every command that was to find a model says what to do.
    assert len(re.findall("give (its|the) directory", found.stdout)) >= 3, found.stdout
    assert "up --model test/other: 2" in found.stdout
