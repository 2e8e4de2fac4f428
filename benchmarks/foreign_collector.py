"""Whether traces arrive whole at an OTLP consumer that is not ours: Arize Phoenix.

`python -m benchmarks.foreign_collector PHOENIX_ENVIRONMENT [--requests 200] [--share 0.25] [--output FILE]`

The stack with the bundled model sends its spans where `OTEL_EXPORTER_OTLP_ENDPOINT` says, samples as
`OTEL_TRACES_SAMPLER` says, and describes itself with `OTEL_RESOURCE_ATTRIBUTES`: Phoenix sorts spans by a
resource attribute, so a project of that name is the proof that it came with every span. Three kinds of
requests are sent: without a trace of their own (the sampler's share of them arrives), with a sampled
`traceparent` (all arrive, in that trace), and with one that is not sampled (none arrives). The exit status is
1 when a trace lacks a service or a parent, or when another share arrives. To set Phoenix up:

  python -m venv PHOENIX_ENVIRONMENT && PHOENIX_ENVIRONMENT/bin/pip install arize-phoenix==20.26.1
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stack import running_stack, write_result
from services.supervisor.ports import free_ports

_PROJECT = "millrace-check"
_START_LIMIT_S = 120.0
# Exporters, Envoy's and Phoenix's own queue have this long for the last span.
_ARRIVAL_LIMIT_S = 30.0
_POLL_S = 0.5
_SETTLE_S = 2.0
_NUM_NAMED = 10
# Of a share that is right, one run in 16,000 is further off.
_DEVIATIONS = 4.0
# How the names of spans begin that show that a service took part.
_SERVICES = {
    "Envoy": "ingress",
    "gateway": "gateway.request",
    "tokenizer": "tokenizer.prepare",
    "engine": "engine.request",
}


@contextmanager
def phoenix(environment: Path) -> Iterator[tuple[str, str]]:
    """Phoenix on free ports: its REST address and its OTLP address."""
    http, grpc = free_ports(2, "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(environment / "bin" / "phoenix"), "serve"],
            env={
                **os.environ,
                "PHOENIX_WORKING_DIR": folder,
                "PHOENIX_HOST": "127.0.0.1",
                "PHOENIX_PORT": str(http),
                "PHOENIX_GRPC_PORT": str(grpc),
                "PHOENIX_TELEMETRY_ENABLED": "false",
                "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
            },
            stdout=log,
            stderr=log,
        )
        try:
            url = f"http://127.0.0.1:{http}"
            _wait_for(url)
            yield url, f"http://127.0.0.1:{grpc}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str) -> None:
    ends_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < ends_s:
        try:
            if httpx.get(f"{url}/healthz", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise SystemExit("Phoenix did not start")


def spans_at(url: str) -> list[dict[str, Any]]:
    """Every span of the project, as Phoenix tells them."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        while True:
            page = client.get(
                f"/v1/projects/{_PROJECT}/spans",
                params={"limit": 1000, **({"cursor": cursor} if cursor else {})},
            )
            if page.status_code == httpx.codes.NOT_FOUND:
                return []
            content = page.raise_for_status().json()
            found += content["data"]
            cursor = content.get("next_cursor")
            if not cursor:
                return found


def ask(url: str, key: str, model: str, traceparent: str = "") -> None:
    """One short chat."""
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        headers={
            "authorization": f"Bearer {key}",
            **({"traceparent": traceparent} if traceparent else {}),
        },
        json={"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        timeout=60.0,
        trust_env=False,
    )
    answer.raise_for_status()


def faults_of(spans: list[dict[str, Any]], own_parents: set[str]) -> list[str]:
    """What is wrong with the spans of one trace; `own_parents` are the client's, which nobody sends."""
    names = [span["name"] for span in spans]
    ids = {span["context"]["span_id"] for span in spans} | own_parents
    lost = [span["name"] for span in spans if span["parent_id"] and span["parent_id"] not in ids]
    missing = [
        service
        for service, beginning in _SERVICES.items()
        if not any(name.startswith(beginning) for name in names)
    ]
    return [
        *(f"no span of {service}: {sorted(names)}" for service in missing),
        *(f"the parent of {name!r} is not there" for name in lost),
    ]


def show(spans: list[dict[str, Any]], parent: str | None, depth: int = 0) -> None:
    """One trace as a tree."""
    for span in sorted(spans, key=lambda each: each["start_time"]):
        if span["parent_id"] == parent or (depth == 0 and parent is None and not span["parent_id"]):
            print(f"  {'  ' * depth}{span['name']}")
            show(spans, span["context"]["span_id"], depth + 1)


def named_traces() -> dict[str, str]:
    """Ids of traces, and of the spans that clients have there."""
    return {
        f"{secrets.randbits(128) | 1:032x}": f"{secrets.randbits(64) | 1:016x}" for _ in range(_NUM_NAMED)
    }


def run(
    environment: Path,
    num_requests: int,
    share: float,
    sampled: Mapping[str, str],
    unsampled: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Asks all kinds of requests, ends the stack, and gives what Phoenix has got."""
    with phoenix(environment) as (url, otlp):
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(share),
            "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={_PROJECT},deployment.environment=check",
        }
        with running_stack("", environment=variables) as stack:
            state = stack.state
            for _ in range(num_requests):
                ask(stack.url, state.api_key, state.model)
            for flags, traces in (("01", sampled), ("00", unsampled)):
                for trace, span in traces.items():
                    ask(stack.url, state.api_key, state.model, f"00-{trace}-{span}-{flags}")
            # Envoy sends its spans once a second, and none when it ends.
            time.sleep(_SETTLE_S)
        # Every exporter has sent what it had; Phoenix writes behind.
        ends_s, num_before = time.monotonic() + _ARRIVAL_LIMIT_S, -1
        while time.monotonic() < ends_s:
            spans = spans_at(url)
            if spans and len(spans) == num_before:
                break
            num_before = len(spans)
            time.sleep(_SETTLE_S)
        return spans


def main() -> int:
    """0 when everything arrived as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("environment", type=Path, help="virtual environment with arize-phoenix")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    sampled, unsampled = named_traces(), named_traces()
    spans = run(arguments.environment, arguments.requests, arguments.share, sampled, unsampled)
    by_trace: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        by_trace[span["context"]["trace_id"]].append(span)
    # Health checks and the like have traces as well.
    chats = {
        trace: each
        for trace, each in by_trace.items()
        if any(span["name"].startswith(_SERVICES["gateway"]) for span in each)
    }
    faults = Counter(
        fault for trace, each in chats.items() for fault in faults_of(each, {sampled.get(trace, "")})
    )
    faults["a sampled trace has not arrived"] += sum(trace not in chats for trace in sampled)
    faults["a trace that is not sampled has arrived"] += sum(trace in by_trace for trace in unsampled)
    num_own = sum(trace not in sampled for trace in chats)
    share = num_own / arguments.requests
    deviation = (arguments.share * (1 - arguments.share) / arguments.requests) ** 0.5
    if abs(share - arguments.share) > _DEVIATIONS * deviation:
        faults["another share of the requests was sampled than asked for"] += 1
    for trace in list(chats)[:1]:
        print(f"trace {trace} as Phoenix has it:")
        show(chats[trace], sampled.get(trace))
    print(
        f"{len(spans)} spans in project {_PROJECT}; of {arguments.requests} requests {num_own} sampled "
        f"({share:.3f}, asked {arguments.share:g}); sampled by their client "
        f"{len(chats) - num_own} of {len(sampled)} arrived"
    )
    faults = +faults
    for fault, count in faults.items():
        print(f"FAULT, {count} times: {fault}", file=sys.stderr)
    found = {
        "num_spans": len(spans),
        "num_requests": arguments.requests,
        "share_asked": arguments.share,
        "share_arrived": share,
        "num_sampled_by_client": len(chats) - num_own,
        "faults": dict(faults),
    }
    write_result(arguments.output, found)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
