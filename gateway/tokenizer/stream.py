"""Prepare calls of all requests on one long-lived stream: one message for all that come in the same moment.

A call of its own would cost a request more than what the tokenizer service does for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc
from millrace.tokenizer.v1 import tokenizer_pb2

from services.errors import MillraceError, Reason
from services.status import from_detail, from_rpc_error

_log = logging.getLogger(__name__)

# grpc's stubs do not know it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
# The service ends a call at its own time limit; what it has not answered so long after that is given up.
_GRACE_S = 2.0
# Calls in one message: more would save little, and let the service wait for the first and us for the last.
_MAX_TOGETHER = 8


class Unanswered(MillraceError):
    """The stream ended before the call was answered; `was_sent` unless the service was never reached."""

    def __init__(self, failure: MillraceError, *, was_sent: bool) -> None:
        super().__init__(
            failure.reason,
            failure.message,
            field=failure.field,
            metadata=failure.metadata,
            retry_after_s=failure.retry_after_s,
        )
        self.was_sent = was_sent


class PrepareStream:
    """The stream, opened with the first call and again after it broke; calls open on it then fail."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[tokenizer_pb2.PrepareCall] = []
        self._filled = asyncio.Event()
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
        answer: asyncio.Future[Any] = loop.create_future()
        self._open[number] = answer
        self._outbox.append(
            tokenizer_pb2.PrepareCall(
                id=number,
                request=request,
                traceparent=traceparent,
                tracestate=tracestate,
                timeout_s=timeout_s,
            )
        )
        self._filled.set()
        if self._task is None:
            self._task = loop.create_task(self._serve(), name="prepare stream")
        limit = loop.call_later(timeout_s + _GRACE_S, _give_up, answer)
        try:
            result: tokenizer_pb2.PrepareResponse = await answer
            return result
        finally:
            limit.cancel()
            self._open.pop(number, None)

    async def _serve(self) -> None:
        failure = MillraceError(Reason.TOKENIZER_UNAVAILABLE, "it ended the stream", retry_after_s=1.0)
        call = self._stub.PrepareStream()
        writer = asyncio.create_task(self._write(call), name="prepare writer")
        connected = False
        try:
            await call.wait_for_connection()
            connected = True
            await self._read(call)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, unavailable=Reason.TOKENIZER_UNAVAILABLE)
        except Exception:
            # Whatever it is, the next call must find a new stream.
            _log.exception("the stream of the tokenizer service broke")
        finally:
            # Before anything else runs: a call from now on opens a new stream.
            self._task = None
            lost, self._open = self._open, {}
            self._outbox.clear()
            for answer in lost.values():
                _set_failure(answer, Unanswered(failure, was_sent=connected))
            writer.cancel()
            call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outbox:
                calls, self._outbox = self._outbox[:_MAX_TOGETHER], self._outbox[_MAX_TOGETHER:]
                try:
                    await call.write(tokenizer_pb2.PrepareStreamRequest(calls=calls))
                except (grpc.RpcError, asyncio.InvalidStateError):
                    # The reader learns why.
                    return

    async def _read(self, call: Any) -> None:
        read = call.read
        while True:
            message = await read()
            if message is _EOF:
                return
            for each in message.answers:
                answer = self._open.get(each.id)
                if answer is None or answer.done():
                    # Nobody waits for it any more.
                    continue
                if each.HasField("error"):
                    answer.set_exception(from_detail(each.error))
                else:
                    answer.set_result(each.response)


def _set_failure(answer: asyncio.Future[Any], failure: MillraceError) -> None:
    if not answer.done():
        answer.set_exception(failure)


def _give_up(answer: asyncio.Future[Any]) -> None:
    _set_failure(
        answer,
        MillraceError(Reason.DEADLINE_EXCEEDED, "the tokenizer service did not answer within the time limit"),
    )
