"""guidellm: load whose every request must succeed."""

from __future__ import annotations

import json
import os
import subprocess

from report import ADDRESS, API_KEY, ENVIRONMENT, MODEL, OUT, works

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
NUM_REQUESTS = 20
FORMATS = ("/v1/chat/completions", "/v1/completions")


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


for request_format in FORMATS:
    with works(f"{request_format}, one by one"):
        run(f"one{FORMATS.index(request_format)}", request_format, "kind=synchronous")
    with works(f"{request_format}, eight at once"):
        run(f"eight{FORMATS.index(request_format)}", request_format, "kind=concurrent,streams=8")
with works("without streams"):
    run("whole", FORMATS[0], "kind=synchronous", stream=False)
