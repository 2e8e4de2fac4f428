"""The gRPC face: verifies who asks, checks the model's name, translates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from functools import partial
from typing import Any

from millrace.common.v1 import context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind

from contract.errors import MillraceError, Reason
from contract.proto.grammar import verdict_message
from observability.emit import names
from observability.emit.tracing import (
    RemoteSpan,
    RequestIdentity,
    Telemetry,
    context_from_traceparent,
    with_identity,
)
from runtime.context import verify
from runtime.deferred import Deferred
from tokenizer_svc.grammar.request import PreparedRequest, Prompted
from tokenizer_svc.messages import wire
from tokenizer_svc.messages.wire import Head, LargeAnswer, LargeRequest, WireCall
from tokenizer_svc.refusals import no_input
from tokenizer_svc.service.prepare import Preparer, is_short
from tokenizer_svc.service.shelf import Served, Shelf
from tokenizer_svc.service.stream import Calls, CallStream

# Share of the caller's own limit after which it is answered that there was not enough time.
_ANSWER_AT = 0.9


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves every checkpoint under its names."""

    def __init__(
        self,
        shelf: Shelf,
        telemetry: Telemetry,
        deferred: Deferred,
        *,
        secret: bytes,
        max_context_age_s: float,
        allow_unsigned: bool,
        prepare_limit_s: float,
        beat_s: float,
    ) -> None:
        self._shelf = shelf
        self._telemetry = telemetry
        # Spans and metrics of requests that are answered already are recorded by it.
        self._deferred = deferred
        self._secret = secret
        self._max_context_age_s = max_context_age_s
        self._allow_unsigned = allow_unsigned
        self._limit_s = prepare_limit_s
        self._beat_s = beat_s

    async def Prepare(  # type: ignore[override]
        self, request: tokenizer_pb2.PrepareRequest | LargeRequest, context: Any
    ) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
        """See the proto; large requests come in parts, and so are their answers (see `wire`)."""
        return await self._answer(request, None, context.time_remaining())

    async def PrepareStream(  # type: ignore[override]
        self, requests: Calls, context: Any
    ) -> AsyncIterator[bytes]:
        """See the proto; what is large as in Prepare."""

        async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
            trace = context_from_traceparent(call.head.traceparent, call.head.tracestate)
            return await self._answer(call.request, trace, call.head.timeout_s or None)

        async with aclosing(CallStream(answer, self._at_once, self._beat_s).serve(requests)) as answers:
            async for message in answers:
                yield message
                del message

    def _at_once(self, call: WireCall) -> dict[str, Any] | None:
        """The answer to a call that asks for a short conversation alone, as most do: a task, a time limit and
        spans that are current take as long as the prompt. What fails here is left to fail on the way of all
        others, which says why.
        """
        request = call.request
        if isinstance(request, LargeRequest) or not is_short(request):
            return None
        begin_s = time.monotonic()
        try:
            who = self._verify(request)
            served = self._served(request.model, who)
            length = wire.length_limit(request, who)
            short = served.preparer.prepare_short(
                request, tenant=who.tenant, length=length, salt=who.cache_salt
            )
        except Exception:
            return None
        if short is None:
            return None
        record = partial(self._record_short, call.head, who, served.preparer)
        self._deferred.call(record, begin_s, time.monotonic(), short)
        return wire.short_answer(short, served.fingerprint)

    def _record_short(
        self,
        head: Head,
        who: context_pb2.RequestContext,
        preparer: Preparer,
        begin_s: float,
        end_s: float,
        prompted: Prompted,
    ) -> None:
        identity = RequestIdentity(who.request_id, who.client_request_id)
        parent = RemoteSpan(head.traceparent, head.tracestate, identity)
        span = self._telemetry.start(
            names.TOKENIZER_PREPARE, kind=SpanKind.SERVER, start_s=begin_s, parent=parent
        )
        preparer.record_short(prompted, span)
        self._telemetry.end(span, end_s=end_s)

    async def _answer(
        self,
        request: tokenizer_pb2.PrepareRequest | LargeRequest,
        trace: otel_context.Context | None,
        timeout_s: float | None,
    ) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
        head = request.head if isinstance(request, LargeRequest) else request
        who = self._verify(head)
        served = self._served(head.model, who)
        identity = RequestIdentity(who.request_id, who.client_request_id)
        parent = with_identity(identity, trace)
        with self._telemetry.span(names.TOKENIZER_PREPARE, parent=parent, kind=SpanKind.SERVER):
            length = wire.length_limit(head, who)
            work = served.preparer.prepare(request, tenant=who.tenant, length=length, salt=who.cache_salt)
            prepared = await self._within_limit(work, timeout_s)
        return wire.prepare_answer(prepared, served.fingerprint)

    async def _within_limit(
        self, work: Awaitable[PreparedRequest], timeout_s: float | None
    ) -> PreparedRequest:
        # Somewhat before the caller gives up, so that it receives the reason.
        limit_s = self._limit_s if timeout_s is None else min(self._limit_s, timeout_s * _ANSWER_AT)
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as error:
            raise MillraceError(
                Reason.DEADLINE_EXCEEDED,
                f"the prompt could not be prepared within {limit_s:.3g} s, the wait in the queue included; "
                "retry when there is less load, or send less text or a simpler grammar",
                field="input",
                retry_after_s=1.0,
            ) from error

    async def GetVocabulary(
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Any
    ) -> tokenizer_pb2.GetVocabularyResponse:
        """See the proto."""
        return self._served(request.model).vocabulary

    async def Tokenize(  # type: ignore[override]
        self, request: tokenizer_pb2.TokenizeRequest, context: Any
    ) -> tokenizer_pb2.TokenizeResponse | LargeAnswer:
        """See the proto."""
        preparer = self._served(request.model).preparer
        match request.WhichOneof("input"):
            case "conversation":
                prompt = tokenizer_pb2.PrepareRequest(conversation=request.conversation)
            case "text":
                prompt = tokenizer_pb2.PrepareRequest(text=request.text)
            case _:
                raise no_input()
        prompt.truncation = request.truncation
        if request.HasField("add_special_tokens"):
            prompt.add_special_tokens = request.add_special_tokens
        who = self._verify(request) if request.HasField("context") else None
        tenant, salt = (None, b"") if who is None else (who.tenant, who.cache_salt)
        # No context's limit: what is only counted may be longer than what is served.
        length = wire.length_limit(request, context_pb2.RequestContext())
        return wire.tokens(await preparer.encode(prompt, tenant=tenant, length=length, salt=salt))

    async def ValidateOutput(
        self, request: tokenizer_pb2.ValidateOutputRequest, context: Any
    ) -> tokenizer_pb2.ValidateOutputResponse:
        """See the proto."""
        who = self._verify(request)
        preparer = self._served(request.model, who).preparer
        verdicts = await preparer.validate(request.schema_json, list(request.texts), tenant=who.tenant)
        return tokenizer_pb2.ValidateOutputResponse(verdicts=map(verdict_message, verdicts))

    def _verify(
        self,
        request: tokenizer_pb2.PrepareRequest
        | tokenizer_pb2.TokenizeRequest
        | tokenizer_pb2.ValidateOutputRequest,
    ) -> context_pb2.RequestContext:
        if request.HasField("context"):
            return verify(
                request.context,
                self._secret,
                now_unix_ms=round(time.time() * 1000),
                max_age_s=self._max_context_age_s,
            )
        if self._allow_unsigned:
            return context_pb2.RequestContext()
        raise MillraceError(
            Reason.CONTEXT_SIGNATURE_INVALID,
            "there is no signed request context; send requests through the gateway's edge, which signs them, "
            "or set tokenizer.allow_unsigned",
            field="context",
        )

    def _served(self, name: str, who: context_pb2.RequestContext | None = None) -> Served:
        served = self._shelf.find(name)
        allowed = tuple(who.allowed_models) if who is not None else ()
        if allowed and name and name not in allowed and served.model.served_name not in allowed:
            raise MillraceError(
                Reason.MODEL_NOT_ALLOWED,
                f"this key may not use {name!r}; it may use {', '.join(allowed)}",
                field="model",
            )
        return served
