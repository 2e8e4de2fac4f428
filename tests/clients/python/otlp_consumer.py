"""Arize Phoenix consumes the traces: with `serve` it starts, before the stack; else, what has come."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request

from report import ADDRESS, API_KEY, ENVIRONMENT, MODEL, OUT, works

HTTP, GRPC = os.environ["CLIENTS_CONSUMER_PORTS"].split(",")
# A span of each service.
SERVICES = ("ingress", "gateway.request", "tokenizer.prepare", "engine.request")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LIMIT_S = 60.0


def serve() -> None:
    """Becomes the consumer."""
    variables = {
        "PHOENIX_WORKING_DIR": str(OUT),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": HTTP,
        "PHOENIX_GRPC_PORT": GRPC,
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    program = str(ENVIRONMENT / "bin" / "phoenix")
    os.execve(program, [program, "serve"], {**os.environ, **variables})


def spans_there() -> list[dict]:
    """Those of the client's trace that have come."""
    url = f"http://127.0.0.1:{HTTP}/v1/projects/default/spans?limit=1000&trace_id={TRACE}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError:
        # Before the first span there is no project.
        return []


def ask() -> None:
    """A chat in the client's own trace."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {API_KEY}", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    headers["content-type"] = "application/json"
    url = f"http://{ADDRESS}/v1/chat/completions"
    urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
    ).close()


def tops(spans: list[dict]) -> list[dict]:
    """Spans whose parent is not there."""
    ids = {each["context"]["span_id"] for each in spans}
    return [each for each in spans if each["parent_id"] not in ids]


def own_trace() -> list[dict]:
    """The spans of it, once one of every service has come, and every parent."""
    ends_s, spans = time.monotonic() + LIMIT_S, []
    while time.monotonic() < ends_s:
        spans = spans_there()
        is_told = all(any(each["name"].startswith(name) for each in spans) for name in SERVICES)
        if is_told and len(tops(spans)) == 1:
            return spans
        time.sleep(1)
    raise AssertionError(f"only {sorted(each['name'] for each in spans)}")


if sys.argv[1:] == ["serve"]:
    serve()
ask()
spans: list[dict] = []
with works("a client's trace, from the edge to the engine, whole"):
    spans = own_trace()
    # One span hangs on the client's, and every other on one that is there.
    (top,) = tops(spans)
    assert (top["name"].startswith("ingress"), top["parent_id"]) == (True, SPAN), top
with works("GenAI attributes"):
    told = {key for each in spans for key in each["attributes"]}
    wanted = {"gen_ai.request.model", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
    assert wanted <= told, wanted - told
