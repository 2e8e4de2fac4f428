"""Speculation against none: extraction and chat prompts of the bundled model, greedy, on the real engine.

Scheduler and runner are the real ones, with prompts served `--batch` at a time. Every side must give the same
tokens as the baseline, or no figure is printed.

    python -m benchmarks.engine.speculation [--json OUT]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.engine.report import arguments, publish
from engine.config import EngineConfig, SpeculationConfig
from engine.runner.torch_runner import build
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from models.chat_format import segments
from models.corpus import Document, Draw, chat, extraction
from services.config import ModelConfig

_MODEL, _DRAFT = Path("models/millrace-nano"), Path("models/millrace-nano-draft")
_NUM_PROMPTS = 24
_MAX_TOKENS = 90
_FAMILIES = {"extraction": extraction.extraction, "chat": chat.introduction}
_SIDES = {
    "baseline: off": SpeculationConfig(),
    "prompt lookup, 4": SpeculationConfig(method="ngram", num_draft_tokens=4, min_ngram=2),
    "draft model, 4": SpeculationConfig(method="draft_model", draft_model=str(_DRAFT), num_draft_tokens=4),
}


@dataclass
class Outcome:
    """What one side did with one family of prompts."""

    outputs: list[tuple[int, ...]]
    num_steps: int
    drafted: int
    accepted: int
    seconds: float
    processor_s: float


def prompts_of(family: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Held-out conversations up to their last answer."""
    draw = Draw(77, "eval")
    documents = (_FAMILIES[family](draw) for _ in iter(int, 1))
    return [
        tokenizer.encode(prompt_text(each), add_special_tokens=False).ids
        for each in islice(documents, _NUM_PROMPTS)
    ]


def prompt_text(document: Document) -> str:
    """The text before the last part that the assistant writes."""
    parts = segments(document)
    last = max(index for index, (_, trained) in enumerate(parts) if trained)
    return "".join(text for text, _ in parts[:last])


def serve(prompts: list[list[int]], speculation: SpeculationConfig, batch: int) -> Outcome:
    """Generates for all prompts, `batch` at a time."""
    config = EngineConfig(speculation=speculation, num_threads=1)
    runner, memory, facts = build(config, ModelConfig(path=str(_MODEL)), lambda phase, part: None)
    outcome = Outcome([], 0, 0, 0, 0.0, 0.0)
    try:
        for start in range(0, len(prompts), batch):
            scheduler = Scheduler(config.scheduler, config.cache, memory, model=str(_MODEL))
            for index, prompt in enumerate(prompts[start : start + batch]):
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=_MAX_TOKENS, stop_token_ids=facts.eos_token_ids
                )
                scheduler.submit(
                    Request(
                        request_id=index,
                        external_id=str(index),
                        prompt_token_ids=tuple(prompt),
                        sampling=sampling,
                    ),
                    time.monotonic(),
                )
            outputs: dict[int, tuple[int, ...]] = {}
            began, used = time.monotonic(), time.process_time()
            while scheduler.has_work:
                plan = scheduler.schedule(time.monotonic())
                scheduler.update(runner.launch(plan).wait(), time.monotonic())
                outcome.num_steps += 1
                for event in scheduler.take_events():
                    outputs[event.request_id] = outputs.get(event.request_id, ()) + event.token_ids
                    if event.statistics is not None:
                        outcome.drafted += event.statistics.drafted_tokens
                        outcome.accepted += event.statistics.accepted_tokens
            outcome.seconds += time.monotonic() - began
            outcome.processor_s += time.process_time() - used
            outcome.outputs.extend(outputs[index] for index in sorted(outputs))
            runner.launch(scheduler.schedule(time.monotonic())).wait()
    finally:
        runner.close()
    return outcome


def main() -> None:
    """Runs every side on every family, alone and in batches of eight."""
    options = arguments(__doc__ or "")
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    rows = []
    for family in _FAMILIES:
        prompts = prompts_of(family, tokenizer)
        for batch in (1, 8):
            expected: list[tuple[int, ...]] | None = None
            for name, speculation in _SIDES.items():
                outcome = serve(prompts, speculation, batch)
                expected = expected or outcome.outputs
                if outcome.outputs != expected:
                    raise SystemExit(f"{name} on {family} changed the output; no figures")
                num_tokens = sum(map(len, outcome.outputs))
                rows.append(
                    {
                        "prompts": family,
                        "batch": batch,
                        "configuration": name,
                        "tokens": num_tokens,
                        "steps": outcome.num_steps,
                        "accepted %": 100 * outcome.accepted / max(outcome.drafted, 1),
                        "tokens per second": num_tokens / outcome.seconds,
                        "tokens per processor second": num_tokens / outcome.processor_s,
                    }
                )
    publish(
        "Speculation, greedy",
        rows,
        options.json,
        "Outputs of all sides are equal token for token.",
    )


if __name__ == "__main__":
    main()
