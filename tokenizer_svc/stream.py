"""Many Prepare calls on one stream: read as they come, answered as they are ready, in as few messages as that
allows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from millrace.tokenizer.v1 import tokenizer_pb2

from contract.proto.status import to_detail
from services.errors import MillraceError, Reason
from services.streams.server import ServerCall
from tokenizer_svc.wire import Call, LargeAnswer, stream_answer

_log = logging.getLogger(__name__)

# Calls of one stream in work, or whose answers the caller has not taken; reading waits beyond that.
MAX_IN_WORK = 1024
# After so much work of one stream it is the turn of others: what has come already is read without waiting.
_SLICE_S = 0.002

Answer = Callable[[Call], Awaitable[tokenizer_pb2.PrepareResponse | LargeAnswer]]
# The fields of a response, or None where it takes longer than a task for it would.
AnswerAtOnce = Callable[[Call], "dict[str, Any] | None"]
# What is sent; large answers are messages of their own, and serialized.
StreamResponse = tokenizer_pb2.PrepareStreamResponse | bytes


class CallStream:
    """One stream. `answer` prepares one call; what it raises is the call's answer, not the stream's end.

    `at_once` is asked first, and raises nothing.
    """

    def __init__(self, answer: Answer, at_once: AnswerAtOnce = lambda call: None) -> None:
        self._answer = answer
        self._at_once = at_once
        # Messages, or their fields: protobuf copies a message inside a message by writing and reading it.
        self._ready: list[Any] = []
        self._ready_large: deque[tuple[int, LargeAnswer]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        # Something is ready to be sent, or the last call has been answered.
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._has_all = False
        # Takes answers at once, where the stream is one of ours.
        self._direct: ServerCall | None = None
        self._flush_is_due = False

    async def serve(self, requests: AsyncIterator[list[Call]]) -> AsyncGenerator[StreamResponse, None]:
        """Messages with answers; ends when the caller has ended its side and every call is answered."""
        if isinstance(requests, ServerCall):
            self._direct = requests
        reader = asyncio.ensure_future(self._read(requests))
        reader.add_done_callback(self._read_all)
        try:
            while self._is_ready or self._tasks or not reader.done():
                await self._changed.wait()
                self._changed.clear()
                while self._is_ready:
                    yield self._taken()
            reader.result()
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()

    async def _read(self, requests: AsyncIterator[list[Call]]) -> None:
        worked_s = 0.0
        async for calls in requests:
            begin_s = time.monotonic()
            for call in calls:
                fields = self._at_once(call)
                if fields is not None:
                    self._ready.append({"id": call.id, "response": fields})
                    continue
                task = asyncio.ensure_future(self._one(call))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            if self._ready:
                # Those of one message go together.
                self._flush()
                if self._ready:
                    self._changed.set()
            worked_s += time.monotonic() - begin_s
            if worked_s >= _SLICE_S:
                worked_s = 0.0
                await asyncio.sleep(0)
            while len(self._tasks) + len(self._ready) + len(self._ready_large) >= MAX_IN_WORK:
                self._room.clear()
                await self._room.wait()

    async def _one(self, call: Call) -> None:
        answer = await self._answered(call)
        if isinstance(answer, LargeAnswer):
            self._ready_large.append((call.id, answer))
        else:
            self._ready.append(answer)
        if self._direct is not None and not self._flush_is_due:
            # Answers of one turn of the event loop go together.
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _answered(self, call: Call) -> tokenizer_pb2.PrepareAnswer | LargeAnswer:
        try:
            response = await self._answer(call)
            if isinstance(response, LargeAnswer):
                return response
            return tokenizer_pb2.PrepareAnswer(id=call.id, response=response)
        except MillraceError as error:
            return tokenizer_pb2.PrepareAnswer(id=call.id, error=to_detail(error))
        except Exception as error:
            _log.error("unexpected failure in PrepareStream", exc_info=error)
            failure = MillraceError(
                Reason.INTERNAL,
                "an unexpected failure; the service's log has the details under this request's id",
            )
            return tokenizer_pb2.PrepareAnswer(id=call.id, error=to_detail(failure))

    def _flush(self) -> None:
        self._flush_is_due = False
        while self._is_ready and self._direct is not None and not self._direct.is_congested:
            self._direct.send(self._taken())

    @property
    def _is_ready(self) -> bool:
        return bool(self._ready or self._ready_large)

    def _taken(self) -> StreamResponse:
        self._room.set()
        if self._ready:
            answers, self._ready = self._ready, []
            return tokenizer_pb2.PrepareStreamResponse(answers=answers)
        return stream_answer(*self._ready_large.popleft())

    def _read_all(self, reader: asyncio.Task[None]) -> None:
        self._has_all = True
        self._changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._is_ready or self._has_all:
            self._changed.set()
        self._room.set()
