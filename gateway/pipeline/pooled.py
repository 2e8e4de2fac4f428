"""Requests to models that pool what they read: what such a model can do, and what becomes of a text for it.

They go the way of all requests (`attempts`), with a prompt alone.
"""

from __future__ import annotations

from typing import NamedTuple

from contract.chat import Prompt, TextPrompt
from contract.errors import invalid
from contract.pooling import GENERATE, PoolingParams
from gateway.models.catalog import ServedModel
from gateway.types.request import GenerationRequest, Prepared

# Where what a model does is asked for.
_PATHS = {
    GENERATE: "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "score": "/v1/rerank or /v1/score",
    "classify": "/v1/classify",
}


def tasks_of(served: ServedModel) -> tuple[str, ...]:
    """What a model can do."""
    pooled = served.vocabulary.pooled
    return (GENERATE,) if pooled is None else pooled.tasks


def check_task(request: GenerationRequest, served: ServedModel) -> None:
    """Raises INVALID_ARGUMENT for what the model is not made for, an instruction that it does not have, and
    a number of dimensions that it is not made for.
    """
    asked, pooled = request.pooling, served.vocabulary.pooled
    if asked is None and pooled is None:
        return
    if asked is None or pooled is None or asked.task not in pooled.tasks:
        wanted, tasks = GENERATE if asked is None else asked.task, tasks_of(served)
        there = " and ".join(f"{task} ({_PATHS[task]})" for task in tasks)
        problem = f"{request.model!r} cannot {wanted}: it can {there}"
        remedy = (
            f"name a model with {wanted!r} among its tasks in /v1/models, or ask this one for what it can"
        )
        raise invalid(request.field("model"), f"{problem}; {remedy}")
    if problem := pooled.check_dimensions(asked.dimensions):
        raise invalid(request.field("dimensions"), problem)
    if asked.prompt_name and asked.prompt_name not in pooled.prompts:
        known = ", ".join(sorted(pooled.prompts)) or "none"
        raise invalid(
            request.field("prompt_name"),
            f"{asked.prompt_name!r} is none of the model's instructions: {known}",
        )


class Cut(NamedTuple):
    """How long a prompt may be, and what becomes of a longer one."""

    # 0: any length.
    max_tokens: int
    # Else it is refused.
    truncates: bool
    keeps_start: bool


def pooled_prompt(request: GenerationRequest, served: ServedModel, limit: int) -> tuple[Prompt, Cut]:
    """The prompt with the model's instruction, and its limit: `limit` or the model's own, the lower."""
    asked, pooled = request.pooling, served.vocabulary.pooled
    assert asked is not None, "it pools"
    assert pooled is not None, "as checked"
    most = min((each for each in (limit, pooled.max_tokens) if each), default=0)
    prompt = request.prompt
    name = pooled.default_prompt if asked.prompt_name is None else asked.prompt_name
    if name and isinstance(prompt, TextPrompt):
        prompt = TextPrompt(pooled.prompts[name] + prompt.text, prompt.add_special_tokens, prompt.pair)
    if asked.truncate is None:
        return prompt, Cut(most, pooled.truncates, keeps_start=True)
    return prompt, Cut(most, asked.truncate != "NONE", keeps_start=asked.truncate == "END")


def pooling_params(request: GenerationRequest, prepared: Prepared) -> PoolingParams | None:
    """What an engine is asked for."""
    asked = request.pooling
    if asked is None:
        return None
    return PoolingParams(task=asked.task, dimensions=asked.dimensions, second_start=prepared.second_start)
