"""The client's side of a long-lived bidirectional call: one task that reads, one that writes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

# The stubs that mypy reads lack it.
from grpc.aio import EOF  # type: ignore[attr-defined]

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from runtime.channels import connect
from runtime.outbox import Outbox
from runtime.silence import Silence

Item = TypeVar("Item")

# Of grpc.aio's own status for a call that ended under a write (github.com/grpc/grpc/issues/36066).
_WRITE_FAILED = "Internal error from Core"


async def run_stream(
    target: str,
    method: str,
    outbox: Outbox[Item],
    join: Callable[[list[Item]], bytes],
    take: Callable[[bytes], None],
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    unavailable: Reason,
    silence_limit_s: float = math.inf,
) -> None:
    """One call on a connection of its own, until the peer ends it, or says nothing for `silence_limit_s`.

    `join` makes a message of what goes together; `take` is given every message and never waits.
    Nothing leaves the outbox before there is a connection. Raises what the peer refused, with `unavailable`
    where it could not be reached or gave the call up, and whatever `join` and `take` raise.
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
                take(message)
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
    while items := await outbox.take():
        message = join(items)
        del items
        await call.write(message)
        # As with what is read.
        del message
    await call.done_writing()


async def _end_of_silence(silence: Silence, unavailable: Reason) -> None:
    raise MillraceError(unavailable, await silence.lasts(), retry_after_s=1.0)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _from_peer(error: grpc.RpcError, unavailable: Reason) -> MillraceError:
    failure = from_rpc_error(error, unavailable=unavailable)
    # Cancelled not by this side: the peer has stopped. And grpc.aio forgets what a peer said where a write is
    # under way at that moment; if it was a refusal, the next attempt is told again.
    if failure.reason is Reason.CANCELLED or failure.message.startswith(_WRITE_FAILED):
        return MillraceError(unavailable, failure.message, retry_after_s=1.0)
    return failure
