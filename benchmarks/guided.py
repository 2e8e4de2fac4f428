"""Guided answers of the bundled model through the whole stack, judged by jsonschema-rs.

Sends every schema as a strict response format at temperature 1 to the gateway's HTTP face. An answer that
ended by itself has to validate, always. One that the token limit cut off is no answer and is counted apart,
as is a schema that strict mode refuses.

    python -m benchmarks.guided [FILE] [--count 240] [--limit 0] [--json OUT]

Without FILE the schemas are generated. FILE holds one JSON object a line with name and schema, as MaskBench
has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec

from benchmarks.guided_schemas import schemas
from benchmarks.maskbench import read
from benchmarks.stack import RunningStack, running_stack, write_result
from services.supervisor.config import BUNDLED_MODEL

_CONFIG = f"""
[model]
path = "{BUNDLED_MODEL}"
"""
_LIMIT_S = 300.0


class Result(msgspec.Struct, frozen=True):
    """What became of one schema: valid, invalid, cut, refused or failed; and why, or the answer."""

    name: str
    outcome: str
    detail: str = ""
    num_tokens: int = 0


def judge(schema: Any, text: str) -> str:
    """Why the text does not match, or ""."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    error = next(iter(validator.iter_errors(value)), None)
    return "" if error is None else error.message


async def ask(
    client: httpx.AsyncClient, model: str, number: int, name: str, schema: Any, max_tokens: int
) -> Result:
    """One schema."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Give an example, number {number}, as JSON."}],
        "temperature": 1,
        "seed": number,
        "max_tokens": max_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    }
    answer = await client.post("/v1/chat/completions", json=body)
    content = answer.json()
    if answer.status_code == 400:
        return Result(name, "refused", content["error"]["message"])
    if answer.status_code != 200:
        return Result(name, "failed", f"{answer.status_code}: {answer.text[:200]}")
    choice = content["choices"][0]
    num_tokens = content["usage"]["completion_tokens"]
    if choice["finish_reason"] != "stop":
        return Result(name, "cut", choice["finish_reason"], num_tokens)
    problem = judge(schema, choice["message"]["content"])
    return Result(name, "invalid" if problem else "valid", problem, num_tokens)


async def run(
    stack: RunningStack, rows: list[tuple[str, Any]], concurrency: int, max_tokens: int
) -> list[Result]:
    """All schemas, so many at a time."""
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        base_url=stack.url, headers=headers, timeout=_LIMIT_S, trust_env=False
    ) as client:

        async def one(number: int, name: str, schema: Any) -> Result:
            async with gate:
                return await ask(client, stack.state.model, number, name, schema, max_tokens)

        return await asyncio.gather(*(one(number, *row) for number, row in enumerate(rows)))


def summary(results: list[Result], elapsed_s: float) -> dict[str, Any]:
    """Counts, the share of finished answers that are valid, and reasons."""
    counts = Counter(result.outcome for result in results)
    finished = counts["valid"] + counts["invalid"]
    return {
        "schemas": len(results),
        **{name: counts[name] for name in ("valid", "invalid", "cut", "refused", "failed")},
        "valid_percent_of_finished": round(100 * counts["valid"] / max(1, finished), 2),
        "completion_tokens": sum(result.num_tokens for result in results),
        "elapsed_s": round(elapsed_s, 1),
    }


def record(path: Path | None, source: str, figures: dict[str, Any]) -> None:
    """The figures of one source of schemas, beside those of others."""
    if path is not None:
        kept = json.loads(path.read_text()).get("sources", {}) if path.exists() else {}
        write_result(path, {"sources": {**kept, source: figures}})


def main() -> int:
    """Prints the figures; 1 when a finished answer does not validate or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=240, help="schemas to generate")
    parser.add_argument("--limit", type=int, default=0, help="schemas to take from the file; 0 takes all")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--json", type=Path, help="write the figures there, beside those of other sources")
    arguments = parser.parse_args()
    rows = schemas(arguments.count)
    if arguments.file is not None:
        rows = [(row["name"], row["schema"]) for row in read(arguments.file)]
        rows = rows[: arguments.limit or len(rows)]
    with running_stack(_CONFIG) as stack:
        start = time.perf_counter()
        results = asyncio.run(run(stack, rows, arguments.concurrency, arguments.max_tokens))
        figures = summary(results, time.perf_counter() - start)
    for key, value in figures.items():
        print(f"{key:28}{value:>12}")
    reasons = [result for result in results if result.outcome != "valid"]
    for result in reasons:
        print(f"{result.outcome:8} {result.name}: {result.detail[:160]}")
    record(
        arguments.json,
        arguments.file.name if arguments.file is not None else "generated",
        {
            "temperature": 1,
            "max_tokens": arguments.max_tokens,
            **figures,
            "not_valid": [msgspec.to_builtins(result) for result in reasons],
        },
    )
    return 1 if figures["invalid"] or figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
