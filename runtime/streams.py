"""Long-lived streams between services: what waits to be written, the client's side, and a peer's silence.

gRPC's asyncio wakes the event loop for every message, so a stream sends few: items that are put within one
iteration of the event loop go into one message. A stream has one writer, which drains its outbox and waits
until the message is accepted. Items that are put meanwhile wait there, so congestion is the outbox's length.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

# The stubs that mypy reads lack it.
from grpc.aio import EOF  # type: ignore[attr-defined]

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from runtime.channels import connect

Item = TypeVar("Item")

# A listener looks so many times within the limit, and counts how often it heard nothing: one that stood still
# itself did not look either, and so blames nobody.
NUM_CHECKS = 8
# How the message of grpc.aio's own status begins, for a call that ended under a write
# (github.com/grpc/grpc/issues/36066).
_WRITE_FAILED = "Internal error from Core"

# More would hold up whoever reads the message, and everybody behind it.
MAX_TOGETHER_BYTES = 256 * 1024
# Few, so that the peer need not wait for the last to begin the first.
MAX_TOGETHER = 8
# Far more than a peer that reads is ever behind.
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 256 * 1024 * 1024


class Silence:
    """Notices that a peer has said nothing for `limit_s` seconds. Use from one event loop."""

    def __init__(self, limit_s: float) -> None:
        self.interval_s = limit_s / NUM_CHECKS
        self.num_silent = 0

    def heard(self) -> None:
        """The peer has said something."""
        self.num_silent = 0

    async def lasts(self) -> str:
        """Returns when the peer counts as dead, with why."""
        self.num_silent = 0
        while True:
            await asyncio.sleep(self.interval_s)
            self.num_silent += 1
            if self.is_dead():
                return f"it said nothing for {self.num_silent * self.interval_s:.3g} s"

    def is_dead(self) -> bool:
        """Asked after every interval of silence."""
        return self.num_silent >= NUM_CHECKS


class OutboxFull(Exception):
    """The peer does not read what is sent to it; the item was not put."""


class Outbox(Generic[Item]):
    """Items for one writer, from one event loop. `size` is an item's bytes on the wire.

    An item beyond MAX_TOGETHER_BYTES goes alone. One item is kept however large it is.
    """

    def __init__(
        self,
        size: Callable[[Item], int],
        *,
        max_together: int | None = MAX_TOGETHER,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._size = size
        self._max_together = max_together
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        # Items by ticket, each with its size in bytes.
        self._items: OrderedDict[int, tuple[int, Item]] = OrderedDict()
        self._last_ticket = 0
        # Bytes of the items that wait.
        self.num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_writing = False
        # Whether nothing more is accepted.
        self.is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_flushed(self) -> bool:
        """Whether the transport has accepted everything."""
        return not self._items and not self._is_writing

    def put(self, item: Item) -> int:
        """Adds an item, which goes in the next iteration of the event loop at the earliest; its ticket.

        Raises OutboxFull.
        """
        size = self._size(item)
        is_over = self.num_bytes + size > self._max_waiting_bytes and bool(self._items)
        if is_over or len(self._items) >= self._max_waiting:
            raise OutboxFull
        self._last_ticket += 1
        self._items[self._last_ticket] = size, item
        self.num_bytes += size
        self._wake()
        return self._last_ticket

    def discard(self, ticket: int) -> bool:
        """Drops an item; False when it was drained already."""
        found = self._items.pop(ticket, None)
        if found is not None:
            self.num_bytes -= found[0]
        return found is not None

    def clear(self) -> None:
        """Drops what waits."""
        self._items.clear()
        self.num_bytes = 0

    def close(self, error: Exception | None = None) -> None:
        """The writer ends when it has drained what waits: well, or with `error`."""
        if not self.is_closed:
            self.is_closed, self._error = True, error
            self._wake()

    async def drain(self) -> list[Item]:
        """Waits for items and removes those that go into one message, once the one before is written. Empty
        when the outbox was closed.
        """
        self._is_writing = False
        while not self._items:
            if self.is_closed:
                if self._error is not None:
                    raise self._error
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_writing = True
        return self._together()

    def _together(self) -> list[Item]:
        drained: list[Item] = []
        num_bytes = 0
        while self._items and len(drained) != self._max_together:
            ticket, (size, item) = next(iter(self._items.items()))
            num_bytes += size
            if drained and num_bytes > MAX_TOGETHER_BYTES:
                break
            self.discard(ticket)
            drained.append(item)
        return drained

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


async def run_stream(
    target: str,
    method: str,
    outbox: Outbox[Item],
    join: Callable[[list[Item]], bytes],
    receive: Callable[[bytes], None],
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    unavailable: Reason,
    silence_limit_s: float = math.inf,
) -> None:
    """One call on a connection of its own, until the peer ends it, or says nothing for `silence_limit_s`.

    `join` makes a message of what goes together; `receive` is given every message and never waits.
    Nothing leaves the outbox before there is a connection. Raises what the peer refused, with `unavailable`
    where it could not be reached or gave the call up, and whatever `join` and `receive` raise.
    """
    # A channel that is kept would wait out its own pause before it tries again.
    async with connect(target) as channel:
        # Bytes both ways: messages are built and read by whom they are for.
        make: Any = channel.stream_stream
        call = make(method)(metadata=metadata)
        silence = Silence(silence_limit_s)
        beside: list[asyncio.Task[None]] = []
        try:
            await call.wait_for_connection()
            beside.append(asyncio.create_task(_write(call, outbox, join)))
            if silence_limit_s < math.inf:
                beside.append(asyncio.create_task(_end_of_silence(silence, unavailable)))
            for each in beside:
                each.add_done_callback(lambda done: _failure(done) and call.cancel())
            while (message := await call.read()) is not EOF:
                silence.heard()
                receive(message)
                # It may be megabytes, and the next one may be far away.
                del message
        except grpc.RpcError as error:
            raise _from_peer(error, unavailable) from error
        except asyncio.CancelledError:
            # The caller's, or of the call alone, by what runs beside it.
            broken, task = next(filter(None, map(_failure, beside)), None), asyncio.current_task()
            if broken is None or (task is not None and task.cancelling()):
                raise
            raise broken from None
        finally:
            for each in beside:
                each.cancel()
            call.cancel()


async def _write(call: Any, outbox: Outbox[Item], join: Callable[[list[Item]], bytes]) -> None:
    while items := await outbox.drain():
        message = join(items)
        del items
        await call.write(message)
        # It may be megabytes, and the next one may be far away.
        del message
    await call.done_writing()


async def _end_of_silence(silence: Silence, unavailable: Reason) -> None:
    raise MillraceError(unavailable, await silence.lasts(), retry_after_s=1.0)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _from_peer(error: grpc.RpcError, unavailable: Reason) -> MillraceError:
    failure = from_rpc_error(error, unavailable=unavailable)
    # Cancelled not by this side: the peer has stopped. And grpc.aio forgets what a peer said where a write is
    # under way at that moment; if it was a refusal, the peer refuses the next attempt again.
    if failure.reason is Reason.CANCELLED or failure.message.startswith(_WRITE_FAILED):
        return MillraceError(unavailable, failure.message, retry_after_s=1.0)
    return failure
