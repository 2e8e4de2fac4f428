"""The gate over a real stack: the same model is not worse than itself, another adapter's is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import needs_weights
from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

SUITE = """
[tokens]
cases = 120
max_tokens = 12
[intrinsic]
cases = 40
[structure]
cases = 100
max_tokens = 48
"""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The bundled model, which has adapters beside it."""
    with running_stack(tmp_path_factory.mktemp("gate")) as stack:
        yield stack


def judged(stack: Stack, folder: Path, candidate: str) -> tuple[int, dict[str, str]]:
    """Exit status, and the verdict of each layer."""
    (folder / "suite.toml").write_text(SUITE)
    url = f"http://{stack.state.address}"
    finished = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "services.cli", "gate", "--baseline", f"{url}#millrace-nano"),
            *("--candidate", f"{url}#{candidate}", "--suite", "suite.toml", "--json", "out.json"),
        ],
        cwd=folder,
        env={**os.environ, "MILLRACE_API_KEY": stack.state.api_key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode in (0, 1), finished.stdout + finished.stderr
    found = json.loads((folder / "out.json").read_text())
    return finished.returncode, {each["layer"]: each["verdict"] for each in found["layers"]}


def test_a_model_is_not_worse_than_itself(adapted: Stack, tmp_path: Path) -> None:
    layers = ("tokens", "intrinsic", "structure")
    assert judged(adapted, tmp_path, "millrace-nano") == (0, dict.fromkeys(layers, "not worse"))


def test_another_adapter_is_found(adapted: Stack, tmp_path: Path) -> None:
    status, verdicts = judged(adapted, tmp_path, "millrace-nano:pirate")
    assert (status, verdicts["tokens"]) == (1, "worse")
