"""Attached gateways: what is on its way to each, and which requests are whose."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from millrace.engine.v1 import engine_pb2

from engine.service.convert import Fields
from runtime.outbox import MAX_WAITING_BYTES, Outbox, OutboxFull

_log = logging.getLogger(__name__)

# Requests that have ended, of which the gateway may not have taken the end.
MAX_ENDED = 4096


class GatewayStream:
    """One attached gateway. Messages wait in an outbox; one that grows too long ends the stream."""

    def __init__(self, gateway: str, max_backlog: int, on_abandon: Callable[[], object]) -> None:
        self.gateway = gateway
        self._on_abandon = on_abandon
        # Handle chosen by the gateway to request id, for requests that have not ended.
        self.requests: dict[int, int] = {}
        self.last_sent_s = 0.0
        self.kv_events: list[engine_pb2.KvEvent] = []
        # To be told with the next step.
        self.adapters: Fields | None = None
        # What was computed for gateways that are gone, to be said with the next message; and for this one,
        # which others hear if it goes.
        self.unclaimed: list[Fields] = []
        self.ended: deque[Fields] = deque(maxlen=MAX_ENDED)
        self._max_backlog = max_backlog
        # A step's outputs are one message; steps that end while one is written go together.
        self._outbox: Outbox[engine_pb2.AttachResponse] = Outbox(
            engine_pb2.AttachResponse.ByteSize, max_together=None, max_waiting=max_backlog
        )

    @property
    def is_open(self) -> bool:
        """Whether anything may still be put."""
        return not self._outbox.is_closed

    @property
    def is_flushed(self) -> bool:
        """Whether the transport has taken everything."""
        return self._outbox.is_flushed

    def welcome(self, info: engine_pb2.EngineInfo) -> None:
        """Queues the first message."""
        self._outbox.put(engine_pb2.AttachResponse(welcome=engine_pb2.Welcome(info=info)))

    def put(
        self,
        step_id: int,
        outputs: Sequence[Fields],
        load: Fields | None,
        now: float,
    ) -> None:
        """Queues one step's message, with the cache events that have gathered."""
        if not self.is_open:
            return
        step: Any = {
            "step_id": step_id,
            "outputs": outputs,
            "kv_events": self.kv_events,
            "load": load,
            "unclaimed": self.unclaimed,
        }
        if self.adapters is not None:
            step["adapters"], self.adapters = self.adapters, None
        response = engine_pb2.AttachResponse(outputs=step)
        self.kv_events, self.unclaimed = [], []
        self.last_sent_s = now
        try:
            self._outbox.put(response)
        except OutboxFull:
            _log.warning(
                "gateway %r is more than %d messages (engine.max_stream_backlog) or %d bytes behind: its "
                "stream is ended and its requests are cancelled",
                self.gateway,
                self._max_backlog,
                MAX_WAITING_BYTES,
            )
            self.abandon()

    def abandon(self) -> None:
        """Ends the stream at once; the handler may be stuck in a write that nobody takes."""
        self._outbox.clear()
        self._outbox.close()
        self._on_abandon()

    def end(self, error: Exception | None = None) -> None:
        """No more messages; those in the outbox are still sent, then the stream ends with `error`."""
        self._outbox.close(error)

    async def messages(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        """What to send, until the end; raises the error that the stream ends with."""
        while messages := await self._outbox.take():
            if messages[0].HasField("welcome"):
                yield messages.pop(0)
            if messages:
                yield _joined(messages)


def _joined(steps: list[engine_pb2.AttachResponse]) -> engine_pb2.AttachResponse:
    """The outputs of all of them in their order, as of the last step."""
    first, *others = steps
    into = first.outputs
    for step in others:
        into.step_id = step.outputs.step_id
        into.outputs.extend(step.outputs.outputs)
        into.kv_events.extend(step.outputs.kv_events)
        into.unclaimed.extend(step.outputs.unclaimed)
        if step.outputs.HasField("load"):
            into.load.CopyFrom(step.outputs.load)
        if step.outputs.HasField("adapters"):
            into.adapters.CopyFrom(step.outputs.adapters)
    return first
