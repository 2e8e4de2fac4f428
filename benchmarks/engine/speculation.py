"""Speculation against none: extraction and chat prompts of the bundled model, greedy, on the real engine.

Scheduler and runner are the real ones, with prompts served `--batch` at a time. Every side must give the same
tokens as the baseline, or no figure is printed.

    python -m benchmarks.engine.speculation [--json OUT]
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.engine.report import arguments, publish
from engine.config import EngineConfig, SpeculationConfig
from engine.runner.build import build_here
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from models.chat_format import segments
from models.corpus import CorpusDocument, Draw, chat, extraction
from runtime.config import ModelConfig

_MODEL, _DRAFT = Path("models/millrace-nano"), Path("models/millrace-nano-draft")
_NUM_PROMPTS = 24
_MAX_TOKENS = 90
_FAMILIES = {"extraction": extraction.extraction, "chat": chat.introduction}
_SIDES = {
    "baseline: off": SpeculationConfig(),
    "prompt lookup, 4": SpeculationConfig(method="ngram", num_draft_tokens=4, min_ngram=2),
    "draft model, 4": SpeculationConfig(method="draft_model", draft_model=str(_DRAFT), num_draft_tokens=4),
    "draft model, always 4": SpeculationConfig(
        method="draft_model", draft_model=str(_DRAFT), num_draft_tokens=4, min_acceptance=0.0
    ),
}
# Sides take turns, so that what else the machine does falls on all of them.
_NUM_ROUNDS = 3


@dataclass
class Outcome:
    """What one side did with one family of prompts."""

    outputs: list[tuple[int, ...]] = field(default_factory=list)
    num_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0


def prompts_of(family: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Held-out conversations up to their last answer."""
    draw = Draw(77, "eval")
    documents = (_FAMILIES[family](draw) for _ in iter(int, 1))
    return [
        tokenizer.encode(prompt_text(each), add_special_tokens=False).ids
        for each in islice(documents, _NUM_PROMPTS)
    ]


def prompt_text(document: CorpusDocument) -> str:
    """The text before the last part that the assistant writes."""
    parts = segments(document)
    last = max(index for index, (_, trained) in enumerate(parts) if trained)
    return "".join(text for text, _ in parts[:last])


class Side:
    """One engine, kept for all rounds."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        self._config = EngineConfig(speculation=speculation, num_threads=1)
        self._runner, self._memory, self._facts = build_here(
            self._config, ModelConfig(path=str(_MODEL)), lambda phase, part: None
        )

    def close(self) -> None:
        """Frees the engine."""
        self._runner.close()

    def serve(self, prompts: list[list[int]], batch: int, outcome: Outcome) -> None:
        """Generates for all prompts, `batch` at a time, and adds to the outcome."""
        for start in range(0, len(prompts), batch):
            self._serve_batch(prompts[start : start + batch], outcome)

    def _serve_batch(self, prompts: list[list[int]], outcome: Outcome) -> None:
        scheduler = Scheduler(self._config.scheduler, self._config.cache, self._memory, model=str(_MODEL))
        sampling = SamplingParams(
            temperature=0.0, max_tokens=_MAX_TOKENS, stop_token_ids=self._facts.eos_token_ids
        )
        for index, prompt in enumerate(prompts):
            request = Request(
                request_id=index, external_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling
            )
            scheduler.submit(request, time.monotonic())
        outputs: dict[int, tuple[int, ...]] = {}
        began, used = time.monotonic(), time.process_time()
        while scheduler.has_work:
            plan = scheduler.schedule(time.monotonic())
            scheduler.update(self._runner.launch(plan).wait(), time.monotonic())
            outcome.num_steps += 1
            for event in scheduler.take_events():
                outputs[event.request_id] = outputs.get(event.request_id, ()) + event.token_ids
                if event.statistics is not None:
                    outcome.drafted += event.statistics.drafted_tokens
                    outcome.accepted += event.statistics.accepted_tokens
        outcome.seconds += time.monotonic() - began
        outcome.processor_s += time.process_time() - used
        outcome.outputs.extend(outputs[index] for index in sorted(outputs))


def measure(sides: dict[str, Side], prompts: list[list[int]], batch: int) -> dict[str, Outcome]:
    """All sides in turns; raises SystemExit when one of them changes the output."""
    outcomes = {name: Outcome() for name in sides}
    for _ in range(_NUM_ROUNDS):
        for name, side in sides.items():
            side.serve(prompts, batch, outcomes[name])
    expected = next(iter(outcomes.values())).outputs
    for name, outcome in outcomes.items():
        if outcome.outputs != expected:
            raise SystemExit(f"{name} changed the output; no figures")
    return outcomes


def main() -> None:
    """Runs every side on every family, alone and in batches of eight."""
    options = arguments(__doc__ or "")
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    sides = {name: Side(speculation) for name, speculation in _SIDES.items()}
    rows = []
    for family in _FAMILIES:
        prompts = prompts_of(family, tokenizer)
        for batch in (1, 8):
            for name, outcome in measure(sides, prompts, batch).items():
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
    for side in sides.values():
        side.close()
    publish(
        "Speculation, greedy",
        rows,
        options.json,
        "Outputs of all sides are equal token for token.",
    )


if __name__ == "__main__":
    main()
