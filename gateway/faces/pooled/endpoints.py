"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify: many texts of one body, over the pipeline of all
requests.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from contract.chat import TextPrompt, TokenPrompt
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
from gateway.intake.json_shape import EMBEDDED_ID_FIELDS
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled_answers import Pooled, PooledAnswer, pooled_answer
from gateway.pipeline.pooled_requests import PooledForm, check_inputs, scored_request, scores_of
from gateway.pipeline.validate import check_metadata
from gateway.types.request import GenerationRequest, PooledAsk

_encode = msgspec.json.Encoder().encode
_EMBEDDINGS = msgspec.json.Decoder(POOLED_FIELDS.declared_in(EmbeddingsBody))
_RERANK = msgspec.json.Decoder(POOLED_FIELDS.declared_in(RerankBody))
_SCORE = msgspec.json.Decoder(POOLED_FIELDS.declared_in(ScoreBody))
_CLASSIFY = msgspec.json.Decoder(POOLED_FIELDS.declared_in(ClassifyBody))
# Texts of an answer that are told to have been cut: headers are bounded.
_MAX_WARNINGS = 16
_Body = TypeVar("_Body", bound=PooledCommon)


class PooledEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body, request = await self._read(exchange, _EMBEDDINGS, _embedding_request)
        answer = await self._answer(exchange, request)
        slices, data = Slices(), []
        for index, output in enumerate(answer.outputs):
            packed = body.encoding_format == "base64"
            values = base64.b64encode(output.packed).decode() if packed else output.values
            data.append(answers.EmbeddingBody(index=index, embedding=values))
            await slices.breathe()
        listed = answers.EmbeddingList(model=answer.model, data=data, usage=_usage(answer))
        await exchange.respond(200, _encode(listed))

    async def rerank(self, exchange: Exchange) -> None:
        """POST /v1/rerank, /v2/rerank and /rerank."""
        body, pairs = await self._read(exchange, _RERANK, _ranked_pairs)
        request = self._scored(exchange, body, pairs, ("query", "documents[{}]"))
        answer = await self._answer(exchange, request)
        scores = scores_of(answer.outputs, pairs)
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
            id=answer.request_id,
            model=answer.model,
            results=results,
            meta=answers.RerankMeta(
                api_version=answers.ApiVersionBody(version=version), billed_units=answers.BilledUnitsBody()
            ),
            usage=_usage(answer),
        )
        await exchange.respond(200, _encode(ranking))

    async def score(self, exchange: Exchange) -> None:
        """POST /v1/score."""
        body, pairs = await self._read(exchange, _SCORE, _score_pairs)
        request = self._scored(exchange, body, pairs, ("text_1[{}]", "text_2[{}]"))
        answer = await self._answer(exchange, request)
        data = [
            answers.ScoreEntry(index=index, score=score)
            for index, score in enumerate(scores_of(answer.outputs, pairs))
        ]
        scored = answers.ScoreList(
            id=answer.request_id,
            created=answer.created_unix_s,
            model=answer.model,
            data=data,
            usage=_usage(answer),
        )
        await exchange.respond(200, _encode(scored))

    async def classify(self, exchange: Exchange) -> None:
        """POST /v1/classify."""
        body, request = await self._read(exchange, _CLASSIFY, _class_request)
        answer = await self._answer(exchange, request)
        pooled = self._pipeline().model(exchange.verified_caller, body.model).vocabulary.pooled
        names = pooled.labels if pooled is not None else ()
        data = []
        for index, output in enumerate(answer.outputs):
            probs = output.values
            best = max(range(len(probs)), key=probs.__getitem__)
            label = names[best] if best < len(names) else f"LABEL_{best}"
            data.append(answers.ClassEntry(index=index, label=label, probs=probs, num_classes=len(probs)))
        listed = answers.ClassList(
            id=answer.request_id,
            created=answer.created_unix_s,
            model=answer.model,
            data=data,
            usage=_usage(answer),
        )
        await exchange.respond(200, _encode(listed))

    async def _read(
        self, exchange: Exchange, decoder: msgspec.json.Decoder[_Body], convert: Callable[..., Any]
    ) -> tuple[_Body, Any]:
        intake = self._pipeline().intake
        converting = partial(convert, limits=intake.limits)
        body, converted = await read(exchange, intake, decoder, converting, id_fields=EMBEDDED_ID_FIELDS)
        for warning in POOLED_FIELDS.check(body):
            exchange.add_headers({WARNING_HEADER: warning})
        return body, converted

    def _scored(
        self,
        exchange: Exchange,
        body: PooledCommon,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str],
    ) -> GenerationRequest:
        served = self._pipeline().model(exchange.verified_caller, body.model)
        return scored_request(_form(body), served, pairs, names)

    async def _answer(self, exchange: Exchange, request: GenerationRequest) -> PooledAnswer:
        """The answer to a request; a client that leaves ends it."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        computing = asyncio.ensure_future(pooled_answer(pipeline, caller, request))
        exchange.watch_client(partial(_end, computing))
        try:
            answer = await computing
        except asyncio.CancelledError:
            if not exchange.client_gone:
                raise
            raise MillraceError(Reason.CANCELLED, "the client went away") from None
        finally:
            exchange.unwatch()
        exchange.add_headers(pipeline.limiter.headers(caller.identity))
        for warning in _warnings(request, answer.outputs):
            exchange.add_headers({WARNING_HEADER: warning})
        return answer


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


def _embedding_request(body: EmbeddingsBody, *, limits: RequestConfig) -> GenerationRequest:
    if body.dimensions is not None and body.dimensions < 1:
        raise invalid("dimensions", f"{body.dimensions}; give at least 1, or leave it out")
    form = _form(body, dimensions=body.dimensions or 0, prompt_name=body.prompt_name)
    return form.request(*_prompts(body.input, limits))


def _class_request(body: ClassifyBody, *, limits: RequestConfig) -> GenerationRequest:
    return _form(body, task="classify").request(*_prompts(body.input, limits))


def _prompts(
    given: str | list[str | int | list[int]], limits: RequestConfig
) -> tuple[list[TextPrompt | TokenPrompt], list[str]]:
    """The texts and ids of a body, and how each is called there."""
    if isinstance(given, str):
        return [TextPrompt(given)], ["input"]
    if given and set(map(type, given)) <= {int}:
        ids: Any = given
        return [TokenPrompt(tuple(ids))], ["input"]
    check_inputs(len(given), limits, "input")
    prompts: list[TextPrompt | TokenPrompt] = []
    for index, each in enumerate(given):
        if isinstance(each, str):
            prompts.append(TextPrompt(each))
        elif isinstance(each, list):
            prompts.append(TokenPrompt(tuple(each)))
        else:
            raise invalid(f"input[{index}]", "an input is a text or a list of token ids")
    return prompts, [f"input[{index}]" for index in range(len(prompts))]


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


def _usage(answer: PooledAnswer) -> answers.PooledUsageBody:
    return answers.PooledUsageBody(prompt_tokens=answer.prompt_tokens, total_tokens=answer.prompt_tokens)


def _warnings(request: GenerationRequest, outputs: Sequence[Pooled]) -> Iterator[str]:
    """What was cut of the first texts that lost something, and of how many others."""
    cut = [(index, each) for index, each in enumerate(outputs) if each.left_out is not None]
    for index, output in cut[:_MAX_WARNINGS]:
        assert output.left_out is not None, "as sorted out"
        # Without a wish the end is cut, too.
        is_end = request.pooling is not None and request.pooling.truncate != "START"
        told = output.left_out.told(output.prompt_tokens, is_end=is_end)
        yield f"{request.field(f'texts[{index}]')}: {told}"
    if len(cut) > _MAX_WARNINGS:
        yield f"{len(cut) - _MAX_WARNINGS} other texts were cut as well"
