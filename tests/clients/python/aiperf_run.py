"""NVIDIA's aiperf: load whose every request must succeed."""

from __future__ import annotations

import json
import os
import subprocess

from report import ADDRESS, API_KEY, ENVIRONMENT, MODEL, OUT, works

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
NUM_REQUESTS = 12


def profile(kind: str, *options: str) -> None:
    """One profile; raises when a request failed, or was not made."""
    folder = OUT / f"{kind}{len(options)}"
    command = [str(ENVIRONMENT / "bin" / "aiperf"), "profile", "--model", MODEL, "--url", f"http://{ADDRESS}"]
    command += ["--endpoint-type", kind, "--api-key", API_KEY, "--tokenizer", TOKENIZER, "--ui", "none"]
    command += ["--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--artifact-dir", str(folder)]
    # It counts an answer that ends before its first token as a failure.
    command += ["--isl", "64", "--osl", "16", "--extra-inputs", "ignore_eos:true", *options]
    # Told to be offline, it takes the folder of a tokenizer for a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, cwd=OUT, env=environment, check=True, timeout=280)
    (exported,) = folder.rglob("profile_export_aiperf.json")
    told = json.loads(exported.read_text(encoding="utf-8"))
    assert told["request_count"]["avg"] == NUM_REQUESTS, told["request_count"]
    assert not told.get("error_summary"), told["error_summary"]


with works("chat as a stream"):
    profile("chat", "--streaming")
with works("completions"):
    profile("completions")
