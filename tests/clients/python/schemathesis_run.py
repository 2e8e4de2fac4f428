"""Schemathesis against the document that the stack serves, with every check that it has.

CLIENTS_EXAMPLES says how many examples each operation gets in each mode (20).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from report import ADDRESS, API_KEY, ENVIRONMENT, OUT, works

EXAMPLES = os.environ.get("CLIENTS_EXAMPLES", "20")
# What is refused beyond the schema is judged by a check of ours, which knows the document's list.
WITHOUT = "positive_data_acceptance"


def run(mode: str, *options: str) -> None:
    """One run over all operations; raises with the report's end when a check failed."""
    log = OUT / f"{mode}.log"
    command = [str(ENVIRONMENT / "bin" / "schemathesis"), "run", f"http://{ADDRESS}/openapi.json"]
    command += ["--header", f"authorization: Bearer {API_KEY}", "--mode", mode, "--max-examples", EXAMPLES]
    command += ["--checks", "all", "--exclude-checks", WITHOUT, "--continue-on-failure", *options]
    hooks = {"SCHEMATHESIS_HOOKS": "beyond_schema", "PYTHONPATH": str(Path(__file__).parent)}
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=OUT, stdout=file, stderr=file, env={**os.environ, **hooks}, check=False
        )
    assert done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-20_000:]


with works("what the document allows is served"):
    run("positive")
with works("what it does not allow is refused"):
    run("negative")
