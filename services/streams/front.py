"""The public port of a server that has streams: who announces itself as one of our clients is served here,
everybody else is given to gRPC's own server, byte for byte.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from typing import cast

from services import tls
from services.errors import ConfigError
from services.streams import frames
from services.streams.frames import Violation
from services.streams.server import ServerStreams

_BACKLOG = 4096
# Of the first frame; real ones have some tens of bytes.
_MAX_SETTINGS_BYTES = 1024
# A connection that says nothing is not kept.
_FIRST_WORDS_S = 20.0
# What is left for a peer, once the other side has closed.
_LAST_WORDS_S = 10.0


class Front:
    """Listens on `listen` (host:port). gRPC's own server listens on the Unix socket `behind`."""

    def __init__(self, listen: str, streams: ServerStreams) -> None:
        self.port = 0
        self._listen = listen
        self._streams = streams
        self.behind = ""
        self._folder = ""
        self._server: asyncio.Server | None = None
        self._bound: socket.socket | None = None

    def bind(self) -> None:
        """Takes the address, and a place for the socket; raises ConfigError when it cannot be had."""
        host, _, port = self._listen.rpartition(":")
        host = host.strip("[]")
        is_six = ":" in host
        try:
            self._bound = socket.create_server(
                (host, int(port)),
                family=socket.AF_INET6 if is_six else socket.AF_INET,
                backlog=_BACKLOG,
                dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot listen on {self._listen}: {error}; is another instance running?"
            ) from error
        self.port = self._bound.getsockname()[1]
        # Of this process alone: what comes through it has shown its certificate, where one is asked for.
        self._folder = tempfile.mkdtemp(prefix="millrace-")
        self.behind = os.path.join(self._folder, "grpc")

    async def start(self) -> None:
        """Accepts connections."""
        assert self._bound is not None, "bind comes first"
        secure = tls.current()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Newcomer(self._streams, self.behind),
            sock=self._bound,
            backlog=_BACKLOG,
            ssl=secure.server_context("h2") if secure else None,
        )

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing more, and ends the streams."""
        if self._server is not None:
            self._server.close()
        await self._streams.stop(grace_s)

    def close(self) -> None:
        """Gives the socket's folder back."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Newcomer(asyncio.Protocol):
    """A connection that has not said yet what it is."""

    def __init__(self, streams: ServerStreams, behind: str) -> None:
        self._streams = streams
        self._behind = behind
        self._first = bytearray()
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._limit = asyncio.get_running_loop().call_later(_FIRST_WORDS_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._settle()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._first += data
        ours = announces_streams(bytes(self._first))
        if ours is None or self._transport is None:
            return
        self._settle()
        if not ours:
            self._transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._hand_over(self._transport))
            return
        connection = self._streams.connection()
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(bytes(self._first[len(frames.PREFACE) :]))

    def _settle(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    async def _hand_over(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        outside = Relay(transport)
        try:
            _, inside = await loop.create_unix_connection(lambda: Relay(None, outside), self._behind)
        except OSError:
            # The server stops.
            transport.abort()
            return
        if self._transport is None:
            inside.abort()
            return
        transport.set_protocol(outside)
        outside.other = inside
        inside.write(bytes(self._first))
        transport.resume_reading()


class Relay(asyncio.Protocol):
    """One side of a connection that is passed on."""

    def __init__(self, transport: asyncio.Transport | None, other: Relay | None = None) -> None:
        self._transport = transport
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def write(self, data: bytes) -> None:
        """Sends to this side's peer."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Ends this side."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.other is not None:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if self.other is not None and self.other._transport is not None:
            self.other._transport.close()
            # A peer that does not read what is left must not keep the connection.
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.other.abort)
        # Each knowing the other, both would stay until the garbage collector comes by.
        self.other = None

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the other side reads no faster than this one is read from."""
        if self.other is not None and self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self.other is not None and self.other._transport is not None:
            self.other._transport.resume_reading()


def announces_streams(first: bytes) -> bool | None:
    """Whether these first bytes of a connection are a client's of ours; None while that is open."""
    begun = first[: len(frames.PREFACE)]
    if begun != frames.PREFACE[: len(begun)]:
        return False
    rest = first[len(frames.PREFACE) :]
    if len(rest) < frames.HEAD_BYTES:
        return None
    size = int.from_bytes(rest[:3], "big")
    if rest[3] != frames.SETTINGS or size > _MAX_SETTINGS_BYTES:
        return False
    if len(rest) < frames.HEAD_BYTES + size:
        return None
    try:
        values = frames.read_settings(rest[frames.HEAD_BYTES : frames.HEAD_BYTES + size])
    except Violation:
        return False
    return values.get(frames.SPEAKS_STREAMS) == 1
