"""Where one request's outputs wait to be taken: one reader, any number of writers, no locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from millrace.engine.v1 import engine_pb2

from contract.engines import CancelReason
from contract.outputs import FinishReason
from contract.proto.engine import first_token, logprobs, retention_fields, sampling_fields, statistics
from contract.proto.grammar import grammar_fields
from contract.proto.status import from_detail
from gateway.engines.types import EngineOutput, Submission

# Engine messages to domain types and back. The only place here that knows the wire.

_FINISH = {int(reason): reason for reason in FinishReason}


def hello(gateway: str, fingerprint: str, prefix_sample: int = 1) -> engine_pb2.AttachRequest:
    """First message of a stream."""
    return engine_pb2.AttachRequest(
        hello=engine_pb2.Hello(
            gateway=gateway, vocabulary_fingerprint=fingerprint, prefix_sample=prefix_sample
        )
    )


def submit(handle: int, submission: Submission) -> engine_pb2.AttachRequest:
    """Submission under a handle of this stream."""
    grammar, context = submission.grammar, submission.context
    # Messages inside messages as their fields: protobuf copies a message by writing and reading it.
    fields: Any = {
        "handle": handle,
        "context": {"payload": context.payload, "signature": context.signature},
        "prompt_token_ids": submission.prompt_token_ids,
        "output_token_ids": submission.output_token_ids,
        "sampling": sampling_fields(submission.sampling),
        "grammar": None if grammar is None else grammar_fields(grammar),
        "thinking": None if submission.thinking is None else asdict(submission.thinking),
        "kv": retention_fields(submission.retention),
        "pooling": _pooling(submission),
        "choice_index": submission.choice_index,
        "adapter": submission.adapter,
        "adapter_version": submission.adapter_version,
        "entry_id": submission.entry_id,
        "hand_over": submission.hand_over,
        "confidence_top": submission.confidence_top,
        "source": None
        if submission.source is None
        else dict(zip(("address", "ticket"), submission.source, strict=True)),
    }
    return engine_pb2.AttachRequest(submit=fields)


def _pooling(submission: Submission) -> Any:
    if (asked := submission.pooling) is None:
        return None
    texts = [
        {"index": each.index, "num_tokens": len(each.token_ids), "second_start": each.second_start}
        for each in submission.texts
    ]
    return {"task": asked.task, "dimensions": asked.dimensions, "texts": texts}


def cancel(handle: int, reason: CancelReason) -> engine_pb2.AttachRequest:
    """Cancellation of a handle."""
    return engine_pb2.AttachRequest(
        cancel=engine_pb2.Cancel(handle=handle, reason=engine_pb2.CancelReason.ValueType(reason.value))
    )


def release(ticket: bytes) -> engine_pb2.AttachRequest:
    """What is held under a ticket is wanted by nobody any more."""
    return engine_pb2.AttachRequest(release=engine_pb2.Release(ticket=ticket))


def several(messages: Iterable[engine_pb2.AttachRequest]) -> engine_pb2.AttachRequest:
    """Submissions and cancellations in one message."""
    return engine_pb2.AttachRequest(several=engine_pb2.Several(requests=messages))


def output(message: engine_pb2.RequestOutput) -> EngineOutput:
    """One request's part of a step."""
    result = EngineOutput(message.choice_index, list(message.token_ids))
    if message.withheld_tokens:
        result.withheld_tokens = message.withheld_tokens
        return result
    if message.pooled:
        result.pooled = message.pooled
    if message.logprobs:
        result.logprobs = logprobs(message.logprobs)
    if message.confidences:
        result.confidences = tuple(message.confidences)
    if message.HasField("first_token"):
        result.first_token = first_token(message.first_token)
        result.prompt_logprobs = logprobs(message.prompt_logprobs)
    if message.finish_reason:
        result.finish_reason = _FINISH[message.finish_reason]
        if message.HasField("error"):
            result.error = from_detail(message.error)
        if message.HasField("stop_token_id"):
            result.stop_token_id = message.stop_token_id
        if message.HasField("statistics"):
            result.statistics = statistics(message.statistics)
    return result


Item = TypeVar("Item")

# So few items wait now and then even for a reader who keeps up; they are not counted as a backlog.
_AT_EASE = 64


def _nothing() -> None:
    pass


class Backlog:
    """How much may wait for the readers of one tenant's requests: of each, and of all together.

    What is counted is up to whoever makes it; a log-probability counts as much as a token.
    """

    __slots__ = ("__weakref__", "max_each", "max_together", "num_together")

    def __init__(self, max_each: int, max_together: int) -> None:
        self.max_each = max_each
        self.max_together = max_together
        self.num_together = 0


class Mailbox(Generic[Item]):
    """A queue whose reader takes everything at once: a burst of outputs wakes it once.

    Where a reader does not read, `on_full` is called once, and nothing more is kept but for `put_last`.
    """

    __slots__ = ("_backlog", "_is_full", "_items", "_num_counted", "_waiter", "_weight", "on_full")

    def __init__(self, backlog: Backlog | None = None, weight: int = 1) -> None:
        """`weight` is what an item counts in the backlog; without one, everything is kept."""
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._backlog = backlog
        self._weight = weight
        self._num_counted = 0
        self._is_full = False
        self.on_full: Callable[[], None] = _nothing

    def put(self, item: Item) -> None:
        """Adds an item and wakes the reader."""
        is_counted = len(self._items) >= _AT_EASE or self._is_full
        if is_counted and self._backlog is not None and not self._fits(self._backlog):
            return
        self.put_last(item)

    def put_last(self, item: Item) -> None:
        """Adds an item however much waits."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _fits(self, backlog: Backlog) -> bool:
        if self._is_full:
            return False
        self._num_counted += self._weight
        backlog.num_together += self._weight
        if self._num_counted <= backlog.max_each and backlog.num_together <= backlog.max_together:
            return True
        self._is_full = True
        self._items.clear()
        self._forget()
        self.on_full()
        return False

    def _forget(self) -> None:
        if self._num_counted and self._backlog is not None:
            self._backlog.num_together -= self._num_counted
            self._num_counted = 0

    def close(self) -> None:
        """Nobody reads any more."""
        self._forget()
        self._is_full = True
        # Whoever waits for this holds the mailbox, too.
        self.on_full = _nothing

    async def take(self) -> list[Item]:
        """Everything that has come, oldest first; waits when there is nothing."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items = self._items
        self._items = []
        if self._num_counted:
            self._forget()
        return items
