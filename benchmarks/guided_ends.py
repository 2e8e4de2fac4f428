"""What it costs a step to lead guided answers to a valid end, beside the mask alone in the same run.

Walks through grammars by tokens drawn at random from the masks, which rambles as no model does, up to a
token limit: once with the search for an end, once without. Prints the time of a step's mask either way, and
how many walks came to the end.

    python -m benchmarks.guided_ends [FILE] [--count 120] [--limit 256] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.guided import record
from benchmarks.guided_schemas import schemas
from benchmarks.maskbench import quantile, read
from contract.chat import JsonSchemaFormat
from engine.sampling.grammar import BACKEND, GrammarEngine
from engine.types import GrammarSpec
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint


def grammars(checkpoint: Checkpoint, rows: list[tuple[str, Any]]) -> list[GrammarSpec]:
    """Those that strict mode accepts."""
    backend = Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
    limits = PromptLimitsConfig()
    found = []
    for name, schema in rows:
        form = JsonSchemaFormat(json.dumps(schema), strict=True)
        built = build(GrammarRequest(response_format=form), backend, limits).built
        if built is not None:
            found.append(GrammarSpec(digest=name, payload=built.payload, backend=BACKEND))
    return found


def walk(
    engine: GrammarEngine, grammar: GrammarSpec, limit: int, *, ends: bool, step_us: list[float]
) -> bool:
    """One answer of random tokens; whether it came to its end within the limit."""
    matcher = engine.matcher(grammar, [], limit if ends else 0)
    stops = set(engine.eos_token_ids)
    source = random.Random(grammar.digest)
    masks = np.zeros((1, engine.mask_width), np.int32)
    for _ in range(limit):
        start = time.perf_counter()
        matcher.fill(masks, ())
        step_us.append((time.perf_counter() - start) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        token = int(source.choice(allowed))
        if token in stops:
            return True
        matcher.accept([token])
        if matcher.finished:
            return True
    return False


def main() -> int:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="schemas, as MaskBench has them")
    parser.add_argument(
        "--count", type=int, default=120, help="schemas to generate, or to take from the file"
    )
    parser.add_argument("--limit", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--json", type=Path, help="write the figures there, beside those of other sources")
    arguments = parser.parse_args()
    rows = schemas(arguments.count)
    if arguments.file is not None:
        rows = [(row["name"], row["schema"]) for row in read(arguments.file)][: arguments.count]
    checkpoint = load_checkpoint(BUNDLED_CHECKPOINT)
    engine = GrammarEngine(BUNDLED_CHECKPOINT, len(checkpoint.vocabulary.tokens), checkpoint.eos_token_ids)
    wanted = grammars(checkpoint, rows)
    found: dict[str, dict[str, float]] = {}
    for name, ends in (("mask alone", False), ("mask and end", True)):
        step_us: list[float] = []
        num_ended = sum(walk(engine, each, arguments.limit, ends=ends, step_us=step_us) for each in wanted)
        found[name] = {
            "answers": len(wanted),
            "came to their end": num_ended,
            "steps": len(step_us),
            "step_us_mean": round(sum(step_us) / len(step_us), 1),
            "step_us_p50": round(quantile(step_us, 0.5), 1),
            "step_us_p99": round(quantile(step_us, 0.99), 1),
            "step_us_p999": round(quantile(step_us, 0.999), 1),
            "step_us_max": round(max(step_us), 1),
        }
    engine.close()
    print(f"{'':20}" + "".join(f"{name:>16}" for name in found))
    for key in found["mask alone"]:
        print(f"{key:20}" + "".join(f"{figures[key]:>16}" for figures in found.values()))
    source = arguments.file.name if arguments.file is not None else "generated"
    record(arguments.json, source, {"limit": arguments.limit, "ways": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
