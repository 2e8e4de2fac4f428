"""What every gRPC server of the suite does around a call: domain errors become statuses, traces continue."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status
from opentelemetry import context as otel_context
from opentelemetry import propagate

from services.errors import MillraceError, Reason
from services.status import to_status

_log = logging.getLogger(__name__)

ServicerContext = grpc.aio.ServicerContext


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps MillraceError to a rich status and makes the caller's trace context current in the handler.

    An unexpected exception is logged with its traceback and answered as INTERNAL without details.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            wrapped = _wrap_stream(handler.stream_stream or handler.unary_stream, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrapped = _wrap_unary(handler.stream_unary or handler.unary_unary, method)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _wrap_unary(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: ServicerContext) -> Any:
        token = otel_context.attach(_trace_context(context))
        try:
            result = behavior(request, context)
            return await result if hasattr(result, "__await__") else result
        except MillraceError as error:
            return await abort(context, error)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            _log.exception("unexpected failure in %s", method)
            return await abort(context, _unexpected())
        finally:
            otel_context.detach(token)

    return call


def _wrap_stream(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        token = otel_context.attach(_trace_context(context))
        try:
            async for response in behavior(request, context):
                yield response
        except MillraceError as error:
            await abort(context, error)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            _log.exception("unexpected failure in %s", method)
            await abort(context, _unexpected())
        finally:
            otel_context.detach(token)

    return call


async def abort(context: ServicerContext, error: MillraceError) -> None:
    """Ends the call with the error's rich status. Never returns."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _trace_context(context: ServicerContext) -> otel_context.Context:
    metadata = context.invocation_metadata() or ()
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return propagate.extract(carrier)


def _unexpected() -> MillraceError:
    return MillraceError(
        Reason.INTERNAL, "an unexpected failure; the service's log has the details under this request's id"
    )
