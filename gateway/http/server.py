"""The listening side of the HTTP face."""

from __future__ import annotations

import asyncio
import socket

from gateway.auth.callers import HttpCallers
from gateway.http.connection import Connection, Handler
from services import tls
from services.errors import ConfigError

_BACKLOG = 4096
# What may still be said when the server stops.
_FAREWELL_S = 1.0
_POLL_S = 0.02


class HttpServer:
    """One listening HTTP/1.1 server; `handler` answers every request.

    Idle connections are kept for as long as the peer wants: Envoy keeps its own, and closing one under it
    would race with its next request. Peers that are dead without having said so are found by TCP itself.
    """

    def __init__(
        self, handler: Handler, listen: str, *, max_body_bytes: int, callers: HttpCallers | None = None
    ) -> None:
        """With `callers`, nobody without credentials may send a large body."""
        self._handler = handler
        self._callers = callers
        self._listen = listen
        self._max_body_bytes = max_body_bytes
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds and listens; raises ConfigError when the address cannot be bound."""
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
        self.port = bound.getsockname()[1]
        secure = tls.current()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._handler, self._max_body_bytes, self._connections, self._callers),
            sock=bound,
            backlog=_BACKLOG,
            ssl=secure.server_context() if secure else None,
        )

    async def stop(self) -> None:
        """Stops listening and closes what is idle; what is not has a second to end."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        end_s = asyncio.get_running_loop().time() + _FAREWELL_S
        while self._connections and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_POLL_S)
        for connection in list(self._connections):
            connection.abort()
