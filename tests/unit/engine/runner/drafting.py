"""Heads for tests of speculation: a small model, what it says, and a head that learned that by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import transformers

from engine.runner.runner import ModelRunner
from engine.runner.speculation.features import FeatureDrafter
from engine.runner.speculation.head import HeadDrafter
from engine.speculation_config import SpeculationConfig
from engine.types import GrammarSpec, SamplingParams
from services.drafter.course import train_head
from services.drafter.lessons import Lesson
from services.drafter.options import CourseOptions, DrafterMethod
from services.drafter.target import DraftedModel
from tests.unit.engine.checkpoints import reference_greedy
from tests.unit.engine.runner.driver import GREEDY, Job, prompt_of

BUNDLED = Path("models/millrace-nano")
NUM_LAYERS = 4
# A branch that goes on, one that leaves it, and others that end with their first drafts.
TREE = ((1, 0, 0), (1, 1), (2,), (0, 1), (0, 0, 1))
# A head has keys and values of the same kind as its model; the smallest kinds take whole groups of 16.
HEAD_DIM = 16
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=2),
    SamplingParams(temperature=0.7, seed=4, presence_penalty=0.7, frequency_penalty=0.4),
]


def guided_by(schema: dict[str, Any]) -> GrammarSpec:
    """JSON of a schema, without whitespace to choose."""
    payload = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})
    return GrammarSpec(digest="", payload=payload.encode(), backend="llguidance/1")


# Its keys are forced, and what is between them is not.
GRAMMAR = guided_by(
    {
        "type": "object",
        "properties": {"full_name": {"type": "string", "maxLength": 5}, "birthday": {"type": "boolean"}},
        "required": ["full_name", "birthday"],
        "additionalProperties": False,
    }
)


def speculating(head: Path, **changes: Any) -> SpeculationConfig:
    """Drafts by a head of any kind whether they pay or not."""
    method = json.loads((head / "config.json").read_text()).get("speculators_model_type", "medusa")
    return SpeculationConfig(**{"method": method, "draft_model": str(head), "min_acceptance": 0.0} | changes)


def poison_head(runner: ModelRunner) -> None:
    """What a head reads before it was written shows."""
    drafter = runner.proposer.drafter
    assert isinstance(drafter, FeatureDrafter)
    layers = drafter.storage.layers if isinstance(drafter, HeadDrafter) else []
    for values in (*drafter.features, *(each for layer in layers for each in layer.tensors())):
        if np.issubdtype(values.dtype, np.floating):
            values.fill(np.nan)


def lessons_of(oracle: transformers.PreTrainedModel, count: int = 6) -> list[Lesson]:
    """What a model itself says after some prompts."""
    prompts = [prompt_of(9, 199, seed=index) for index in range(count)]
    return [Lesson(ids + reference_greedy(oracle, ids, 40), len(ids)) for ids in prompts]


def learned_by_heart(
    folder: Path,
    lessons: list[Lesson],
    out: Path,
    *,
    draft_vocab: int = 0,
    steps: int = 150,
    method: str = "eagle3",
) -> Path:
    """A head that has learned these lessons, as far as it draws all of their ids."""
    longest = max(len(lesson.ids) for lesson in lessons)
    target = DraftedModel(
        folder, num_rows=len(lessons), max_tokens=longest, num_threads=1, method=DrafterMethod(method)
    )
    options = CourseOptions(
        steps=steps,
        rate=5e-3,
        rows=len(lessons),
        # Heads of Medusa draft no further than they learned.
        rounds=SpeculationConfig().num_draft_tokens if method == "medusa" else 3,
        max_tokens=longest,
        draft_vocab=draft_vocab,
    )
    out.mkdir(exist_ok=True)
    train_head(target, lessons, out, "tiny", options, lambda done: None)
    return out


def totals(jobs: list[Job]) -> tuple[int, int]:
    """Drafts, and accepted ones."""
    return sum(job.num_drafted for job in jobs), sum(job.num_accepted for job in jobs)
