"""What another API costs beside chat completions, over the same path: Messages, and Responses without and
with a store.

`python -m benchmarks.gateways.faces [--rounds 400] [--json OUT]`

One request at a time, of one token, to engines that answer at once. A round sends one to each API, and the
next round in another order; printed are the medians, and those of the differences to chat within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec

from benchmarks.engine.report import options
from benchmarks.stack import running_stack, write_result

_CONFIG = """
[tiers.standard]
openai_name = "default"
priority = 10
[tenants.development]
tier = "standard"
[gateway]
default_tier = "standard"
[gateway.store]
tenants = ["*"]
key = "a key of a benchmark, which protects nothing"
"""
_TEXT = "How much does it cost?"
_TURN = [{"role": "user", "content": _TEXT}]
# Path and body, but for the model, of each API.
APIS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": _TURN, "max_tokens": 1}),
    "messages": ("/v1/messages", {"messages": _TURN, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": _TEXT, "max_output_tokens": 1, "store": False}),
    "responses, stored": ("/v1/responses", {"input": _TEXT, "max_output_tokens": 1, "store": True}),
}
# Milliseconds that each may add.
TARGETS = {"messages": 0.3, "responses": 0.3, "responses, stored": 3.0}
_WARM_UP = 30


class Row(msgspec.Struct, frozen=True):
    """One API over all rounds, in milliseconds."""

    api: str
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    target_ms: float | None


def measure(ask: Callable[[str], float], rounds: int) -> list[Row]:
    """The rows; `ask` sends one request and says how many seconds it took."""
    names = list(APIS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(_WARM_UP + rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            seconds = ask(name)
            if number >= _WARM_UP:
                taken[name].append(1000 * seconds)
    return [
        Row(
            name,
            statistics.median(times),
            statistics.quantiles(times, n=100)[98],
            statistics.median(own - chat for own, chat in zip(times, taken["chat"], strict=True)),
            TARGETS.get(name),
        )
        for name, times in taken.items()
    ]


def main() -> None:
    """Measures, prints and writes."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parsed = parser.parse_args()
    with (
        running_stack(_CONFIG, "--simulated") as stack,
        httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as client,
    ):
        model, headers = stack.state.model, {"authorization": f"Bearer {stack.state.api_key}"}

        def ask(name: str) -> float:
            path, body = APIS[name]
            began_s = time.perf_counter()
            response = client.post(path, json={"model": model, **body}, headers=headers)
            seconds = time.perf_counter() - began_s
            response.raise_for_status()
            return seconds

        rows = measure(ask, parsed.rounds)
    for row in rows:
        wanted = "" if row.target_ms is None else f", at most {row.target_ms}"
        taken = f"p50 {row.p50_ms:.2f} ms, p99 {row.p99_ms:.2f}"
        print(f"{row.api:<20} {taken}, added {row.added_p50_ms:+.2f}{wanted}")
    write_result(parsed.json, {"rows": [msgspec.to_builtins(row) for row in rows]})


if __name__ == "__main__":
    main()
