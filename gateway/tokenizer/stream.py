"""Prepare calls of all requests on one long-lived stream: one message for all that come in the same moment.

A call of its own would cost a request more than what the tokenizer service does for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import from_detail
from services.channels import MAX_MESSAGE_BYTES
from services.outbox import Outbox, OutboxFull
from services.stream_client import run_stream

_log = logging.getLogger(__name__)

_METHOD = "/millrace.tokenizer.v1.TokenizerService/PrepareStream"
# The service ends a call at its own time limit; what it has not answered so long after that is given up.
_GRACE_S = 2.0
# The service neither parses nor answers larger requests itself, but in workers.
_LARGE_BYTES = 256 * 1024


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
    megabytes, neither for its way nor for room.
    """

    def __init__(self, target: str) -> None:
        self._small = PrepareStream(target)
        self._large = PrepareStream(target)

    async def close(self) -> None:
        """Ends both."""
        await asyncio.gather(self._small.close(), self._large.close())

    async def call(
        self, request: tokenizer_pb2.PrepareRequest, traceparent: str, tracestate: str, timeout_s: float
    ) -> tokenizer_pb2.PrepareResponse:
        """See PrepareStream."""
        stream = self._large if request.ByteSize() > _LARGE_BYTES else self._small
        return await stream.call(request, traceparent, tracestate, timeout_s)


class PrepareStream:
    """The stream, opened with the first call and again after it broke; calls open on it then fail."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._outbox: Outbox[tokenizer_pb2.PrepareCall] = Outbox(tokenizer_pb2.PrepareCall.ByteSize)
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def call(
        self, request: tokenizer_pb2.PrepareRequest, traceparent: str, tracestate: str, timeout_s: float
    ) -> tokenizer_pb2.PrepareResponse:
        """One answer; raises what the service refused, TOKENIZER_UNAVAILABLE or DEADLINE_EXCEEDED."""
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        call = tokenizer_pb2.PrepareCall(
            id=number, request=request, traceparent=traceparent, tracestate=tracestate, timeout_s=timeout_s
        )
        try:
            self._outbox.put(call)
        except OutboxFull as error:
            raise MillraceError(
                Reason.TOKENIZER_UNAVAILABLE, "it does not take what is sent to it", retry_after_s=1.0
            ) from error
        answer: asyncio.Future[Any] = loop.create_future()
        self._open[number] = answer
        if self._task is None:
            self._task = loop.create_task(self._run(), name="prepare stream")
        limit = loop.call_later(timeout_s + _GRACE_S, _give_up, answer)
        try:
            result: tokenizer_pb2.PrepareResponse = await answer
            return result
        finally:
            limit.cancel()
            self._open.pop(number, None)

    async def _run(self) -> None:
        failure = MillraceError(Reason.TOKENIZER_UNAVAILABLE, "it ended the stream", retry_after_s=1.0)
        try:
            await run_stream(
                self._target,
                _METHOD,
                self._outbox,
                self._joined,
                self._take,
                unavailable=Reason.TOKENIZER_UNAVAILABLE,
            )
        except MillraceError as error:
            failure = error
        except Exception:
            # Whatever it is, the next call must find a new stream.
            _log.exception("the stream of the tokenizer service broke")
        finally:
            self._ended(failure)

    def _joined(self, calls: list[tokenizer_pb2.PrepareCall]) -> bytes | None:
        calls = [call for call in calls if call.id in self._open]
        if not calls:
            # Nobody waits for them any more.
            return None
        message = tokenizer_pb2.PrepareStreamRequest(calls=calls).SerializeToString()
        if len(message) <= MAX_MESSAGE_BYTES:
            return message
        # The service would end the stream, and with it everybody else's calls.
        for call in calls:
            _set_failure(self._open[call.id], _too_large(call.request))
        return None

    def _take(self, data: bytes) -> None:
        for each in tokenizer_pb2.PrepareStreamResponse.FromString(data).answers:
            answer = self._open.get(each.id)
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
        unsent = {call.id for call in self._outbox}
        self._outbox.clear()
        for number, answer in lost.items():
            _set_failure(answer, Unanswered(failure, was_sent=number not in unsent))


def _set_failure(answer: asyncio.Future[Any], failure: MillraceError) -> None:
    if not answer.done():
        answer.set_exception(failure)


def _too_large(request: tokenizer_pb2.PrepareRequest) -> MillraceError:
    field = "messages" if request.HasField("conversation") else "prompt"
    return MillraceError(
        Reason.REQUEST_TOO_LARGE,
        f"{field}: more than {MAX_MESSAGE_BYTES} bytes on their way to the tokenizer service, tools and "
        "documents included; send less in one request",
        field=field,
    )


def _give_up(answer: asyncio.Future[Any]) -> None:
    _set_failure(
        answer,
        MillraceError(Reason.DEADLINE_EXCEEDED, "the tokenizer service did not answer within the time limit"),
    )
