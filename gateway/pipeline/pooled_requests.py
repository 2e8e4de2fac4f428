"""From what a face asks of a model that pools to requests, one for each text or pair, and from their outputs
to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt
from operator import mul
from typing import NamedTuple

import msgspec

from contract.chat import Prompt, TextPrompt
from contract.errors import invalid
from contract.sampling import SamplingOptions
from gateway.config import RequestConfig
from gateway.models.catalog import ServedModel
from gateway.pipeline.pooled_answers import Pooled
from gateway.types.request import GenerationRequest, PooledAsk

# Names that models give to the instructions for either side of a search, the likeliest first.
_OF_QUERIES = ("query", "search_query", "s2p_query", "retrieval.query")
_OF_DOCUMENTS = ("document", "passage", "search_document", "retrieval.passage", "corpus")


class PooledForm(NamedTuple):
    """What all requests of one call have in common."""

    model: str
    ask: PooledAsk = PooledAsk()
    service_tier: str = ""
    metadata: Mapping[str, str] = {}
    face: str = "http"
    field_names: Mapping[str, str] = {}

    def requests(self, prompts: Sequence[Prompt], field: Callable[[int], str]) -> list[GenerationRequest]:
        """One request each; `field` names a prompt in the caller's words."""
        return [
            GenerationRequest(
                model=self.model,
                prompt=prompt,
                # Nothing is generated, and nothing reserved for it.
                sampling=SamplingOptions(max_tokens=0),
                pooling=self.ask,
                service_tier=self.service_tier,
                metadata=self.metadata,
                # Another model's numbers mean something else.
                allow_fallback=False,
                streaming=False,
                # They take one stream together.
                num_prompts=0 if index else 1,
                face=self.face,
                field_names={**self.field_names, "prompt": field(index), "pair": field(index)},
            )
            for index, prompt in enumerate(prompts)
        ]

    def asking(self, **changes: object) -> PooledForm:
        """The same with another question."""
        return self._replace(ask=msgspec.structs.replace(self.ask, **changes))


def check_inputs(num_inputs: int, limits: RequestConfig, field: str) -> None:
    """Raises INVALID_ARGUMENT for no text, and for more than one request may have."""
    if not num_inputs:
        raise invalid(field, "it is empty; give at least one text")
    if num_inputs > limits.max_inputs:
        problem = f"{num_inputs} inputs; the limit is {limits.max_inputs} (gateway.request.max_inputs)"
        raise invalid(field, f"{problem}: send fewer in one request")


def scored_requests(
    form: PooledForm, served: ServedModel, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
) -> list[GenerationRequest]:
    """Of pairs of texts: one each to a model that reads both together; to one of embeddings, whose cosines
    are the
    scores, one for each different first text, and then one for each second. `names` are the fields of both.
    """
    first, second = names
    pooled = served.vocabulary.pooled
    if pooled is None or "embed" not in pooled.tasks:
        prompts = [TextPrompt(one, pair=other) for one, other in pairs]
        return form.asking(task="score").requests(prompts, second.format)
    queries = list(dict.fromkeys(one for one, _ in pairs))
    named = [
        next((name for name in names if name in pooled.prompts), None)
        for names in (_OF_QUERIES, _OF_DOCUMENTS)
    ]
    asked = form.asking(task="embed", prompt_name=named[0]).requests(
        [TextPrompt(text) for text in queries], first.format
    )
    others = form.asking(task="embed", prompt_name=named[1]).requests(
        [TextPrompt(text) for _, text in pairs], second.format
    )
    return [*asked, *(msgspec.structs.replace(each, num_prompts=0) for each in others)]


def scores_of(outputs: Sequence[Pooled], pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The scores of pairs, from the outputs of `scored_requests`."""
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
