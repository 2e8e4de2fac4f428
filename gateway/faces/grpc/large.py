"""Requests from bytes to messages: small ones as they come; large ones, and what is no message, counted
first, in slices, and one of a tenant at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from millrace.inference.v1 import inference_pb2

from gateway.faces.grpc.servicer import FULL_NAME, InferenceServicer
from gateway.intake.intake import LARGE_BYTES, Intake
from gateway.intake.wire_shape import counted, not_parsed

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server, intake: Intake) -> None:
    """Registers the service like the generated function, with large requests parsed as said above."""
    handlers: dict[str, Any] = {}
    for method in _SERVICE.methods:
        make: Any = grpc.unary_unary_rpc_method_handler
        wrap: Any = _unary
        if method.server_streaming:
            make, wrap = grpc.unary_stream_rpc_method_handler, _streaming
        kind: Any = GetMessageClass(method.input_type)
        handlers[method.name] = make(
            wrap(getattr(servicer, method.name), _Parser(kind, servicer, intake)),
            request_deserializer=_if_small(kind.FromString),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FULL_NAME, handlers),))


class Unparsed:
    """A large message's bytes. gRPC keeps what its deserializer returned until the call has ended, which is
    this, and not the bytes: they are dropped as soon as they are parsed.
    """

    __slots__ = ("_data", "_when_dropped")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._when_dropped: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._data)

    @property
    def data(self) -> bytes:
        """The bytes, until they are dropped."""
        return self._data

    def when_dropped(self, call: Callable[[], None]) -> None:
        """Has `call` called then."""
        self._when_dropped = call

    def drop(self) -> None:
        """Forgets the bytes."""
        self._data = b""
        call, self._when_dropped = self._when_dropped, None
        if call is not None:
            call()


def _if_small(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        if len(data) <= LARGE_BYTES:
            # What is no message is parsed again where the field can be named that is at fault.
            with suppress(DecodeError):
                return parse(data)
        return Unparsed(data)

    return read


class _Parser:
    """Parses large requests of one kind."""

    def __init__(self, kind: Any, servicer: InferenceServicer, intake: Intake) -> None:
        self._kind = kind
        self._servicer = servicer
        self.intake = intake

    def tenant(self, context: Any) -> str:
        """The tenant of the call."""
        return self._servicer.caller(context).identity.tenant

    async def parsed(self, message: Unparsed, tenant: str) -> Any:
        """The message, in the tenant's turn; its bytes are dropped."""
        kind = self._kind
        async with self.intake.exclusive(tenant) as slices:
            try:
                for _ in counted(message.data, kind.DESCRIPTOR, self.intake.limits):
                    await slices.breathe()
                return kind.FromString(message.data)
            except DecodeError as error:
                raise not_parsed(message.data, kind.DESCRIPTOR) from error
            finally:
                message.drop()


def _unary(behavior: Callable[[Any, Any], Awaitable[Any]], parser: _Parser) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        if not isinstance(request, Unparsed):
            return await behavior(request, context)
        tenant = parser.tenant(context)
        with parser.intake.lease(tenant) as hold:
            hold.grow_by_body(len(request))
            return await behavior(await parser.parsed(request, tenant), context)

    return call


def _streaming(
    behavior: Callable[[Any, Any], AsyncIterator[Any]], parser: _Parser
) -> Callable[[Any, Any], Any]:
    async def large(request: Unparsed, context: Any) -> AsyncIterator[Any]:
        tenant = parser.tenant(context)
        with parser.intake.lease(tenant) as hold:
            hold.grow_by_body(len(request))
            async for response in behavior(await parser.parsed(request, tenant), context):
                yield response

    def call(request: Any, context: Any) -> AsyncIterator[Any]:
        # Not in between where it is small: each message would pass one generator more.
        return large(request, context) if isinstance(request, Unparsed) else behavior(request, context)

    return call
