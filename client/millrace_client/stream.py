"""An answer as it comes: iterated, cancelled, and begun again while nothing of it has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio
from millrace.common.v1 import output_pb2
from millrace.inference.v1 import inference_pb2

from millrace_client.errors import closed_early, error_of, is_task_cancelled
from millrace_client.retry import CallDeadline, RetryPolicy

# What a call gives after its last message; grpc-stubs do not know it.
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
AnswerPart = TypeVar("AnswerPart", inference_pb2.ChatResponse, inference_pb2.GenerateResponse)
# Begins the call anew, to end after so many seconds.
BeginCall = Callable[[float | None], "grpc.aio.UnaryStreamCall[Any, Any]"]


class AnswerStream(Generic[AnswerPart]):
    """The messages of one answer, in order.

    Used as an asynchronous context manager it cancels what is still to come when the block is left; the
    engine ends the request then. Errors are MillraceApiErrors. The call begins with the first message that is
    asked for.
    """

    def __init__(self, begin: BeginCall, policy: RetryPolicy, timeout_s: float | None) -> None:
        self._begin, self._policy = begin, policy
        self._deadline = CallDeadline(timeout_s)
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._has_begun = self._is_cancelled = False
        # Of the first message; "" before.
        self.request_id = ""
        # Of the last message.
        self.usage: output_pb2.Usage | None = None

    def __aiter__(self) -> AsyncIterator[AnswerPart]:
        return self

    async def __anext__(self) -> AnswerPart:
        message = await self._read()
        if message is None:
            raise StopAsyncIteration
        self._has_begun = True
        self.request_id = self.request_id or message.request_id
        if message.HasField("usage"):
            self.usage = message.usage
        return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the answer here. Whoever iterates gets no further message, and no error."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def text(self) -> str:
        """The rest of the answer's first choice as one text."""
        return "".join(
            [_text_of(choice) async for part in self for choice in part.choices if not choice.index]
        )

    async def _read(self) -> AnswerPart | None:
        """The next message; None after the last one."""
        num_tried = 0
        while not self._is_cancelled:
            if self._call is None:
                num_tried += 1
                self._call = self._begin(self._deadline.left_s())
            try:
                message: Any = await self._call.read()
            except asyncio.CancelledError:
                was_left = self._is_cancelled
                self.cancel()
                if is_task_cancelled():
                    raise
                if was_left:
                    return None
                raise closed_early() from None
            except grpc.aio.AioRpcError as refused:
                error = error_of(refused)
                left_s = self._deadline.left_s()
                pause_s = None if self._has_begun else self._policy.pause_s(error, num_tried, left_s)
                if pause_s is None:
                    raise error from refused
                self._call = None
                await asyncio.sleep(pause_s)
                continue
            return None if message is _END else message
        return None


def _text_of(choice: inference_pb2.ChatChoice | inference_pb2.GenerateChoice) -> str:
    return choice.content if isinstance(choice, inference_pb2.ChatChoice) else choice.text
