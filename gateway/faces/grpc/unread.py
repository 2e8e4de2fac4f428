"""Messages on their way. gRPC's core keeps each whole before anybody can see how large it is, so a call waits
for room before its message is asked for: until then its sender gets no further than the window of a stream.
A large message keeps what it takes of the room until it is parsed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from contract.errors import MillraceError
from gateway.auth.authorizer import TENANT_HEADER
from gateway.config import GatewayConfig
from gateway.faces.grpc.large import Unparsed
from gateway.faces.grpc.servicer import FULL_NAME
from gateway.intake.budget import ByteBudget
from gateway.intake.refusals import Refusals, is_the_callers
from runtime.interceptors import ServerInterceptor, ServicerContext
from runtime.server import GrpcServer

# Windows stay at 64 KB for messages that nobody has asked for: those that grow with what the line can carry
# would let each come whole.
_OPTIONS = (("grpc.http2.bdp_probe", 0),)


def grpc_server(config: GatewayConfig, refusals: Refusals) -> GrpcServer:
    """A server whose unread messages are bounded by tenant and in all, like bodies that are read."""

    async def before_refusal(context: ServicerContext, error: MillraceError) -> None:
        tenant = _tenant(context.invocation_metadata() or ())
        if tenant and is_the_callers(error):
            await refusals.throttle(tenant)

    return GrpcServer(
        config.grpc_listen,
        interceptors=[UnreadMessages(config.max_message_bytes, config.request.max_held_bytes)],
        options=(*_OPTIONS, ("grpc.max_receive_message_length", config.max_message_bytes)),
        before_refusal=before_refusal,
    )


def _tenant(metadata: Any) -> str:
    """Unsigned: it decides behind whom something waits, and nothing else."""
    return next((value for name, value in metadata if name == TENANT_HEADER), "")


class UnreadMessages(ServerInterceptor):
    """Asks for as many messages of a tenant at a time as have room, all being as large as they may be."""

    def __init__(self, max_message_bytes: int, room_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._budget = ByteBudget(max_bytes=room_bytes, max_waiting_bytes=sys.maxsize)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{FULL_NAME}/"):
            return handler
        tenant = _tenant(handler_call_details.invocation_metadata)
        await self._budget.acquire(tenant, self._max_message_bytes)
        return handler._replace(request_deserializer=self._reading(tenant, handler.request_deserializer))

    def _reading(self, tenant: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        num_held = self._max_message_bytes

        def shrink(num_bytes: int) -> None:
            nonlocal num_held
            freed, num_held = num_held - num_bytes, num_bytes
            if freed:
                self._budget.release(tenant, freed)

        def give(_: Any = None) -> None:
            shrink(0)

        def read(data: bytes) -> Any:
            message = parse(data)
            if isinstance(message, Unparsed):
                shrink(len(data))
                message.when_dropped(give)
            else:
                give()
            return message

        # A call may end before its message is there.
        task = asyncio.current_task()
        assert task is not None, "grpc.aio has a task for each call"
        task.add_done_callback(give)
        return read
