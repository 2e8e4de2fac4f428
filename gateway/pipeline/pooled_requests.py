"""From what a face asks of a model that pools to one request, and from its outputs to scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from operator import mul
from typing import NamedTuple

import msgspec

from contract.chat import PromptList, TextPrompt, TokenPrompt
from contract.errors import invalid
from contract.pooling import PooledModel
from contract.sampling import SamplingOptions
from gateway.config import RequestConfig
from gateway.models.catalog import ServedModel
from gateway.pipeline.pooled_answers import Pooled
from gateway.types.request import GenerationRequest, PooledAsk

# Names that models give to the instructions for either side of a search, the likeliest first.
_OF_QUERIES = ("query", "search_query", "s2p_query", "retrieval.query")
_OF_DOCUMENTS = ("document", "passage", "search_document", "retrieval.passage", "corpus")


class PooledForm(NamedTuple):
    """What a face asks, but for the texts."""

    model: str
    ask: PooledAsk = PooledAsk()
    service_tier: str = ""
    metadata: Mapping[str, str] = {}
    face: str = "http"
    field_names: Mapping[str, str] = {}

    def request(
        self, prompts: Sequence[TextPrompt | TokenPrompt], names: Sequence[str], **ask: object
    ) -> GenerationRequest:
        """Of all prompts; `names` are what the caller calls each, `ask` replaces parts of the question."""
        field = names[0].partition("[")[0]
        return GenerationRequest(
            model=self.model,
            prompt=PromptList(tuple(prompts)),
            # Nothing is generated, and nothing reserved for it.
            sampling=SamplingOptions(max_tokens=0),
            pooling=msgspec.structs.replace(self.ask, names=tuple(names), **ask),
            service_tier=self.service_tier,
            metadata=self.metadata,
            # Another model's numbers mean something else.
            allow_fallback=False,
            streaming=False,
            face=self.face,
            field_names={**self.field_names, "prompt": field},
        )


def check_inputs(num_inputs: int, limits: RequestConfig, field: str) -> None:
    """Raises INVALID_ARGUMENT for no text, and for more than one request may have."""
    if not num_inputs:
        raise invalid(field, "it is empty; give at least one text")
    if num_inputs > limits.max_inputs:
        problem = f"{num_inputs} inputs; the limit is {limits.max_inputs} (gateway.request.max_inputs)"
        raise invalid(field, f"{problem}: send fewer in one request")


def scored_request(
    form: PooledForm, served: ServedModel, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
) -> GenerationRequest:
    """Of pairs of texts: each pair to a model that reads both together; to one of embeddings, whose cosines
    are the scores, each different first text, and then each second one. `names` are the fields of both.
    """
    first, second = names
    pooled, all_seconds = served.vocabulary.pooled, [second.format(index) for index in range(len(pairs))]
    if pooled is None or "embed" not in pooled.tasks:
        return form.request([TextPrompt(one, pair=other) for one, other in pairs], all_seconds, task="score")
    queries = list(dict.fromkeys(one for one, _ in pairs))
    of_queries, of_documents = _instruction(pooled, _OF_QUERIES), _instruction(pooled, _OF_DOCUMENTS)
    texts = [TextPrompt(of_queries + text) for text in queries]
    texts += [TextPrompt(of_documents + text) for _, text in pairs]
    all_names = [*(first.format(index) for index in range(len(queries))), *all_seconds]
    return form.request(texts, all_names, task="embed", prompt_name="")


def _instruction(pooled: PooledModel, names: Sequence[str]) -> str:
    """What stands before the texts of one side; the model's default where it has none for it."""
    found = next((name for name in names if name in pooled.prompts), pooled.default_prompt)
    return pooled.prompts.get(found, "")


def scores_of(outputs: Sequence[Pooled], pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The scores of pairs, from the outputs of `scored_request`."""
    if len(outputs) == len(pairs):
        return [output.values[0] for output in outputs]
    queries = list(dict.fromkeys(one for one, _ in pairs))
    values = [output.values for output in outputs]
    first = dict(zip(queries, values, strict=False))
    return [_cosine(first[one], other) for (one, _), other in zip(pairs, values[len(queries) :], strict=True)]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = sqrt(_product(one, one)) * sqrt(_product(other, other))
    return _product(one, other) / lengths if lengths else 0.0


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return fsum(map(mul, one, other))
