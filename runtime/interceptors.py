"""What every gRPC server of the suite does around a call: domain errors become statuses, traces continue."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from opentelemetry import context as otel_context
from opentelemetry import propagate

from contract.errors import MillraceError, Reason
from contract.proto.status import to_status

_log = logging.getLogger(__name__)

ServicerContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
# Ends a call with what its handler raised. Never returns.
_Fail: TypeAlias = Callable[[ServicerContext, Exception], Awaitable[None]]
BeforeRefusal: TypeAlias = Callable[[ServicerContext, MillraceError], Awaitable[None]]

# The stubs declare these as generic; at run time they are not.
if TYPE_CHECKING:
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor


class CallInterceptor(ServerInterceptor):
    """Maps MillraceError to a rich status and makes the caller's trace context current in the handler.

    An unexpected exception is logged with its traceback and answered as INTERNAL without details.
    """

    def __init__(self, before_refusal: BeforeRefusal | None = None) -> None:
        """`before_refusal` is waited for before a caller is told a MillraceError."""
        self._before_refusal = before_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is not None:
            method = handler_call_details.method
            handler = _wrapped(handler, method, partial(self._fail, method))
        answer: _Handler = handler
        return answer

    async def _fail(self, method: str, context: ServicerContext, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, MillraceError):
            # Where it was raised, and what led to it, hold what stood there, too.
            forget_traceback(error)
            if self._before_refusal is not None:
                await self._before_refusal(context, error)
            await abort(context, error)
        if isinstance(error, NotImplementedError):
            await abort(
                context, MillraceError(Reason.ROUTE_NOT_FOUND, f"{method} is not implemented by this service")
            )
        _log.error("unexpected failure in %s", method, exc_info=error)
        what = "an unexpected failure; the service's log has the details under this request's id"
        await abort(context, MillraceError(Reason.INTERNAL, what))


def _wrapped(handler: Any, method: str, fail: _Fail) -> Any:
    asks, deserialize = ("stream", _told) if handler.request_streaming else ("unary", _tolerant)
    answers, wrap = ("stream", _wrap_stream) if handler.response_streaming else ("unary", _wrap_unary)
    kind = f"{asks}_{answers}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    call = wrap(getattr(handler, kind), fail)
    return make(call, deserialize(handler.request_deserializer, method), handler.response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Lets malformed bytes reach the handler's wrapper: gRPC itself would answer UNKNOWN and log them."""

    def call(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _malformed(method)

    return call


def _told(deserialize: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any] | None:
    """Raises where the handler reads the stream, which ends with it unless the handler goes on."""
    if deserialize is None:
        return None

    def call(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise _malformed(method) from error

    return call


def _malformed(method: str) -> MillraceError:
    return MillraceError(
        Reason.MALFORMED_BODY,
        f"the bytes of the request are no message that {method} takes; generate the client from proto/",
    )


def _check_whole(request: Any) -> None:
    if isinstance(request, MillraceError):
        raise request


def _wrap_unary(behavior: Callable[..., Any], fail: _Fail) -> Callable[..., Any]:
    async def call(request: Any, context: ServicerContext) -> Any:
        token = otel_context.attach(_trace_context(context))
        try:
            _check_whole(request)
            result = behavior(request, context)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            # An aborted call holds its own end, and all that stands here, until the collector comes by.
            request = None
            return await fail(context, error)
        finally:
            otel_context.detach(token)

    return call


def _wrap_stream(behavior: Callable[..., Any], fail: _Fail) -> Callable[..., Any]:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        token = otel_context.attach(_trace_context(context))
        try:
            _check_whole(request)
            result = behavior(request, context)
            if inspect.isawaitable(result):
                # The other style of handler, which writes through the context itself (health's Watch).
                await result
            else:
                # Closing hands an abandoned call's end to the handler at once, not at garbage collection.
                async with aclosing(result) as responses:
                    async for response in responses:
                        yield response
                        # It may be megabytes, and the next one may be far away.
                        del response
        except GeneratorExit:
            # Closed from outside, perhaps from another task, where the token means nothing. The call's own
            # task, whose context it was, is over.
            raise
        except Exception as error:
            # An aborted call holds what stands here, as in the other wrapper.
            request = None
            otel_context.detach(token)
            await fail(context, error)
        else:
            otel_context.detach(token)

    return call


def forget_traceback(error: BaseException | None) -> None:
    """Drops an error's traceback and causes, because the frames in them refer to the error and to all of the
    request, which would stay until the garbage collector comes by.
    """
    while error is not None:
        # One that was raised from itself, in other words, is its own cause.
        earlier = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = earlier


async def abort(context: ServicerContext, error: MillraceError) -> None:
    """Ends the call with the error's rich status. Never returns."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _trace_context(context: ServicerContext) -> otel_context.Context:
    metadata = context.invocation_metadata() or ()
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return propagate.extract(carrier)
