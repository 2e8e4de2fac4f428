"""Serves millrace.inference.v1.InferenceService."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from contract.proto.grammar import report_message
from gateway.auth.verifier import Arrival
from gateway.faces.grpc import convert, pooled
from gateway.intake.intake import Slices
from gateway.pipeline.delta import AnswerInfo, by_choice
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled import tasks_of
from gateway.types.request import Caller
from runtime.context import CONTEXT_HEADER

# Ids of an answer that are written at once.
_TOGETHER = 4096
FULL_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Each call is one request of the pipeline; MillraceErrors are answered by the server's interceptor."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Answers a conversation."""
        caller, pipeline = self.caller(context), self._pipeline()
        asked = convert.chat_request(request, pipeline.intake.limits)
        # It may be megabytes, and answers take minutes.
        include_timing = request.include_timing
        del request
        async with await pipeline.begin(caller, asked) as attempt:
            info, vocabulary = attempt.info, attempt.reader.vocabulary
            response = _response(inference_pb2.ChatResponse, info, is_first=True)
            while deltas := await attempt.drain():
                response.choices.extend(convert.chat_choice(delta, vocabulary) for delta in by_choice(deltas))
                yield response
                attempt.first_chunk_written()
                response = _response(inference_pb2.ChatResponse, info)
            response.usage.CopyFrom(convert.usage_message(attempt.usage(), timing=include_timing))
            yield response

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continues a text or token ids."""
        caller = self.caller(context)
        async with await self._pipeline().begin(caller, convert.generate_request(request)) as attempt:
            info, vocabulary = attempt.info, attempt.reader.vocabulary
            echo = "" if info.echo is None else info.echo.text
            to_echo = dict.fromkeys(range(info.num_choices), echo)
            response = _response(inference_pb2.GenerateResponse, info, is_first=True)
            while deltas := await attempt.drain():
                response.choices.extend(
                    convert.generate_choice(delta, vocabulary, to_echo.pop(delta.index, ""))
                    for delta in by_choice(deltas)
                )
                yield response
                attempt.first_chunk_written()
                response = _response(inference_pb2.GenerateResponse, info)
            response.usage.CopyFrom(convert.usage_message(attempt.usage(), timing=request.include_timing))
            yield response

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.CountTokensResponse:
        """Counts without generating."""
        pipeline, caller = self._pipeline(), self.caller(context)
        served = pipeline.model(caller, request.model)
        asked = convert.prompt_request(request, pipeline.intake.limits)
        encoded = await pipeline.encode(caller, served, asked)
        return inference_pb2.CountTokensResponse(num_tokens=len(encoded.token_ids))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        """Encodes without generating."""
        pipeline, caller = self._pipeline(), self.caller(context)
        served = pipeline.model(caller, request.model)
        asked = convert.prompt_request(request, pipeline.intake.limits)
        encoded = await pipeline.encode(caller, served, asked)
        ids = encoded.token_ids
        response = inference_pb2.TokenizeResponse(
            max_model_len=pipeline.max_model_len(served), left_out=convert.left_out(encoded.left_out)
        )
        slices, text_of = Slices(), served.vocabulary.token_text
        for start in range(0, len(ids), _TOGETHER):
            some = ids[start : start + _TOGETHER]
            response.token_ids.extend(some)
            if request.include_token_texts:
                response.token_texts.extend(map(text_of, some))
            await slices.breathe()
        return response

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        """Decodes token ids."""
        pipeline, caller = self._pipeline(), self.caller(context)
        served = pipeline.model(caller, request.model)
        text = await pipeline.decode(caller, served, request.token_ids, "token_ids")
        return inference_pb2.DetokenizeResponse(text=text)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.EmbedResponse:
        """Makes embeddings."""
        return await pooled.embed(self._pipeline(), self.caller(context), request)

    async def Rerank(
        self, request: inference_pb2.RerankRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.RerankResponse:
        """Orders documents."""
        return await pooled.rerank(self._pipeline(), self.caller(context), request)

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ScoreResponse:
        """Scores pairs."""
        return await pooled.score(self._pipeline(), self.caller(context), request)

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ClassifyResponse:
        """Classifies texts."""
        return await pooled.classify(self._pipeline(), self.caller(context), request)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        """Models that the key may use."""
        pipeline, response = self._pipeline(), inference_pb2.ListModelsResponse()
        for name in pipeline.catalog.names(self.caller(context).identity):
            served = pipeline.catalog.any_of(name)
            response.models.add(
                id=name,
                max_model_len=pipeline.max_model_len(served) if served else 0,
                created_unix_s=served.created_unix_s if served else 0,
                owned_by="millrace",
                sampling_defaults=[
                    inference_pb2.SamplingDefault(option=option, value=value, source=source)
                    for option, value, source in pipeline.defaults(served)
                ],
                tasks=tasks_of(served) if served else (),
            )
        return response

    def caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """The caller of a call; raises MISSING_CREDENTIALS or CONTEXT_SIGNATURE_INVALID."""
        metadata = {
            key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        arrival = Arrival(
            received_s=time.monotonic(),
            traceparent=metadata.get("traceparent", ""),
            tracestate=metadata.get("tracestate", ""),
            client_request_id=metadata.get("x-client-request-id", ""),
            retries=metadata.get("grpc-previous-rpc-attempts") or metadata.get("x-stainless-retry-count", ""),
            timeout_s=context.time_remaining(),
        )
        return self._pipeline().callers.verify(metadata.get(CONTEXT_HEADER), arrival)


def _response(kind: Any, info: AnswerInfo, *, is_first: bool = False) -> Any:
    enforcement = info.enforcement if is_first else None
    return kind(
        request_id=info.request_id,
        model=info.model,
        created_unix_s=info.created_unix_s,
        service_tier=info.service_tier,
        enforcement=None if enforcement is None else report_message(enforcement),
        left_out=convert.left_out(info.left_out) if is_first else None,
    )
