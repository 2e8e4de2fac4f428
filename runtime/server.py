"""Starts and stops a gRPC server the same way everywhere: health, reflection, errors, traces, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime import reflection, tls
from runtime.addresses import with_port
from runtime.channels import SERVER_OPTIONS
from runtime.errors import ConfigError
from runtime.interceptors import BeforeRefusal, CallInterceptor, ServerInterceptor

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# The name under which health says that the process answers, whatever it still waits for: what restarts
# processes asks for it, and what sends them work asks for the server as a whole.
LIVE = "live"
# Begins the names under which a gateway's health says of each version of a model whether it can be asked.
MODEL_HEALTH = "model/"


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's core is: not that a peer was gone when its answer was written, which whoever
    reaches the port could fill the log with.
    """
    failure = record.exc_info[1] if record.exc_info else None
    return type(failure).__name__ != "ExecuteBatchError"


# The writer of a stream is the core's own: no handler or interceptor can catch what it raises.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


def _named_once(*options: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """The last value of each: gRPC's core takes the first of several, without a word."""
    return tuple(dict(options).items())


class GrpcServer:
    """One listening gRPC server with health and reflection.

    Health is NOT_SERVING until `set_serving(True)`, so that a service is not sent work before it is ready.
    Under the name `LIVE` it is SERVING from the start.
    """

    def __init__(
        self,
        listen: str,
        *,
        interceptors: Sequence[ServerInterceptor] = (),
        options: Sequence[tuple[str, int]] = (),
        before_refusal: BeforeRefusal | None = None,
    ) -> None:
        """See CallInterceptor for `before_refusal`."""
        self.listen = listen
        # Known after start().
        self.port = 0
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(before_refusal), *interceptors],
            options=_named_once(*SERVER_OPTIONS, *options),
        )
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = [health.SERVICE_NAME, *reflection.SERVICE_NAMES]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def address(self) -> str:
        """host:port, with the real port where `listen` asks for port 0."""
        return with_port(self.listen, self.port)

    def add(self, register: Callable[[Any, Any], None], servicer: Any, full_name: str) -> None:
        """Registers a servicer with its generated `add_…_to_server` under its full service name."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> None:
        """Binds and listens; raises ConfigError when the address cannot be bound."""
        reflection.add_reflection(self._names, self._server)
        self.port = self._listen()
        await self._server.start()
        await self._health.set(LIVE, _SERVING)
        await self.set_serving(False)

    def _listen(self) -> int:
        try:
            secure = tls.current()
            if secure is None:
                return self._server.add_insecure_port(self.listen)
            return self._server.add_secure_port(self.listen, secure.server_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self.listen}: {error}; is another instance running?"
            ) from error

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server as a whole and of every service on it."""
        status = _SERVING if serving else _NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def set_health(self, name: str, serving: bool) -> None:
        """Sets what health says under a name of its own."""
        await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once and cancels those that still run after `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def wait_for_signal() -> signal.Signals:
    """Returns at the first SIGTERM or SIGINT. A second one ends the process by its default action."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        if not received.done():
            received.set_result(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, receive, each)
    return await received
