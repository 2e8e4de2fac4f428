"""MaskBench through the service's own code path in strict mode, beside raw llguidance in the same run.

A schema passes when it compiles and every one of its instances is judged as labelled, token by token, by the
masks that an engine would use. Input: one JSON object a line with name, schema and tests[{data, valid}],
plain or gzipped.

    python -m benchmarks.maskbench FILE [--json OUT] [--tokenizer CHECKPOINT] [--failures]
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from benchmarks.engine.report import options, percentile
from benchmarks.stack import write_result
from contract.chat import JsonSchemaFormat
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest


class Side(msgspec.Struct):
    """What one of the two compilers did."""

    name: str
    num_schemas: int = 0
    num_compiled: int = 0
    num_passed: int = 0
    num_unsatisfiable: int = 0
    invalid_accepted: list[str] = []
    valid_rejected: list[str] = []
    refused: dict[str, str] = {}
    compile_ms: list[float] = []
    mask_us: list[float] = []


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a MaskBench file."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def accepts(matcher: LLMatcher, token_ids: list[int], mask_us: list[float]) -> bool:
    """Whether the tokens, and then the end, are allowed by the masks one after the other."""
    for token_id in token_ids:
        start = time.perf_counter()
        mask = matcher.compute_bitmask()
        mask_us.append((time.perf_counter() - start) * 1e6)
        if not mask[token_id // 8] >> (token_id % 8) & 1 or not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())


def judge(side: Side, row: dict[str, Any], grammar: str, tokenizer: LLTokenizer) -> None:
    """Runs the row's instances through the compiled grammar."""
    compiled = LLMatcher(tokenizer, grammar, log_level=0)
    passed = True
    for test in row["tests"]:
        text = json.dumps(test["data"], ensure_ascii=False)
        accepted = accepts(compiled.deep_copy(), tokenizer.tokenize_str(text), side.mask_us)
        if accepted and not test["valid"]:
            side.invalid_accepted.append(row["name"])
        elif not accepted and test["valid"]:
            side.valid_rejected.append(row["name"])
        passed &= accepted == test["valid"]
    side.num_passed += passed


def run_service(
    side: Side, row: dict[str, Any], backend: Backend, limits: PromptLimitsConfig, tokenizer: LLTokenizer
) -> None:
    """One row through what a worker of the service does with a strict json_schema format."""
    side.num_schemas += 1
    request = GrammarRequest(response_format=JsonSchemaFormat(json.dumps(row["schema"]), strict=True))
    start = time.perf_counter()
    reply = build(request, backend, limits)
    side.compile_ms.append((time.perf_counter() - start) * 1e3)
    if reply.built is None:
        assert reply.refused is not None
        side.refused[row["name"]] = reply.refused.message
        side.num_unsatisfiable += reply.refused.message.startswith("no value matches")
        return
    side.num_compiled += 1
    judge(side, row, reply.built.payload.decode(), tokenizer)


def run_raw(side: Side, row: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """The same row through llguidance as it comes."""
    side.num_schemas += 1
    text = json.dumps(row["schema"])
    start = time.perf_counter()
    grammar = LLMatcher.grammar_from_json_schema(text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    side.compile_ms.append((time.perf_counter() - start) * 1e3)
    if matcher.is_error():
        side.refused[row["name"]] = matcher.get_error().splitlines()[0]
        return
    side.num_compiled += 1
    judge(side, row, grammar, tokenizer)


def summary(side: Side) -> dict[str, Any]:
    """The figures of one side."""
    return {
        "schemas": side.num_schemas,
        "compiled": side.num_compiled,
        "passed": side.num_passed,
        "passed_percent": round(100 * side.num_passed / max(1, side.num_schemas), 2),
        "refused_as_unsatisfiable": side.num_unsatisfiable,
        "invalid_instances_accepted": len(side.invalid_accepted),
        "valid_instances_rejected": len(side.valid_rejected),
        "compile_ms_p50": round(percentile(side.compile_ms or [0.0], 0.5), 3),
        "compile_ms_p99": round(percentile(side.compile_ms or [0.0], 0.99), 3),
        "mask_us_p50": round(percentile(side.mask_us or [0.0], 0.5), 1),
        "mask_us_p99": round(percentile(side.mask_us or [0.0], 0.99), 1),
        "masks": len(side.mask_us),
    }


def main() -> int:
    """Prints the two sides; 1 when an invalid instance was accepted."""
    parser = options(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=BUNDLED_CHECKPOINT, help="checkpoint with tokenizer.json"
    )
    parser.add_argument(
        "--failures", action="store_true", help="list schemas that do not pass, with the reason"
    )
    arguments = parser.parse_args()
    tokenizer_json = (arguments.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = LLTokenizer(tokenizer_json)
    backend = Backend(tokenizer_json, ())
    limits = PromptLimitsConfig()
    service, raw = Side(name="service (strict)"), Side(name="raw llguidance")
    for row in read(arguments.file):
        run_service(service, row, backend, limits, tokenizer)
        run_raw(raw, row, tokenizer)
    sides = {side.name: summary(side) for side in (service, raw)}
    width = max(map(len, sides["raw llguidance"]))
    print(f"{'':{width}}  {service.name:>18} {raw.name:>18}")
    for key in sides[raw.name]:
        print(f"{key:{width}}  {sides[service.name][key]:>18} {sides[raw.name][key]:>18}")
    if arguments.failures:
        for name, reason in service.refused.items():
            print(f"refused  {name}: {reason}")
        for name in dict.fromkeys(service.valid_rejected):
            print(f"rejected valid  {name}")
    for name in service.invalid_accepted:
        print(f"ACCEPTED INVALID  {name}")
    versions = {name: version(name) for name in ("llguidance", "jsonschema_rs", "tokenizers")}
    write_result(arguments.json, {"file": arguments.file.name, "sides": sides, "versions": versions})
    return 1 if service.invalid_accepted else 0


if __name__ == "__main__":
    sys.exit(main())
