"""What of a prompt's time to first token is left after a restart, where its prefix is on disk.

`python -m benchmarks.prefix_restart [--model smollm2-135m] [--tokens 4000] [--rounds 5] [--json ...]`

Prompts of so many tokens that nobody has sent before (the baseline); the same prefixes with other last tokens
at a second engine that runs beside the first, and at one that was started after both had ended; and there
once more under another cache salt, which finds nothing. Medians, and what engines counted as cached.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine.report import options, publish
from benchmarks.stack import RunningStack, running_stack

_TAIL = 16
_LIMIT_S = 300.0
_WRITTEN = "millrace_engine_disk_blocks_total"


def _config(folder: Path) -> str:
    return f"""
[security]
context_secret = "the same for every stack of this benchmark"
[observability]
sample_ratio = 0.0
[engine.cache]
disk_path = "{folder}"
[tenants.development]
tokens_per_minute = 1000000000
"""


def _first_token(stack: RunningStack, prompt: list[int], **fields: Any) -> tuple[float, int]:
    """(seconds to the first token, tokens of the prompt that were not computed)."""
    body = {
        "model": stack.state.model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    began_s, first_s, cached = time.perf_counter(), 0.0, 0
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json=body, headers=headers, timeout=_LIMIT_S, trust_env=False
    ) as answer:
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"refused: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter() - began_s
            usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    return first_s, cached


def _row(what: str, stack: RunningStack, prefixes: list[list[int]], **fields: Any) -> dict[str, Any]:
    drawn = random.Random(what)
    found = [
        _first_token(stack, prefix + [drawn.randrange(1000, 9000) for _ in range(_TAIL)], **fields)
        for prefix in prefixes
    ]
    return {
        "engine": what,
        "ttft ms": 1000 * statistics.median(seconds for seconds, _ in found),
        "cached tokens": int(statistics.median(cached for _, cached in found)),
    }


def _wait_written(stack: RunningStack, num_blocks: int) -> None:
    ends_s = time.monotonic() + _LIMIT_S
    while stack.counter("engine", _WRITTEN, 'event="written"') < num_blocks:
        if time.monotonic() > ends_s:
            raise SystemExit("the engine has not written what it has computed")
        time.sleep(0.1)


def main() -> None:
    """Prints the table."""
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    drawn = random.Random(0)
    prefixes = [
        [drawn.randrange(1000, 9000) for _ in range(arguments.tokens)] for _ in range(arguments.rounds)
    ]
    with tempfile.TemporaryDirectory() as name:
        config, model = _config(Path(name)), ("--model", arguments.model)
        with running_stack(config, *model) as first:
            rows = [_row("first, nothing cached", first, prefixes)]
            _wait_written(first, arguments.rounds * (arguments.tokens // 16))
            with running_stack(config, *model) as second:
                rows.append(_row("second, beside it", second, prefixes))
        with running_stack(config, *model) as again:
            rows.append(_row("started again", again, prefixes))
            rows.append(_row("the same, another salt", again, prefixes, cache_salt="another"))
    for row in rows:
        row["of the first"] = row["ttft ms"] / rows[0]["ttft ms"]
    publish(f"Time to first token of {arguments.tokens} tokens, {arguments.model}", rows, arguments.json)


if __name__ == "__main__":
    main()
