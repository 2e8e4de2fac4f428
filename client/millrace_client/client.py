"""The client: one channel, one method for each RPC of InferenceService."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio
from google.protobuf.message import Message
from millrace.inference.v1 import inference_pb2 as protos
from millrace.inference.v1.inference_pb2_grpc import InferenceServiceStub

from millrace_client.errors import closed_early, error_of, is_task_cancelled
from millrace_client.messages import ChatInput, TextInput, conversation_of, pooled_inputs, with_options
from millrace_client.retry import CallDeadline, RetryPolicy
from millrace_client.stream import AnswerStream
from millrace_client.transport import TlsFiles, checked_timeout, key_metadata, open_channel

_Answer = TypeVar("_Answer", bound=Message)


class MillraceClient:
    """Asks one deployment with one key, from one event loop. `async with` closes it.

    `timeout_s` is the time of a call, its attempts and the whole of its answer together, where the call names
    none; it reaches the engine, which gives up what is late. Every method takes further options by the names
    that they have in the protos, such as `temperature`, `max_tokens`, `service_tier` and `tools`. All raise
    MillraceApiError for what the server refuses, and ValueError for what cannot be sent.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        tls: TlsFiles | None = None,
        timeout_s: float | None = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`url` is `https://host:port`, or without TLS `http://host:port` or `host:port`."""
        self._metadata = key_metadata(api_key)
        self._timeout_s = checked_timeout(timeout_s)
        self._policy = retry or RetryPolicy()
        self._channel = open_channel(url, tls)
        self._stub = InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls under way are cancelled."""
        await self._channel.close(None)

    def chat(
        self, messages: ChatInput, *, model: str, timeout_s: float | None = None, **options: Any
    ) -> AnswerStream[protos.ChatResponse]:
        """Answers a conversation."""
        request = protos.ChatRequest(model=model, conversation=conversation_of(messages))
        return self._stream(self._stub.Chat, with_options(request, options), timeout_s)

    def generate(
        self, prompt: TextInput, *, model: str, timeout_s: float | None = None, **options: Any
    ) -> AnswerStream[protos.GenerateResponse]:
        """Continues a text or token ids."""
        request = protos.GenerateRequest(model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self._stream(self._stub.Generate, with_options(request, options), timeout_s)

    async def count_tokens(
        self, prompt: ChatInput, *, model: str, timeout_s: float | None = None, **options: Any
    ) -> int:
        """How many tokens a text, or messages of a conversation, take."""
        request = protos.CountTokensRequest(model=model, **_prompt(prompt))
        made = with_options(request, options)
        return (await self._once(self._stub.CountTokens, made, timeout_s)).num_tokens

    async def tokenize(
        self, prompt: ChatInput, *, model: str, timeout_s: float | None = None, **options: Any
    ) -> protos.TokenizeResponse:
        """Which tokens a text, or messages of a conversation, become."""
        request = protos.TokenizeRequest(model=model, **_prompt(prompt))
        return await self._once(self._stub.Tokenize, with_options(request, options), timeout_s)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str, timeout_s: float | None = None
    ) -> str:
        """Which text token ids stand for."""
        request = protos.DetokenizeRequest(model=model, token_ids=token_ids)
        return (await self._once(self._stub.Detokenize, request, timeout_s)).text

    async def embed(
        self,
        inputs: TextInput | Iterable[TextInput],
        *,
        model: str,
        timeout_s: float | None = None,
        **options: Any,
    ) -> protos.EmbedResponse:
        """One embedding of each input."""
        request = protos.EmbedRequest(model=model, inputs=pooled_inputs(inputs))
        return await self._once(self._stub.Embed, with_options(request, options), timeout_s)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str,
        timeout_s: float | None = None,
        **options: Any,
    ) -> protos.RerankResponse:
        """Documents by how relevant they are, the most relevant first."""
        request = protos.RerankRequest(model=model, query=query, documents=documents)
        return await self._once(self._stub.Rerank, with_options(request, options), timeout_s)

    async def score(
        self,
        first: str | Sequence[str],
        second: Sequence[str],
        *,
        model: str,
        timeout_s: float | None = None,
        **options: Any,
    ) -> protos.ScoreResponse:
        """How well the texts of each pair go together; one first text goes with all."""
        firsts = [first] if isinstance(first, str) else first
        request = protos.ScoreRequest(model=model, first=firsts, second=second)
        return await self._once(self._stub.Score, with_options(request, options), timeout_s)

    async def classify(
        self,
        inputs: TextInput | Iterable[TextInput],
        *,
        model: str,
        timeout_s: float | None = None,
        **options: Any,
    ) -> protos.ClassifyResponse:
        """Each input's probabilities of the labels."""
        request = protos.ClassifyRequest(model=model, inputs=pooled_inputs(inputs))
        return await self._once(self._stub.Classify, with_options(request, options), timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> list[protos.Model]:
        """What the key may use."""
        answer = await self._once(self._stub.ListModels, protos.ListModelsRequest(), timeout_s)
        return list(answer.models)

    def _stream(self, method: Any, request: Message, timeout_s: float | None) -> AnswerStream[Any]:
        return AnswerStream(
            lambda left_s: method(request, metadata=self._metadata, timeout=left_s),
            self._policy,
            checked_timeout(timeout_s) or self._timeout_s,
        )

    async def _once(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Any, _Answer],
        request: Message,
        timeout_s: float | None,
    ) -> _Answer:
        deadline = CallDeadline(checked_timeout(timeout_s) or self._timeout_s)
        num_tried = 0
        while True:
            num_tried += 1
            try:
                return await method(request, metadata=self._metadata, timeout=deadline.left_s())
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                raise closed_early() from None
            except grpc.aio.AioRpcError as refused:
                error = error_of(refused)
                pause_s = self._policy.pause_s(error, num_tried, deadline.left_s())
                if pause_s is None:
                    raise error from refused
            await asyncio.sleep(pause_s)


def _prompt(prompt: ChatInput) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"conversation": conversation_of(prompt)}
