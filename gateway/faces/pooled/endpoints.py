"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify: many texts of one body, over the pipeline of all
requests.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from contract.chat import Prompt, TextPrompt, TokenPrompt
from contract.errors import MillraceError, Reason, invalid
from gateway.config import RequestConfig
from gateway.faces.bodies import read
from gateway.faces.options import labels
from gateway.faces.pooled import answer_types as answers
from gateway.faces.pooled.bodies import (
    POOLED_FIELDS,
    ClassifyBody,
    DocumentBody,
    EmbeddingsBody,
    PooledCommon,
    RerankBody,
    ScoreBody,
)
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.exchange import Exchange
from gateway.intake.intake import Slices
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled_answers import Pooled, pooled_answers
from gateway.pipeline.pooled_requests import PooledForm, check_inputs, scored_requests, scores_of
from gateway.pipeline.validate import check_metadata
from gateway.types.request import GenerationRequest, PooledAsk

_encode = msgspec.json.Encoder().encode
_EMBEDDINGS = msgspec.json.Decoder(POOLED_FIELDS.declared_in(EmbeddingsBody))
_RERANK = msgspec.json.Decoder(POOLED_FIELDS.declared_in(RerankBody))
_SCORE = msgspec.json.Decoder(POOLED_FIELDS.declared_in(ScoreBody))
_CLASSIFY = msgspec.json.Decoder(POOLED_FIELDS.declared_in(ClassifyBody))
_Body = TypeVar("_Body", bound=PooledCommon)


class PooledEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body, requests = await self._read(exchange, _EMBEDDINGS, _embedding_requests)
        outputs = await self._outputs(exchange, requests)
        slices, data = Slices(), []
        for index, output in enumerate(outputs):
            packed = body.encoding_format == "base64"
            values = base64.b64encode(output.packed).decode() if packed else output.values
            data.append(answers.EmbeddingBody(index=index, embedding=values))
            await slices.breathe()
        listed = answers.EmbeddingList(model=outputs[0].model, data=data, usage=_usage(outputs))
        await exchange.respond(200, _encode(listed))

    async def rerank(self, exchange: Exchange) -> None:
        """POST /v1/rerank, /v2/rerank and /rerank."""
        body, pairs = await self._read(exchange, _RERANK, _ranked_pairs)
        requests = self._scored(exchange, body, pairs, ("query", "documents[{}]"))
        outputs = await self._outputs(exchange, requests)
        scores = scores_of(outputs, pairs)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
        results = [
            answers.RankedBody(
                index=index,
                relevance_score=scores[index],
                document=answers.RankedDocument(text=pairs[index][1])
                if body.return_documents
                else msgspec.UNSET,
            )
            for index in best
        ]
        version = "2" if exchange.path.startswith("/v2/") else "1"
        ranking = answers.Reranking(
            id=outputs[0].request_id,
            model=outputs[0].model,
            results=results,
            meta=answers.RerankMeta(
                api_version=answers.ApiVersionBody(version=version), billed_units=answers.BilledUnitsBody()
            ),
            usage=_usage(outputs),
        )
        await exchange.respond(200, _encode(ranking))

    async def score(self, exchange: Exchange) -> None:
        """POST /v1/score."""
        body, pairs = await self._read(exchange, _SCORE, _score_pairs)
        requests = self._scored(exchange, body, pairs, ("text_1[{}]", "text_2[{}]"))
        outputs = await self._outputs(exchange, requests)
        data = [
            answers.ScoreEntry(index=index, score=score)
            for index, score in enumerate(scores_of(outputs, pairs))
        ]
        scored = answers.ScoreList(
            id=outputs[0].request_id,
            created=outputs[0].created_unix_s,
            model=outputs[0].model,
            data=data,
            usage=_usage(outputs),
        )
        await exchange.respond(200, _encode(scored))

    async def classify(self, exchange: Exchange) -> None:
        """POST /v1/classify."""
        body, requests = await self._read(exchange, _CLASSIFY, _class_requests)
        outputs = await self._outputs(exchange, requests)
        pooled = self._pipeline().model(exchange.verified_caller, body.model).vocabulary.pooled
        names = pooled.labels if pooled is not None else ()
        data = []
        for index, output in enumerate(outputs):
            probs = output.values
            best = max(range(len(probs)), key=probs.__getitem__)
            label = names[best] if best < len(names) else f"LABEL_{best}"
            data.append(answers.ClassEntry(index=index, label=label, probs=probs, num_classes=len(probs)))
        listed = answers.ClassList(
            id=outputs[0].request_id,
            created=outputs[0].created_unix_s,
            model=outputs[0].model,
            data=data,
            usage=_usage(outputs),
        )
        await exchange.respond(200, _encode(listed))

    async def _read(
        self, exchange: Exchange, decoder: msgspec.json.Decoder[_Body], convert: Callable[..., Any]
    ) -> tuple[_Body, Any]:
        intake = self._pipeline().intake
        body, converted = await read(exchange, intake, decoder, partial(convert, limits=intake.limits))
        for warning in POOLED_FIELDS.check(body):
            exchange.add_headers({WARNING_HEADER: warning})
        return body, converted

    def _scored(
        self,
        exchange: Exchange,
        body: PooledCommon,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
    ) -> list[GenerationRequest]:
        served = self._pipeline().model(exchange.verified_caller, body.model)
        return scored_requests(_form(body), served, pairs, names)

    async def _outputs(self, exchange: Exchange, requests: Sequence[GenerationRequest]) -> list[Pooled]:
        """The outputs of all requests; a client that leaves ends them."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        computing = asyncio.ensure_future(pooled_answers(pipeline, caller, requests))
        exchange.watch_client(partial(_end, computing))
        try:
            outputs = await computing
        except asyncio.CancelledError:
            if not exchange.client_gone:
                raise
            raise MillraceError(Reason.CANCELLED, "the client went away") from None
        finally:
            exchange.unwatch()
        exchange.add_headers(pipeline.limiter.headers(caller.identity))
        for request, output in zip(requests, outputs, strict=True):
            if output.left_out is not None:
                told = output.left_out.told(output.prompt_tokens)
                exchange.add_headers({WARNING_HEADER: f"{request.field('prompt')}: {told}"})
        return outputs


def _end(computing: asyncio.Future[Any]) -> None:
    computing.cancel()


def _form(body: PooledCommon, **ask: Any) -> PooledForm:
    check_metadata(body.metadata or {})
    return PooledForm(
        model=body.model,
        ask=PooledAsk(truncate=body.truncate, **ask),
        service_tier=body.service_tier or "",
        metadata=labels(body.metadata, user=body.user),
    )


def _embedding_requests(body: EmbeddingsBody, *, limits: RequestConfig) -> list[GenerationRequest]:
    if body.dimensions is not None and body.dimensions < 1:
        raise invalid("dimensions", f"{body.dimensions}; give at least 1, or leave it out")
    form = _form(body, dimensions=body.dimensions or 0, prompt_name=body.prompt_name)
    return form.requests(*_prompts(body.input, limits))


def _class_requests(body: ClassifyBody, *, limits: RequestConfig) -> list[GenerationRequest]:
    return _form(body, task="classify").requests(*_prompts(body.input, limits))


def _prompts(
    given: str | list[str | int | list[int]], limits: RequestConfig
) -> tuple[list[Prompt], Callable[[int], str]]:
    """The texts and ids of a body, and how each is called there."""
    if isinstance(given, str):
        return [TextPrompt(given)], lambda index: "input"
    if given and set(map(type, given)) <= {int}:
        ids: Any = given
        return [TokenPrompt(tuple(ids))], lambda index: "input"
    check_inputs(len(given), limits, "input")
    prompts: list[Prompt] = []
    for index, each in enumerate(given):
        if isinstance(each, str):
            prompts.append(TextPrompt(each))
        elif isinstance(each, list):
            prompts.append(TokenPrompt(tuple(each)))
        else:
            raise invalid(f"input[{index}]", "an input is a text or a list of token ids")
    return prompts, "input[{}]".format


def _ranked_pairs(body: RerankBody, *, limits: RequestConfig) -> list[tuple[str, str]]:
    if body.top_n is not None and body.top_n < 1:
        raise invalid("top_n", f"{body.top_n}; give at least 1, or leave it out")
    check_inputs(len(body.documents), limits, "documents")
    texts = [each.text if isinstance(each, DocumentBody) else each for each in body.documents]
    _check_texts([body.query], "query")
    _check_texts(texts, "documents[{}]")
    return [(body.query, text) for text in texts]


def _score_pairs(body: ScoreBody, *, limits: RequestConfig) -> list[tuple[str, str]]:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    check_inputs(len(first), limits, "text_1")
    check_inputs(len(second), limits, "text_2")
    if len(first) not in (1, len(second)):
        problem = f"{len(first)} texts beside {len(second)} of text_2; give one, or as many"
        raise invalid("text_1", problem)
    _check_texts(first, "text_1[{}]")
    _check_texts(second, "text_2[{}]")
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _check_texts(texts: Sequence[str], field: str) -> None:
    for index, text in enumerate(texts):
        if not text:
            raise invalid(field.format(index), "it is empty; give at least one character")


def _usage(outputs: Sequence[Pooled]) -> answers.PooledUsageBody:
    num_tokens = sum(output.prompt_tokens for output in outputs)
    return answers.PooledUsageBody(prompt_tokens=num_tokens, total_tokens=num_tokens)
