"""The front's part in hand-overs: it pulls blocks from other engines for its core, and gives them its core's.

Used by EngineProcess and, for PullBlocks, by the servicer. It decides nothing of blocks: what is held, set
apart or damaged the core knows (engine/runner/prefix_peers/DESIGN.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import grpc
import msgspec
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.frames import HEADER_BYTES, framed, message_bytes
from engine.config import HandOverConfig
from engine.core import messages
from engine.types.hand_over import (
    FromCore,
    NotHeld,
    Pull,
    PulledBlocks,
    PullEnded,
    ReadEnded,
    ReadHeld,
    SentBlocks,
    StopPull,
    ToCore,
)
from runtime.channels import connect, trace_metadata

_log = logging.getLogger(__name__)

# Of blocks that are asked of the core at a time: so much is in this process at most, for each other engine.
_AT_A_TIME_BYTES = 4 << 20
# Channels to other engines that are kept.
_MOST_CHANNELS = 64
_REFUSALS = {"gone": engine_pb2.PULL_REFUSAL_GONE, "form": engine_pb2.PULL_REFUSAL_FORM}
_REASONS = {int(refusal): reason for reason, refusal in _REFUSALS.items()}


class HandOver:
    """Blocks between this engine's core and other engines. Lives on the event loop."""

    def __init__(self, config: HandOverConfig, send: Callable[[messages.Command], None]) -> None:
        self._config = config
        self._send = send
        self._writer: asyncio.StreamWriter | None = None
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._pulls: dict[int, asyncio.Task[None]] = {}
        self._reads: dict[int, asyncio.Queue[SentBlocks | NotHeld]] = {}
        self._numbers = count(1)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._listener: asyncio.Task[None] | None = None

    async def start(self, for_blocks: socket.socket) -> None:
        """Takes this side's end of the core's socket for blocks."""
        reader, self._writer = await asyncio.open_connection(sock=for_blocks, limit=_AT_A_TIME_BYTES)
        self._listener = asyncio.create_task(self._listen(reader), name="blocks of the core")

    async def stop(self) -> None:
        """Ends everything that is under way."""
        for task in (*self._pulls.values(), *filter(None, (self._listener,))):
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        for channel in self._channels.values():
            await channel.close(None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = message_bytes(await reader.readexactly(HEADER_BYTES))
                self._take(self._decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            # The core has ended; who listens to its reports says so.
            for queue in self._reads.values():
                queue.put_nowait(NotHeld(0, "gone"))

    def _take(self, message: FromCore) -> None:
        match message:
            case Pull():
                task = asyncio.create_task(self._pull(message), name="pull")
                self._pulls[message.token] = task
                # Also of one that is cancelled before it has begun.
                task.add_done_callback(lambda _: self._pulls.pop(message.token))
            case StopPull(token):
                if token in self._pulls:
                    self._pulls[token].cancel()
            case SentBlocks() | NotHeld():
                queue = self._reads.get(message.read)
                if queue is not None:
                    queue.put_nowait(message)

    async def _tell(self, message: ToCore) -> None:
        """Waits until the core has taken most of what was written."""
        writer = self._write(message)
        # Without a core nobody waits for anything.
        if writer is not None:
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    def _write(self, message: ToCore) -> asyncio.StreamWriter | None:
        if self._writer is None or self._writer.is_closing():
            return None
        self._writer.write(framed(msgspec.msgpack.encode(message)))
        return self._writer

    # Blocks from other engines.

    async def _pull(self, pull: Pull) -> None:
        try:
            async with asyncio.timeout(pull.limit_s):
                reason = await self._pull_all(pull)
        except TimeoutError:
            reason = "slow"
        except Exception:
            # Whatever it is, somebody waits for the end.
            _log.exception("pulling blocks from %s failed", pull.source.address)
            reason = "lost"
        await self._tell(PullEnded(pull.token, reason))

    async def _pull_all(self, pull: Pull) -> str:
        """Passes the blocks to the core as they come; returns why that ended early."""
        stub = engine_pb2_grpc.EngineServiceStub(self._channel(pull.source.address))
        call = stub.PullBlocks(
            engine_pb2.PullBlocksRequest(
                ticket=pull.source.ticket, form=pull.form, block_hashes=pull.hashes, staging=pull.staging
            ),
            metadata=trace_metadata(),
        )
        arriving, num_pulled = aiter(call), 0
        try:
            while True:
                try:
                    message = await _within(anext(arriving), self._config.silence_limit_s)
                except TimeoutError:
                    return "silence"
                if message.WhichOneof("message") != "blocks":
                    return _REASONS.get(message.refusal, "lost")
                blocks = message.blocks
                # As many of the one as of the other, or what is lacking counts as lost.
                checked = tuple(zip(blocks.checksums, blocks.data, strict=False))
                await self._tell(PulledBlocks(pull.token, blocks.first_index, checked))
                num_pulled += len(checked)
        except StopAsyncIteration:
            return "" if num_pulled == len(pull.hashes) else "lost"
        except grpc.aio.AioRpcError:
            return "lost"
        finally:
            # The other engine lets go what it holds as soon as it knows.
            call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or connect(address)
        self._channels[address] = channel
        while len(self._channels) > _MOST_CHANNELS:
            oldest = next(iter(self._channels))
            asyncio.get_running_loop().create_task(_closed(self._channels.pop(oldest)))
        return channel

    # Blocks for other engines.

    def begin_read(self) -> int:
        """A number for what another engine asks for."""
        read = next(self._numbers)
        self._reads[read] = asyncio.Queue()
        return read

    def end_read(self, read: int, ticket: bytes) -> None:
        """The call has ended, in whatever way: what is held under its ticket is let go."""
        del self._reads[read]
        self._send(messages.Release(ticket))
        self._write(ReadEnded(read))

    async def blocks(
        self, read: int, request: engine_pb2.PullBlocksRequest
    ) -> AsyncIterator[engine_pb2.PullBlocksResponse]:
        """What is held under the ticket, as far as it is."""
        queue, hashes = self._reads[read], tuple(request.block_hashes)
        num_sent, num_asked, at_a_time = 0, 0, 1
        while num_sent < len(hashes):
            if num_sent == num_asked:
                num_asked = min(num_sent + at_a_time, len(hashes))
                asked = hashes[num_sent:num_asked]
                await self._tell(
                    ReadHeld(read, request.ticket, request.form, num_sent, asked, request.staging)
                )
            held = await queue.get()
            if isinstance(held, NotHeld):
                yield engine_pb2.PullBlocksResponse(refusal=_REFUSALS[held.reason])
                return
            checksums, data = zip(*held.blocks, strict=True)
            at_a_time = max(1, _AT_A_TIME_BYTES // held.num_bytes)
            blocks = engine_pb2.PulledBlocks(first_index=num_sent, checksums=checksums, data=data)
            num_sent += len(data)
            yield engine_pb2.PullBlocksResponse(blocks=blocks)


async def _within(work: Awaitable[Any], limit_s: float) -> Any:
    async with asyncio.timeout(limit_s):
        return await work


async def _closed(channel: grpc.aio.Channel) -> None:
    await channel.close(None)
