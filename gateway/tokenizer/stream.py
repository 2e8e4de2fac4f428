"""Prepare calls of all requests on one long-lived stream: one message for all that come in the same moment.

A call of its own would cost a request more than what the tokenizer service does for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time

from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import from_detail
from gateway.intake.budget import ByteBudget
from runtime.channels import MAX_MESSAGE_BYTES
from runtime.streams import Outbox, OutboxFull, run_stream

_log = logging.getLogger(__name__)

_METHOD = "/millrace.tokenizer.v1.TokenizerService/PrepareStream"
# The service ends a call at its own time limit; what it has not answered so long after that is given up.
_GRACE_S = 2.0
# The service neither parses nor answers larger requests itself, but in workers.
_LARGE_BYTES = 256 * 1024
# Most bytes of a message beside a request and its trace context: numbers, the time limit, tags.
_FRAMING_BYTES = 64
# Fields of the proto that are put together by hand.
_CALLS = tokenizer_pb2.PrepareStreamRequest.CALLS_FIELD_NUMBER
_CALL_REQUEST = tokenizer_pb2.PrepareCall.REQUEST_FIELD_NUMBER


class Unanswered(MillraceError):
    """The stream ended before the call was answered; `was_sent` if the service may have begun it."""

    def __init__(self, failure: MillraceError, *, was_sent: bool) -> None:
        super().__init__(
            failure.reason,
            failure.message,
            field=failure.field,
            metadata=failure.metadata,
            retry_after_s=failure.retry_after_s,
        )
        self.was_sent = was_sent


class PrepareStreams:
    """Small and large requests on streams, and so connections, of their own: nobody waits behind a request of
    megabytes, neither for its way nor for space.
    """

    def __init__(self, target: str, *, silence_limit_s: float = math.inf) -> None:
        self._small = PrepareStream(target, silence_limit_s=silence_limit_s)
        self._large = PrepareStream(target, silence_limit_s=silence_limit_s)

    async def close(self) -> None:
        """Ends both."""
        await asyncio.gather(self._small.close(), self._large.close())

    async def call(
        self,
        wire: bytes,
        traceparent: str,
        tracestate: str,
        timeout_s: float,
        *,
        tenant: str = "",
        field: str = "prompt",
    ) -> tokenizer_pb2.PrepareResponse:
        """See PrepareStream."""
        stream = self._large if len(wire) > _LARGE_BYTES else self._small
        return await stream.call(wire, (traceparent, tracestate), timeout_s, tenant, field)


class PrepareStream:
    """The stream, opened with the first call and again after it broke; calls open on it then fail."""

    def __init__(
        self, target: str, budget: ByteBudget | None = None, *, silence_limit_s: float = math.inf
    ) -> None:
        self._target = target
        self._silence_limit_s = silence_limit_s
        self._budget = budget or ByteBudget()
        self._ids = itertools.count(1)
        # The answers that are waited for, and the tickets of what asks for them.
        self._open: dict[int, tuple[asyncio.Future[tokenizer_pb2.PrepareResponse], int]] = {}
        # The parts of each are a PrepareStreamRequest, and so are those of several in a row.
        self._outbox: Outbox[tuple[bytes, ...]] = Outbox(_num_bytes)
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def call(
        self,
        wire: bytes,
        trace: tuple[str, str],
        timeout_s: float,
        tenant: str,
        field: str = "prompt",
    ) -> tokenizer_pb2.PrepareResponse:
        """The answer to a PrepareRequest in bytes, most of which are `field`'s, below the span (traceparent,
        tracestate).

        Raises what the service refused, TOKENIZER_UNAVAILABLE, DEADLINE_EXCEEDED, and as
        `ByteBudget.acquire` does.
        """
        num_bytes = len(wire)
        if num_bytes + sum(map(len, trace)) + _FRAMING_BYTES > MAX_MESSAGE_BYTES:
            # The service would end the stream, and with it everybody else's calls.
            raise _too_large(field)
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                await self._budget.acquire(tenant, num_bytes)
                try:
                    return await self._answer(wire, trace, timeout_s - (time.monotonic() - begin_s))
                finally:
                    self._budget.release(tenant, num_bytes)
        except TimeoutError as error:
            raise MillraceError(
                Reason.DEADLINE_EXCEEDED, "the tokenizer service did not answer within the time limit"
            ) from error

    async def _answer(
        self, wire: bytes, trace: tuple[str, str], timeout_s: float
    ) -> tokenizer_pb2.PrepareResponse:
        number = next(self._ids)
        ticket = self._put(number, wire, trace, timeout_s)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tokenizer_pb2.PrepareResponse] = loop.create_future()
        self._open[number] = answer, ticket
        if self._task is None:
            self._task = loop.create_task(self._run(), name="prepare stream")
        try:
            return await answer
        finally:
            is_open = self._open.pop(number, None) is not None
            # A call that nobody waits for any more is not sent; one that was sent is taken back.
            if not self._outbox.discard(ticket) and is_open and answer.cancelled():
                self._take_back(number)
            # A refusal knows where it was raised, which is here: it must not be known here as well, or the
            # request would stay until the collector comes by.
            del answer

    def _put(self, number: int, wire: bytes, trace: tuple[str, str], timeout_s: float) -> int:
        head = tokenizer_pb2.PrepareCall(
            id=number,
            traceparent=trace[0],
            tracestate=trace[1],
            # 0 would be no limit.
            timeout_s=max(timeout_s, 0.001),
        )
        # Put together by hand: protobuf copies a message into another by writing and reading it.
        parts = (head.SerializeToString(), _head(_CALL_REQUEST, len(wire)), wire)
        try:
            return self._outbox.put((_head(_CALLS, _num_bytes(parts)), *parts))
        except OutboxFull as error:
            raise MillraceError(
                Reason.TOKENIZER_UNAVAILABLE, "it does not take what is sent to it", retry_after_s=1.0
            ) from error

    def _take_back(self, number: int) -> None:
        """Tells the service that nobody waits for the call any more."""
        call = tokenizer_pb2.PrepareCall(id=number).SerializeToString()
        with contextlib.suppress(OutboxFull):
            self._outbox.put((_head(_CALLS, len(call)), call))

    async def _run(self) -> None:
        failure = MillraceError(Reason.TOKENIZER_UNAVAILABLE, "it ended the stream", retry_after_s=1.0)
        try:
            await run_stream(
                self._target,
                _METHOD,
                self._outbox,
                _joined,
                self._apply,
                unavailable=Reason.TOKENIZER_UNAVAILABLE,
                silence_limit_s=self._silence_limit_s,
            )
        except MillraceError as error:
            failure = error
        except Exception:
            # Whatever it is, the next call must find a new stream.
            _log.exception("the stream of the tokenizer service broke")
        finally:
            self._ended(failure)

    def _apply(self, data: bytes) -> None:
        for each in tokenizer_pb2.PrepareStreamResponse.FromString(data).answers:
            answer, _ = self._open.get(each.id, (None, 0))
            if answer is None or answer.done():
                # Nobody waits for it any more.
                continue
            if each.HasField("error"):
                answer.set_exception(from_detail(each.error))
            else:
                answer.set_result(each.response)

    def _ended(self, failure: MillraceError) -> None:
        self._task = None
        lost, self._open = self._open, {}
        for answer, ticket in lost.values():
            was_sent = not self._outbox.discard(ticket)
            if not answer.done():
                answer.set_exception(Unanswered(failure, was_sent=was_sent))


def _head(number: int, num_bytes: int) -> bytes:
    """What stands before a message of so many bytes that is a field of another."""
    head = bytearray([number << 3 | 2])
    while num_bytes > 127:
        head.append(num_bytes & 127 | 128)
        num_bytes >>= 7
    head.append(num_bytes)
    return bytes(head)


def _num_bytes(parts: tuple[bytes, ...]) -> int:
    return sum(map(len, parts))


def _joined(calls: list[tuple[bytes, ...]]) -> bytes:
    return b"".join(itertools.chain.from_iterable(calls))


def _too_large(field: str) -> MillraceError:
    return MillraceError(
        Reason.REQUEST_TOO_LARGE,
        f"{field}: more than {MAX_MESSAGE_BYTES} bytes on their way to the tokenizer service, tools and "
        "documents included; send less in one request",
        field=field,
    )
