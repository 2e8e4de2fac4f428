"""Requests to models that pool what they read: what such a model can do, what becomes of texts for it, and
the attempt that gathers their outputs.

They go the way of all requests (`attempts`): one attempt for all texts of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from contract.chat import Prompt, PromptList, TextPrompt, TokenPrompt
from contract.errors import invalid
from contract.outputs import FinishReason
from contract.pooling import GENERATE
from gateway.engines.attachment import Computed
from gateway.engines.types import EngineOutput, SubmittedText
from gateway.models.catalog import ServedModel
from gateway.pipeline.attempt import Attempt, check_ended
from gateway.pipeline.delta import ChoiceDelta
from gateway.types.request import GenerationRequest, Prepared, PreparedText

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
    """The prompts with the model's instruction; the limit of each is the lower of `limit` and the model's."""
    asked, pooled, prompt = request.pooling, served.vocabulary.pooled, request.prompt
    assert asked is not None, "it pools"
    assert pooled is not None, "as checked"
    assert isinstance(prompt, PromptList), "as whoever asks for numbers makes it"
    most = min((each for each in (limit, pooled.max_tokens) if each), default=0)
    name = pooled.default_prompt if asked.prompt_name is None else asked.prompt_name
    if name:
        prompt = PromptList(tuple(instructed(each, pooled.prompts[name]) for each in prompt.prompts))
    if asked.truncate is None:
        return prompt, Cut(most, pooled.truncates, keeps_start=True)
    return prompt, Cut(most, asked.truncate != "NONE", keeps_start=asked.truncate == "END")


def instructed(prompt: TextPrompt | TokenPrompt, instruction: str) -> TextPrompt | TokenPrompt:
    """A text behind an instruction; ids are as they are."""
    if isinstance(prompt, TokenPrompt):
        return prompt
    return TextPrompt(instruction + prompt.text, prompt.add_special_tokens, prompt.pair)


def submitted_texts(prepared: Prepared) -> tuple[SubmittedText, ...]:
    """What an engine is given of each prompt."""
    texts, start = [], 0
    for index, part in enumerate(prepared.texts):
        end = start + part.num_tokens
        texts.append(SubmittedText(index, prepared.token_ids[start:end], part.second_start))
        start = end
    return tuple(texts)


class PooledAttempt(Attempt):
    """The attempt of a request to a model that pools: an output for each of its texts, and nothing generated.

    What is paid for are the texts that an engine has worked on.
    """

    def __init__(self, *, texts: Sequence[PreparedText], **parts: Any) -> None:
        # Little-endian float32 by the text's index.
        self.outputs: dict[int, bytes] = {}
        self.texts = texts
        self._num_read = 0
        self._num_cached = 0
        super().__init__(choices={}, **parts)
        self._open = set(range(len(texts)))

    @property
    def _is_accounted(self) -> bool:
        return not self._open

    @property
    def _num_prompt_tokens(self) -> int:
        return self._num_read

    @property
    def _num_cached_tokens(self) -> int:
        return self._num_cached

    def _delta(self, output: EngineOutput) -> ChoiceDelta | None:
        index = output.choice_index
        if index not in self._open:
            return None
        check_ended(output.finish_reason)
        self.outputs[index] = output.pooled
        self._num_read += self.texts[index].num_tokens
        if output.first_token is not None:
            self._num_cached += output.first_token.cached_prompt_tokens
        self._end(index, output.finish_reason or FinishReason.STOP)
        return ChoiceDelta(index=index, finish_reason=output.finish_reason)

    def _take_in(self, computed: Computed) -> None:
        self._num_read += sum(self.texts[index].num_tokens for index in computed.texts & self._open)
        self._is_refunded = not self._num_read
