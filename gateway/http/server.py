"""The listening side of the HTTP face: uvicorn in the gateway's own event loop, which serves gRPC as well."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import uvicorn

from gateway.auth.authorizer import HttpCallers
from gateway.config import DEFAULT_SOCKETS, SocketConfig
from gateway.http.application import AsgiApplication
from gateway.http.connection import Connection
from gateway.http.exchange import Handler
from gateway.http.socket_wire import SocketWire
from gateway.http.sockets import SocketRoute, Sockets
from gateway.intake.intake import Intake
from gateway.types.error_form import ErrorForms
from observability.emit.metrics import Metrics
from runtime import tls
from runtime.errors import ConfigError

_BACKLOG = 4096
# How long answers may still be written when the server stops, and how long handlers that are cut off may end.
_FAREWELL_S = 1
# Between two looks at who still writes; uvicorn says nothing when the last one has ended.
_LOOK_S = 0.005
# Idle connections are kept for longer than any peer keeps them: Envoy closes its own after an hour, and one
# closed under it would race with its next request. Peers that are dead without having said so are found by
# TCP itself.
_IDLE_S = 7 * 24 * 3600
# Less than any proxy waits for a byte.
_PING_S = 20.0


class HttpServer:
    """One listening HTTP/1.1 server; `handler` answers every request."""

    def __init__(
        self,
        handler: Handler,
        listen: str,
        *,
        max_body_bytes: int,
        error_forms: ErrorForms,
        callers: HttpCallers | None = None,
        intake: Intake | None = None,
        sockets: Mapping[str, SocketRoute] | None = None,
        socket_config: SocketConfig = DEFAULT_SOCKETS,
        metrics: Metrics | None = None,
        uploads: Mapping[str, int] | None = None,
    ) -> None:
        """With `callers`, nobody without credentials may send a large body; `sockets` by path need them, and
        `metrics`. Paths of `uploads` have limits of their own.
        """
        intake = intake or Intake()
        self._application = AsgiApplication(handler, max_body_bytes, callers, intake, error_forms)
        self._application.uploads = uploads or {}
        if sockets:
            assert callers is not None, "whoever opens a socket is asked who it is"
            assert metrics is not None, "sockets are counted"
            self._application.sockets = Sockets(
                sockets,
                callers=callers,
                intake=intake,
                error_forms=error_forms,
                body_limit=max_body_bytes,
                config=socket_config,
                tell=self._application.tell,
                metrics=metrics,
            )
        self._max_body_bytes = max_body_bytes
        self._connection = partial(Connection, error_forms=error_forms, socket_paths=tuple(sockets or ()))
        self._listen = listen
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds and listens; raises ConfigError when the address cannot be bound."""
        self._socket = bound = self._bind()
        self.port = bound.getsockname()[1]
        secure = tls.current()
        config = uvicorn.Config(
            self._application,
            http=self._connection,  # type: ignore[arg-type]
            ws=SocketWire,
            ws_max_size=self._max_body_bytes,
            # What is small on the wire could become large here.
            ws_per_message_deflate=False,
            # Nobody on the way takes it for dead. A client that is busy with what it was told answers late.
            ws_ping_interval=_PING_S,
            ws_ping_timeout=None,
            lifespan="off",
            interface="asgi3",
            # The edge writes the access log, trusts no forwarded addresses, and adds date and server.
            access_log=False,
            proxy_headers=False,
            date_header=False,
            server_header=False,
            log_config=None,
            # uvicorn warns of what clients send, which is no fault of this process.
            log_level="error",
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            ssl_context_factory=None if secure is None else lambda *_: secure.server_context(),
        )
        config.load()
        # Not `serve`: it takes the process's signals, and polls for what only they would change.
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[bound])

    def _bind(self) -> socket.socket:
        host, _, port = self._listen.rpartition(":")
        host = host.strip("[]")
        try:
            bound = socket.create_server(
                (host, int(port)),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._listen}: {error}; is another instance running?"
            ) from error
        # Accepted sockets inherit it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return bound

    def retire_sockets(self) -> None:
        """Closes each WebSocket as soon as it answers nothing."""
        if self._application.sockets is not None:
            self._application.sockets.retire()

    async def stop(self) -> None:
        """Stops listening and closes what is idle; what is not has a second to end, and one to be cut off."""
        server, self._server = self._server, None
        if server is None or self._socket is None:
            return
        # Not `shutdown`: it waits for a tenth of a second before it looks.
        for listening in server.servers:
            listening.close()
        self._socket.close()
        state = server.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                while state.connections or state.tasks:
                    await asyncio.sleep(_LOOK_S)
        # Handlers end as they do when their clients leave; those that do not look are cancelled.
        for connection in list(state.connections):
            connection.transport.abort()
        if tasks := list(state.tasks):
            _, running = await asyncio.wait(tasks, timeout=_FAREWELL_S)
            for task in running:
                task.cancel()
            if running:
                # They still write their books, which has to be done before ledger and limits close.
                await asyncio.wait(running, timeout=_FAREWELL_S)
