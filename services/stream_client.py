"""The client's side of a long-lived bidirectional call: one task that reads, one that writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

# The stubs that mypy reads lack it.
from grpc.aio import EOF  # type: ignore[attr-defined]

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from services.channels import connect
from services.outbox import Outbox

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
) -> None:
    """One call on a connection of its own, until the peer ends it.

    `join` makes a message of what goes together; `take` is given every message and never waits.
    Nothing leaves the outbox before there is a connection. Raises what the peer refused, with `unavailable`
    where it could not be reached or gave the call up, and whatever `join` and `take` raise.
    """
    # A channel that is kept would wait out its own pause before it tries again.
    async with connect(target) as channel:
        # Bytes both ways: messages are built and read by whom they are for.
        make: Any = channel.stream_stream
        call = make(method)(metadata=metadata)
        writer: asyncio.Task[None] | None = None
        try:
            await call.wait_for_connection()
            writer = asyncio.create_task(_write(call, outbox, join))
            writer.add_done_callback(lambda done: _failure(done) and call.cancel())
            while (message := await call.read()) is not EOF:
                take(message)
        except grpc.RpcError as error:
            raise _from_peer(error, unavailable) from error
        except asyncio.CancelledError:
            # The caller's, or of the call alone, by a writer that failed.
            broken, task = _failure(writer), asyncio.current_task()
            if broken is None or (task is not None and task.cancelling()):
                raise
            raise broken from None
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()


async def _write(call: Any, outbox: Outbox[Item], join: Callable[[list[Item]], bytes]) -> None:
    while items := await outbox.take():
        await call.write(join(items))
    await call.done_writing()


def _failure(writer: asyncio.Task[None] | None) -> BaseException | None:
    if writer is None or not writer.done() or writer.cancelled():
        return None
    return writer.exception()


def _from_peer(error: grpc.RpcError, unavailable: Reason) -> MillraceError:
    failure = from_rpc_error(error, unavailable=unavailable)
    # Cancelled not by this side: the peer has stopped. And grpc.aio forgets what a peer said where a write is
    # under way at that moment; if it was a refusal, the next attempt is told again.
    if failure.reason is Reason.CANCELLED or failure.message.startswith(_WRITE_FAILED):
        return MillraceError(unavailable, failure.message, retry_after_s=1.0)
    return failure
