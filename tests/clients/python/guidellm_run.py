"""guidellm: load whose every request must succeed."""

from __future__ import annotations

import json
import os
import subprocess

from report import ADDRESS, API_KEY, ENVIRONMENT, MODEL, OUT, works

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
NUM_REQUESTS = 20


def run(name: str, request_format: str, *profile: str, stream: bool = True) -> None:
    """One benchmark; raises when a request failed, or none was made."""
    output = OUT / f"{name}.json"
    backend = {
        "kind": "openai_http",
        "target": f"http://{ADDRESS}",
        "model": MODEL,
        "api_key": API_KEY,
        "request_format": request_format,
        "stream": stream,
    }
    command = [str(ENVIRONMENT / "bin" / "guidellm"), "run", "--backend", json.dumps(backend)]
    command += ["--profile", *profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", json.dumps({"kind": "huggingface_auto", "model": TOKENIZER})]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={output}", "--disable-console"]
    subprocess.run(command, cwd=OUT, check=True)
    for benchmark in json.loads(output.read_text(encoding="utf-8"))["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["errored"] == 0, totals
        assert totals["successful"] >= 1, totals


with works("chat as a stream"):
    run("chat", "/v1/chat/completions", "kind=concurrent,streams=8")
with works("completions"):
    run("completions", "/v1/completions", "kind=concurrent,streams=8")
with works("without streams"):
    run("whole", "/v1/chat/completions", "kind=synchronous", stream=False)
