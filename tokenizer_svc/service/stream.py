"""Many Prepare calls on one stream: read as they come, answered as they are ready, in as few messages as that
allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import to_detail
from runtime.memory import GiveBack
from runtime.streams import Outbox
from tokenizer_svc.messages.wire import (
    MAX_CALLS,
    MAX_PARSED_BYTES,
    NO_REQUEST,
    LargeAnswer,
    StreamCall,
    TakenBack,
    UnreadableCall,
    WireCall,
    large_answer,
    small_answer,
    stream_response,
)

_log = logging.getLogger(__name__)

# Calls of one stream that are being prepared, or whose answers the caller has not read. Beyond so many no
# call is read.
MAX_IN_WORK = 1024
# Bytes of the same calls: twice what one gateway has under way at most, so that no gateway ever waits for it.
MAX_BYTES_IN_WORK = 64 * 1024 * 1024
# After so much work of one stream the event loop serves others: reading calls that have come already does not
# wait, and so would let nobody else go on.
_SLICE_S = 0.002

Answer = Callable[[WireCall], Awaitable[tokenizer_pb2.PrepareResponse | LargeAnswer]]
# The fields of a response, or None for a call whose preparation takes longer than starting a task for it.
AnswerAtOnce = Callable[[WireCall], "dict[str, Any] | None"]
# The calls of each message of a stream.
Calls = AsyncIterator[list[StreamCall]]
_UNREADABLE = MillraceError(Reason.MALFORMED_BODY, NO_REQUEST)


class CallStream:
    """One stream. `answer` prepares one call; what it raises is the call's answer, not the stream's end.

    `at_once` is asked first, and raises nothing.
    """

    def __init__(
        self, answer: Answer, at_once: AnswerAtOnce = lambda call: None, beat_s: float = math.inf
    ) -> None:
        self._answer = answer
        self._at_once = at_once
        # Interval at which an empty answer shows a caller that waits that this process runs.
        self._beat_s = beat_s
        # Answers, serialized. All of them are ready, so that nobody waits for as many as fit into a message.
        # How many there can be is decided where calls are read.
        self._outbox: Outbox[bytes] = Outbox(
            len, max_together=None, max_waiting=MAX_IN_WORK + MAX_CALLS, max_waiting_bytes=sys.maxsize
        )
        # Bytes of the calls that have no answer yet.
        self._num_bytes = 0
        self._give_back = GiveBack()
        # By the calls' ids.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_capacity = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def serve(self, requests: Calls) -> AsyncGenerator[bytes, None]:
        """PrepareStreamResponses, serialized; ends when the caller has ended its side and every call is
        answered.
        """
        self._reader = asyncio.ensure_future(self._read(requests))
        self._reader.add_done_callback(lambda _: self._close_if_done())
        beating = asyncio.ensure_future(self._beat())
        try:
            while answers := await self._outbox.drain():
                self._has_capacity.set()
                message = stream_response(answers)
                del answers
                yield message
                # It may be megabytes, and the next one may be far away.
                del message
            self._reader.result()
        finally:
            beating.cancel()
            self._reader.cancel()
            for task in self._tasks.values():
                task.cancel()

    async def _read(self, requests: Calls) -> None:
        worked_s = 0.0
        async for calls in requests:
            begin_s = time.monotonic()
            self._begin_all(calls)
            # Calls may be megabytes, and grpc.aio keeps the list until the next message.
            calls.clear()
            worked_s += time.monotonic() - begin_s
            if worked_s >= _SLICE_S:
                worked_s = 0.0
                await asyncio.sleep(0)
            while self._is_full():
                self._has_capacity.clear()
                await self._has_capacity.wait()

    def _begin_all(self, calls: list[StreamCall]) -> None:
        # A loop in `_read` would keep the last call until the next ones come.
        for call in calls:
            self._begin(call)

    def _begin(self, call: StreamCall) -> None:
        if isinstance(call, UnreadableCall):
            self._outbox.put(small_answer(call.id, error=to_detail(_UNREADABLE)))
            return
        if isinstance(call, TakenBack):
            if call.id in self._tasks:
                self._tasks[call.id].cancel()
            return
        fields = self._at_once(call)
        if fields is not None:
            self._outbox.put(small_answer(call.id, response=fields))
            return
        self._num_bytes += call.num_bytes
        task = asyncio.ensure_future(self._one(call))
        self._tasks[call.id] = task
        task.add_done_callback(partial(self._ended, call.id))

    async def _beat(self) -> None:
        while self._beat_s < math.inf:
            await asyncio.sleep(self._beat_s)
            if self._outbox.is_flushed:
                # An answer to nobody.
                self._outbox.put(b"")

    def _is_full(self) -> bool:
        num_in_work = len(self._tasks) + len(self._outbox)
        return num_in_work >= MAX_IN_WORK or self._num_bytes + self._outbox.num_bytes >= MAX_BYTES_IN_WORK

    async def _one(self, call: WireCall) -> None:
        try:
            self._outbox.put(await self._answered(call))
        finally:
            self._num_bytes -= call.num_bytes
            if call.num_bytes > MAX_PARSED_BYTES:
                self._give_back.soon()

    async def _answered(self, call: WireCall) -> bytes:
        try:
            response = await self._answer(call)
            if isinstance(response, LargeAnswer):
                return large_answer(call.id, response)
            return small_answer(call.id, response=response)
        except MillraceError as error:
            return small_answer(call.id, error=to_detail(error))
        except Exception as error:
            _log.error("unexpected failure in PrepareStream", exc_info=error)
            failure = MillraceError(
                Reason.INTERNAL,
                "an unexpected failure; the service's log has the details under this request's id",
            )
            return small_answer(call.id, error=to_detail(failure))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]
        self._has_capacity.set()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self._tasks and self._reader is not None and self._reader.done():
            self._outbox.close()
