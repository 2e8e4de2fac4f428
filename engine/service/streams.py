"""Attached gateways: what is on its way to each, and which requests are whose."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from millrace.engine.v1 import engine_pb2

from engine.service.convert import Fields
from services.errors import MillraceError
from services.streams.server import ServerCall

_log = logging.getLogger(__name__)


class GatewayStream:
    """One attached gateway. Messages wait in an outbox; one that grows too long ends the stream."""

    def __init__(self, gateway: str, max_backlog: int, on_abandon: Callable[[], object]) -> None:
        self.gateway = gateway
        self._on_abandon = on_abandon
        # Handle chosen by the gateway to request id, for requests that have not ended.
        self.requests: dict[int, int] = {}
        self.last_sent_s = 0.0
        self.kv_events: list[engine_pb2.KvEvent] = []
        self._max_backlog = max_backlog
        self._outbox: deque[engine_pb2.AttachResponse] = deque()
        self._wake = asyncio.Event()
        self._error: MillraceError | None = None
        self._closed = False
        # Takes messages at once, where the stream is one of ours.
        self._direct: ServerCall | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything may still be put."""
        return not self._closed

    @property
    def is_flushed(self) -> bool:
        """Whether the transport has taken everything."""
        return not self._outbox and (self._direct is None or not self._direct.is_congested)

    def put(
        self,
        step_id: int,
        outputs: Sequence[Fields],
        load: Fields | None,
        now: float,
    ) -> None:
        """Queues one step's message, with the cache events that have gathered."""
        if self._closed:
            return
        step: Any = {"step_id": step_id, "outputs": outputs, "kv_events": self.kv_events, "load": load}
        response = engine_pb2.AttachResponse(outputs=step)
        self.kv_events = []
        self.last_sent_s = now
        direct = self._direct
        if direct is not None and not self._outbox and not direct.is_congested:
            direct.send(response)
            return
        self._outbox.append(response)
        self._wake.set()
        if len(self._outbox) > self._max_backlog:
            _log.warning(
                "gateway %r is more than %d messages behind (engine.max_stream_backlog): its stream is ended "
                "and its requests are cancelled",
                self.gateway,
                self._max_backlog,
            )
            self.abandon()

    def pass_on(self, call: ServerCall) -> None:
        """Has messages sent as they are put, from now on, unless others wait."""
        self._direct = call

    def abandon(self) -> None:
        """Ends the stream at once; the handler may be stuck in a write that nobody takes."""
        self._closed = True
        self._outbox.clear()
        self._on_abandon()

    def end(self, error: MillraceError | None = None) -> None:
        """No more messages; those in the outbox are still sent, then the stream ends with `error`."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._wake.set()

    async def messages(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        """What to send, until the end; raises the error that the stream ends with."""
        while True:
            while self._outbox:
                # Taken out only when the transport asks for the next one.
                yield self._outbox[0]
                if self._outbox:
                    self._outbox.popleft()
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._wake.clear()
            await self._wake.wait()
