"""Embed, Rerank, Score and Classify of the gRPC face: messages to requests of models that pool, and outputs
to messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from millrace.inference.v1 import inference_pb2

from contract.chat import TextPrompt, TokenPrompt
from contract.errors import invalid
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled_answers import PooledAnswer, pooled_answer
from gateway.pipeline.pooled_requests import PooledForm, check_inputs, scored_request, scores_of
from gateway.pipeline.validate import check_metadata
from gateway.types.request import Caller, PooledAsk

_CUTS = ("NONE", "START", "END")
_Asked: TypeAlias = (
    inference_pb2.EmbedRequest
    | inference_pb2.RerankRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.ClassifyRequest
)


async def embed(
    pipeline: Pipeline, caller: Caller, message: inference_pb2.EmbedRequest
) -> inference_pb2.EmbedResponse:
    """See the proto."""
    name = message.prompt_name if message.HasField("prompt_name") else None
    form = _form(message, dimensions=message.dimensions, prompt_name=name)
    request = form.request(*_prompts(pipeline, message.inputs))
    answer = await pooled_answer(pipeline, caller, request)
    response = inference_pb2.EmbedResponse(**_told(answer))
    for output in answer.outputs:
        response.embeddings.add(values=output.values)
    return response


async def rerank(
    pipeline: Pipeline, caller: Caller, message: inference_pb2.RerankRequest
) -> inference_pb2.RerankResponse:
    """See the proto."""
    check_inputs(len(message.documents), pipeline.intake.limits, "documents")
    pairs = [(message.query, text) for text in message.documents]
    answer, scores = await _scored(pipeline, caller, message, pairs, ("query", "documents[{}]"))
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    response = inference_pb2.RerankResponse(**_told(answer))
    for index in best[: message.top_n or None]:
        response.results.add(index=index, relevance_score=scores[index])
    return response


async def score(
    pipeline: Pipeline, caller: Caller, message: inference_pb2.ScoreRequest
) -> inference_pb2.ScoreResponse:
    """See the proto."""
    first, second = list(message.first), list(message.second)
    check_inputs(len(first), pipeline.intake.limits, "first")
    check_inputs(len(second), pipeline.intake.limits, "second")
    if len(first) not in (1, len(second)):
        raise invalid("first", f"{len(first)} texts beside {len(second)} of second; give one, or as many")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    answer, scores = await _scored(pipeline, caller, message, pairs, ("first[{}]", "second[{}]"))
    return inference_pb2.ScoreResponse(scores=scores, **_told(answer))


async def classify(
    pipeline: Pipeline, caller: Caller, message: inference_pb2.ClassifyRequest
) -> inference_pb2.ClassifyResponse:
    """See the proto."""
    form = _form(message, task="classify")
    request = form.request(*_prompts(pipeline, message.inputs))
    answer = await pooled_answer(pipeline, caller, request)
    pooled = pipeline.model(caller, message.model).vocabulary.pooled
    labels = () if pooled is None else pooled.labels
    response = inference_pb2.ClassifyResponse(**_told(answer))
    for output in answer.outputs:
        probabilities = output.values
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        response.classifications.add(
            label=labels[best] if best < len(labels) else "", probabilities=probabilities, labels=labels
        )
    return response


async def _scored(
    pipeline: Pipeline,
    caller: Caller,
    message: inference_pb2.RerankRequest | inference_pb2.ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    names: tuple[str, str],
) -> tuple[PooledAnswer, list[float]]:
    served = pipeline.model(caller, message.model)
    for index, (one, other) in enumerate(pairs):
        if not (one and other):
            field = names[0 if not one else 1].format(index)
            raise invalid(field, "it is empty; give at least one character")
    answer = await pooled_answer(pipeline, caller, scored_request(_form(message), served, pairs, names))
    return answer, scores_of(answer.outputs, pairs)


def _form(message: _Asked, **ask: Any) -> PooledForm:
    options = message.options
    check_metadata(options.metadata)
    if options.truncate and options.truncate not in _CUTS:
        raise invalid(
            "options.truncate",
            f"{options.truncate!r} is none of {', '.join(_CUTS)}; leave it out, or use one",
        )
    truncate: Any = options.truncate or None
    return PooledForm(
        model=message.model,
        ask=PooledAsk(truncate=truncate, **ask),
        service_tier=options.service_tier,
        metadata=dict(options.metadata),
        face="grpc",
        field_names={"service_tier": "options.service_tier"},
    )


def _prompts(
    pipeline: Pipeline, inputs: Sequence[inference_pb2.PooledInput]
) -> tuple[list[TextPrompt | TokenPrompt], list[str]]:
    check_inputs(len(inputs), pipeline.intake.limits, "inputs")
    prompts: list[TextPrompt | TokenPrompt] = [
        TokenPrompt(tuple(each.token_ids.ids))
        if each.WhichOneof("input") == "token_ids"
        else TextPrompt(each.text)
        for each in inputs
    ]
    return prompts, [f"inputs[{index}]" for index in range(len(prompts))]


def _told(answer: PooledAnswer) -> dict[str, Any]:
    return {
        "request_id": answer.request_id,
        "model": answer.model,
        "usage": inference_pb2.PooledUsage(prompt_tokens=answer.prompt_tokens),
    }
