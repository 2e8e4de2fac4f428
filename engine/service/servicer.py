"""millrace.engine.v1.EngineService."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from typing import Any

from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.errors import MillraceError, Reason, RequestFailure
from engine.service import convert
from engine.service.dispatcher import Dispatcher, GatewayStream
from engine.service.engine_process import EngineProcess
from engine.service.hand_over import HandOver
from engine.types import FinishReason
from runtime import context as signed_context
from runtime.interceptors import ServicerContext as Context

FULL_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name

_FINISH_OF_CANCEL = {
    engine_pb2.CANCEL_REASON_DEADLINE: FinishReason.DEADLINE,
    engine_pb2.CANCEL_REASON_STOP_STRING: FinishReason.STOP,
}


def _close(dispatcher: Dispatcher, stream: GatewayStream, _: Any) -> None:
    dispatcher.close(stream)


def _end_read(hand_over: HandOver, read: int, ticket: bytes, _: Any) -> None:
    hand_over.end_read(read, ticket)


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Translates between the wire and the engine process; decides nothing itself."""

    def __init__(self, engine: EngineProcess, secret: bytes, max_context_age_s: float) -> None:
        self._engine = engine
        self._secret = secret
        self._max_context_age_s = max_context_age_s

    async def Attach(
        self, request_iterator: AsyncIterator[engine_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """See engine.proto."""
        hello = await self._read_hello(request_iterator)
        info = self._engine.info(accept_fingerprint=hello.vocabulary_fingerprint)
        handler = asyncio.current_task()
        assert handler is not None
        stream = GatewayStream(
            hello.gateway, self._engine.config.max_stream_backlog, handler.cancel, hello.prefix_sample
        )
        dispatcher = self._engine.dispatcher
        stream.welcome(info, convert.to_adapters(self._engine.adapters.known))
        dispatcher.open(stream)
        # The generator may be abandoned in the middle of a write; this runs in any case.
        closing: Any = functools.partial(_close, dispatcher, stream)
        context.add_done_callback(closing)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            dispatcher.close(stream)

    @staticmethod
    async def _read_hello(requests: AsyncIterator[engine_pb2.AttachRequest]) -> engine_pb2.Hello:
        async for first in requests:
            if first.WhichOneof("message") == "hello":
                return first.hello
            break
        raise MillraceError(
            Reason.INVALID_ARGUMENT, "the first message on Attach must be hello", field="hello"
        )

    async def _read(self, stream: GatewayStream, requests: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        """Takes submissions and cancellations until the gateway ends its side."""
        try:
            async for message in requests:
                self._handle_all(stream, message)
                # The next one may be far away.
                del message
        except Exception as error:
            # The stream ends with it, and the interceptor reports the error to the gateway.
            stream.end(error)
        else:
            stream.end()

    def _handle_all(self, stream: GatewayStream, message: engine_pb2.AttachRequest) -> None:
        if not stream.is_open:
            return
        if message.HasField("several"):
            for each in message.several.requests:
                self._handle(stream, each)
        else:
            self._handle(stream, message)

    def _handle(self, stream: GatewayStream, message: engine_pb2.AttachRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(stream, message.submit)
        elif kind == "release":
            self._engine.dispatcher.release(stream, message.release.ticket)
        elif kind == "cancel":
            reason = _FINISH_OF_CANCEL.get(message.cancel.reason, FinishReason.CANCELLED)
            self._engine.dispatcher.cancel(stream, message.cancel.handle, reason)
        else:
            raise MillraceError(
                Reason.INVALID_ARGUMENT, "after hello, only submit, cancel, release and several may follow"
            )

    def _submit(self, stream: GatewayStream, submit: engine_pb2.Submit) -> None:
        dispatcher = self._engine.dispatcher
        if submit.handle in stream.requests:
            raise MillraceError(
                Reason.INVALID_ARGUMENT,
                f"handle {submit.handle} is in use on this stream; handles must be unique",
                field="submit.handle",
            )
        now_unix_ms = time.time_ns() // 1_000_000
        try:
            self._engine.refuse_if_draining()
            context = signed_context.verify(
                submit.context, self._secret, now_unix_ms=now_unix_ms, max_age_s=self._max_context_age_s
            )
            request = convert.to_request(
                submit,
                context,
                self._engine.limits(),
                request_id=dispatcher.next_request_id(),
                now_s=time.monotonic(),
                now_unix_ms=now_unix_ms,
            )
            texts = [(0, request)]
            if request.pooling is not None:
                texts = convert.texts_of(submit, request, dispatcher.next_request_id)
        except MillraceError as error:
            dispatcher.refuse(stream, submit.handle, RequestFailure.of(error))
            return
        for index, text in texts:
            dispatcher.submit(stream, submit.handle, text, submit.entry_id, index)

    async def PullBlocks(
        self, request: engine_pb2.PullBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.PullBlocksResponse]:
        """See engine.proto."""
        hand_over = self._engine.hand_over
        if hand_over is None:
            yield engine_pb2.PullBlocksResponse(refusal=engine_pb2.PULL_REFUSAL_GONE)
            return
        read = hand_over.begin_read()
        # The generator may be abandoned in the middle of a write; this runs in any case.
        ending: Any = functools.partial(_end_read, hand_over, read, request.ticket)
        context.add_done_callback(ending)
        async for message in hand_over.blocks(read, request):
            yield message

    async def CheckInvariants(
        self, request: engine_pb2.CheckInvariantsRequest, context: Context
    ) -> engine_pb2.CheckInvariantsResponse:
        """See engine.proto."""
        checked = await self._engine.check()
        return engine_pb2.CheckInvariantsResponse(
            ok=not checked.violation,
            violation=checked.violation,
            num_unreferenced_blocks=checked.num_unreferenced_blocks,
            num_total_blocks=checked.num_total_blocks,
            num_requests=checked.num_requests,
            num_runner_states=checked.num_runner_states,
        )

    async def CheckAdapter(
        self, request: engine_pb2.CheckAdapterRequest, context: Context
    ) -> engine_pb2.CheckAdapterResponse:
        """See engine.proto."""
        return engine_pb2.CheckAdapterResponse(version=await self._engine.adapters.check(request.path))

    async def AddAdapter(
        self, request: engine_pb2.AddAdapterRequest, context: Context
    ) -> engine_pb2.AddAdapterResponse:
        """See engine.proto."""
        await self._engine.adapters.add(request.name, request.path, request.version, request.generation)
        return engine_pb2.AddAdapterResponse()

    async def RemoveAdapter(
        self, request: engine_pb2.RemoveAdapterRequest, context: Context
    ) -> engine_pb2.RemoveAdapterResponse:
        """See engine.proto."""
        self._engine.adapters.remove(request.name, request.generation)
        return engine_pb2.RemoveAdapterResponse()

    async def ListAdapters(
        self, request: engine_pb2.ListAdaptersRequest, context: Context
    ) -> engine_pb2.ListAdaptersResponse:
        """See engine.proto."""
        adapters = convert.to_adapters(self._engine.adapters.served)
        return engine_pb2.ListAdaptersResponse(adapters=adapters["names"])
