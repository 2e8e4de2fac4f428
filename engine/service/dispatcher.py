"""Routes submissions to the core and the core's events back to the gateway that asked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from millrace.engine.v1 import engine_pb2

from contract.proto.engine import kv_event_message, load_fields
from engine.core import messages
from engine.service import convert
from engine.service.convert import Fields
from engine.service.metrics import RequestTrace
from engine.service.neighbours import HeldBlocks, RecentWork, sampled
from engine.types import FinishReason, Request, RequestFailure, SchedulerLoad, TokenEvent
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred
from runtime.streams import MAX_WAITING_BYTES, Outbox, OutboxFull

# Attached gateways: what is on its way to each, and which requests are whose.

_log = logging.getLogger(__name__)

# Requests that have ended, of which the gateway may not have taken the end.
MAX_ENDED = 4096


class GatewayStream:
    """One attached gateway. Messages wait in an outbox; one that grows too long ends the stream."""

    def __init__(
        self, gateway: str, max_backlog: int, on_abandon: Callable[[], object], prefix_sample: int = 1
    ) -> None:
        self.gateway = gateway
        # It hears of one in so many cached blocks.
        self.prefix_sample = max(prefix_sample, 1)
        self._on_abandon = on_abandon
        # Handle chosen by the gateway to request ids, for those that have not ended: one, or one a text.
        self.requests: dict[int, set[int]] = {}
        self.last_sent_s = 0.0
        self.kv_events: list[engine_pb2.KvEvent] = []
        # Sent with the next step.
        self.adapters: Fields | None = None
        # Usage of requests whose gateway is gone, sent with the next message because this gateway may be
        # their heir; and usage of this gateway's own, which others are sent if it goes.
        self.unclaimed: list[Fields] = []
        self.ended: deque[Fields] = deque(maxlen=MAX_ENDED)
        # Under which blocks may be held for another engine; they are for a bounded time.
        self.tickets: deque[bytes] = deque(maxlen=MAX_ENDED)
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

    def welcome(self, info: engine_pb2.EngineInfo, adapters: Fields) -> None:
        """Queues the first message."""
        welcome = engine_pb2.Welcome(info=info, adapters=engine_pb2.Adapters(**adapters))
        self._outbox.put(engine_pb2.AttachResponse(welcome=welcome))

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
        while messages := await self._outbox.drain():
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


# A gateway without news hears of load and cache changes this often, in seconds.
_QUIET_REPORT_S = 0.5
# Block hashes in one message of a snapshot, 8 bytes each.
_SNAPSHOT_HASHES = 16_384


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    request: Request
    stream: GatewayStream
    handle: int
    num_open_choices: int
    # Row of the gateway's ledger.
    entry_id: str = ""
    text_index: int = 0
    # Generated: those of its answers, and those of candidates and beams.
    num_tokens: int = 0
    num_candidates: int = 0
    trace: RequestTrace | None = None


# An event of a request that its trace is told of, and whether the request ended with it.
_Seen: TypeAlias = tuple[OpenRequest, TokenEvent, bool]


class Dispatcher:
    """Knows every stream and every request that has not ended. Lives on the event loop."""

    def __init__(
        self,
        send: Callable[[messages.Command], None],
        telemetry: Telemetry,
        engine_id: str,
        deferred: Deferred,
    ) -> None:
        self._send = send
        self._deferred = deferred
        self._telemetry = telemetry
        self._engine_id = engine_id
        self._recent = RecentWork()
        self.streams: set[GatewayStream] = set()
        self.requests: dict[int, OpenRequest] = {}
        self.draining = False
        self.load: SchedulerLoad | None = None
        self._held = HeldBlocks()
        # Usage of requests whose gateway is gone; one that attaches later may be their heir.
        self._unclaimed: deque[convert.Fields] = deque(maxlen=MAX_ENDED)
        # Set while no request is open.
        self.idle = asyncio.Event()
        self.idle.set()
        self._next_request_id = 1
        self._last_step_id = 0

    def next_request_id(self) -> int:
        """A number for a request, unique in this engine."""
        self._next_request_id += 1
        return self._next_request_id - 1

    def open(self, stream: GatewayStream) -> None:
        """A gateway has attached. The first it hears is the load, and which prefixes are cached."""
        self.streams.add(stream)
        stream.unclaimed += self._unclaimed
        if self.load is None:
            return
        now, batch = time.monotonic(), 0
        for event in sampled(self._held.snapshot(), stream.prefix_sample):
            stream.kv_events.append(kv_event_message(event))
            batch += len(event.block_hashes)
            if batch >= _SNAPSHOT_HASHES:
                stream.put(self._last_step_id, [], None, now)
                batch = 0
        stream.put(self._last_step_id, [], load_fields(self.load, draining=self.draining), now)

    def close(self, stream: GatewayStream) -> None:
        """The stream has ended: its requests are cancelled, its messages dropped. May be called again."""
        if stream in self.streams:
            self.streams.discard(stream)
            self._report_unclaimed(stream.ended)
        stream.end()
        for request_id in list(chain.from_iterable(stream.requests.values())):
            self._send(messages.Cancel(request_id))
        stream.requests.clear()
        for ticket in stream.tickets:
            self._send(messages.Release(ticket))
        stream.tickets.clear()

    def submit(
        self, stream: GatewayStream, handle: int, request: Request, entry_id: str = "", text_index: int = 0
    ) -> None:
        """Hands a validated request to the core; `entry_id` is its row in the gateway's ledger. Texts
        that were submitted together have one handle, and an index each.
        """
        self._send(messages.Submit(request))
        if request.hand_over:
            stream.tickets.append(request.hand_over)
        opened = OpenRequest(request, stream, handle, request.sampling.n, entry_id, text_index)
        self.requests[request.request_id] = opened
        stream.requests.setdefault(handle, set()).add(request.request_id)
        self.idle.clear()

    def refuse(self, stream: GatewayStream, handle: int, failure: RequestFailure) -> None:
        """Answers a submission that never reaches the core."""
        event = TokenEvent(request_id=0, finish_reason=FinishReason.ERROR, failure=failure)
        stream.put(self._last_step_id, [convert.to_output(event, handle)], None, time.monotonic())

    def cancel(self, stream: GatewayStream, handle: int, reason: FinishReason) -> None:
        """Ends a request of this stream; unknown handles belong to requests that have ended."""
        for request_id in sorted(stream.requests.get(handle, ())):
            self._send(messages.Cancel(request_id, reason))

    def release(self, stream: GatewayStream, ticket: bytes) -> None:
        """Lets go what is held under a ticket of this stream; others do not concern it."""
        if ticket in stream.tickets:
            stream.tickets.remove(ticket)
            self._send(messages.Release(ticket))

    def fail_rest(self, failure: RequestFailure) -> int:
        """Has the core end every open request with an error; returns how many."""
        for request_id in self.requests:
            self._send(messages.Fail(request_id, failure))
        return len(self.requests)

    def step_done(self, step: messages.StepDone) -> dict[int, str]:
        """Passes one step's events on: one message per gateway. Tokens do not wait for spans, and most events
        are tokens alone, of which no span tells. The tiers of the step's requests, by their ids.
        """
        now = time.monotonic()
        self.load = step.load
        self._last_step_id = step.step_id
        outputs: dict[GatewayStream, list[convert.Fields]] = {}
        seen: list[_Seen] = []
        tiers: dict[int, str] = {}
        for event in step.events:
            opened = self.requests.get(event.request_id)
            if opened is not None:
                tiers[event.request_id] = opened.request.tier
                ended = self._record(opened, event)
                if ended or event.first_token is not None or event.statistics is not None:
                    seen.append((opened, event, ended))
                output = convert.to_output(event, opened.handle, opened.text_index, opened.request)
                outputs.setdefault(opened.stream, []).append(output)
                if event.failure is not None:
                    # Of texts that were submitted together none is wanted without the others.
                    self.cancel(opened.stream, opened.handle, FinishReason.CANCELLED)
        load = load_fields(step.load, draining=self.draining)
        self._held.apply(step.kv_events)
        kv_events: dict[int, list[engine_pb2.KvEvent]] = {}
        for stream in list(self.streams):
            sample = stream.prefix_sample
            if sample not in kv_events:
                kv_events[sample] = [kv_event_message(event) for event in sampled(step.kv_events, sample)]
            stream.kv_events += kv_events[sample]
            news = outputs.get(stream, [])
            if news or now - stream.last_sent_s > _QUIET_REPORT_S:
                stream.put(step.step_id, news, load, now)
                if not stream.is_open:
                    self.close(stream)
        if seen:
            self._deferred.call(self._trace, seen, now)
        return tiers

    def report_adapters(self, adapters: Fields) -> None:
        """Gateways hear what names of adapters stand for, and what is in memory."""
        now = time.monotonic()
        for stream in list(self.streams):
            stream.adapters = adapters
            stream.put(self._last_step_id, [], None, now)
            if not stream.is_open:
                self.close(stream)

    def beat(self, quiet_s: float) -> None:
        """Says the load again to gateways that have heard nothing for `quiet_s` seconds."""
        now = time.monotonic()
        load = None if self.load is None else load_fields(self.load, draining=self.draining)
        for stream in list(self.streams):
            if now - stream.last_sent_s >= quiet_s:
                stream.put(self._last_step_id, [], load, now)
                if not stream.is_open:
                    self.close(stream)

    def core_lost(self, failure: RequestFailure) -> None:
        """The core is gone: every open request ends here. Gateways learn it from the end of their streams,
        the one sign that they have for any loss of an engine, and continue elsewhere.
        """
        now = time.monotonic()
        # Spans of these requests that wait to be written come before the one of their end.
        self._deferred.flush()
        for opened in list(self.requests.values()):
            event = TokenEvent.of_failure(opened.request, failure)
            self._trace([(opened, event, self._record(opened, event))], now)

    def _record(self, opened: OpenRequest, event: TokenEvent) -> bool:
        """Whether the request has ended with it."""
        opened.num_tokens += len(event.token_ids)
        if event.statistics is not None:
            opened.num_candidates += event.statistics.candidate_tokens
        if event.failure is not None:
            opened.num_open_choices = 0
        elif event.finish_reason is not None:
            opened.num_open_choices -= 1
        ended = opened.num_open_choices == 0
        if ended:
            del self.requests[opened.request.request_id]
            self._leave(opened)
            self._note_computed(opened)
            if not self.requests:
                self.idle.set()
        return ended

    @staticmethod
    def _leave(opened: OpenRequest) -> None:
        together = opened.stream.requests.get(opened.handle, set())
        together.discard(opened.request.request_id)
        if not together:
            opened.stream.requests.pop(opened.handle, None)

    def _note_computed(self, opened: OpenRequest) -> None:
        if not opened.entry_id or opened.request.pooling is not None:
            # Nothing is generated of what is pooled.
            return
        num_tokens = len(opened.request.output_token_ids) + opened.num_tokens + opened.num_candidates
        computed: convert.Fields = {"entry_id": opened.entry_id, "num_tokens": num_tokens}
        if opened.stream in self.streams:
            # Whether its gateway takes that is known when it goes.
            opened.stream.ended.append(computed)
        else:
            self._report_unclaimed([computed])

    def _report_unclaimed(self, computed: Sequence[convert.Fields]) -> None:
        self._unclaimed.extend(computed)
        for stream in self.streams:
            stream.unclaimed += computed

    def _trace(self, seen: Sequence[_Seen], now: float) -> None:
        for opened, event, ended in seen:
            trace = opened.trace
            if trace is None:
                trace = RequestTrace(self._telemetry, opened.request, self._engine_id, self._recent)
                opened.trace = trace
            trace.observe(event, now)
            if ended:
                trace.end(event, now, opened.num_tokens)
