"""Schemathesis against the documents of three APIs that the stack serves, with every check that it has.

CLIENTS_SECONDS says how long it looks for bodies in each mode, after the examples and the corners (30), of
all documents together; and CLIENTS_SEED where it begins (1): the same bodies each time, so that what fails
has to do with what changed. A long look begins elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import urllib.request
from pathlib import Path

from report import ADDRESS, API_KEY, ENVIRONMENT, MODEL, OUT, works

# By a name for files.
DOCUMENTS = {
    "openai": "/openapi.json",
    "responses": "/v1/responses/openapi.json",
    "messages": "/v1/messages/openapi.json",
}
SECONDS = max(1, int(float(os.environ.get("CLIENTS_SECONDS", "30")) / len(DOCUMENTS)))
SEED = os.environ.get("CLIENTS_SEED", "1")
# What is refused beyond the schema is judged by a check of ours, which knows the document's list; and Envoy
# refuses the method QUERY without a content type by 400, as that method's definition has it, not by 405.
WITHOUT = "positive_data_acceptance,unsupported_method"
# With the key as the document's scheme, so that it is known to be one.
SETTINGS = f'[auth.openapi.key]\nbearer = "{API_KEY}"\n'


def document(name: str) -> Path:
    """The document as a file: the edge asks for a key with all but one of them, and the loader sends none."""
    asked = urllib.request.Request(
        f"http://{ADDRESS}{DOCUMENTS[name]}", headers={"Authorization": f"Bearer {API_KEY}"}
    )
    file = OUT / f"{name}.json"
    with urllib.request.urlopen(asked, timeout=60) as answer:
        file.write_bytes(answer.read())
    return file


def run(name: str, mode: str) -> None:
    """One run over all operations of a document; raises with the report's end when a check failed."""
    log, settings = OUT / f"{name}-{mode}.log", OUT / "schemathesis.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    command = [str(ENVIRONMENT / "bin" / "schemathesis"), "--config-file", str(settings)]
    command += ["run", str(document(name)), "--url", f"http://{ADDRESS}"]
    command += ["--mode", mode, "--max-time", str(SECONDS)]
    command += ["--seed", SEED, "--max-examples", "100000", "--phases", "examples,coverage,fuzzing"]
    command += [
        "--request-timeout",
        "60",
        "--suppress-health-check",
        "all",
        "--checks",
        "all",
        "--exclude-checks",
        WITHOUT,
        "--continue-on-failure",
    ]
    hooks = {"SCHEMATHESIS_HOOKS": "beyond_schema", "PYTHONPATH": str(Path(__file__).parent)}
    if mode == "positive":
        hooks["CLIENTS_SERVED"] = MODEL
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=OUT, stdout=file, stderr=file, env={**os.environ, **hooks}, check=False
        )
    assert done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-20_000:]


with works("what the document allows is served"):
    for each in DOCUMENTS:
        run(each, "positive")
with works("what it does not allow is refused"):
    for each in DOCUMENTS:
        run(each, "negative")
