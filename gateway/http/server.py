"""uvicorn inside a process that has more to do: no signal handlers, a socket that is bound before."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from services.errors import ConfigError

# Envoy keeps its connections; closing an idle one under it would race with its next request.
_KEEP_ALIVE_S = 3600
_BACKLOG = 4096


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The process handles signals itself."""
        yield


class HttpServer:
    """One listening HTTP server."""

    def __init__(self, app: Any, listen: str) -> None:
        self._listen = listen
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                # Envoy is the only peer; client addresses are in its log.
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None
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
        self.port = bound.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")

    async def stop(self) -> None:
        """Stops listening and closes what is idle; what is not has a second to end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
