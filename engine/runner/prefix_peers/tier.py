"""Other engines behind the prefix cache, as the scheduler sees them: a thread moves blocks beside the steps.

Guarantees
- No method waits for another engine.
- A block is written only while its pull is under way, in the order in which it was asked for, and only what
  its checksum says. A block is sent only if it was held from the first to the last byte that was read.
- What fails is counted by its reason, and costs what would be computed anyway.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from hashlib import sha256

import msgspec

from contract.frames import framed, read_frame
from contract.prefix import BlockHash
from engine.config import HandOverConfig
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_peers.books import Blocks, Held, Pulls
from engine.runner.prefix_peers.staging import (
    MOST_BYTES,
    MOST_BYTES_TOGETHER,
    BlockStaging,
    StagedBlocks,
    remove_leftovers,
)
from engine.types.hand_over import (
    BlockSource,
    Checked,
    FromCore,
    HandOverCounters,
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

_log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 16
# Blocks go together up to this size: a message takes a millisecond where processors are busy.
_TOGETHER_BYTES = 1 << 20


class PeerTier:
    """One engine's side of hand-overs. Its methods are called in one thread; the work is done in another."""

    def __init__(
        self,
        connection: socket.socket,
        blocks: Callable[[], BlockBytes],
        form: bytes,
        config: HandOverConfig,
        *,
        role: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connection` leads to the front; `form` (16 bytes) stands for what blocks depend on beside their
        hashes, and `blocks` makes what reads and writes them.
        """
        self.sends, self.receives = role == "prefill", role == "decode"
        self.hold_s = config.hold_s
        self._silence_limit_s = config.silence_limit_s
        self._connection = connection
        self._form = form
        self._clock = clock
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._pulls = Pulls()
        self._held = Held()
        self._counters = HandOverCounters()
        # Memory in common with other engines of this machine: of pulls by token, with `_lock`, and of reads
        # that the thread alone knows.
        self._stagings: dict[int, BlockStaging] = {}
        self._staged: dict[int, StagedBlocks | None] = {}
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        ways = blocks()
        self._block_bytes = ways.num_bytes
        remove_leftovers()
        self._thread = threading.Thread(target=self._serve, args=(ways,), name="hand-over", daemon=True)
        self._thread.start()

    # See engine.kv.BlockPeers.

    def offer(self, ticket: bytes, blocks: Blocks) -> None:
        """The blocks hold these contents until `withdraw`."""
        with self._lock:
            self._held.offer(ticket, blocks)

    def withdraw(self, ticket: bytes) -> None:
        """The blocks may get other content."""
        with self._lock:
            self._held.withdraw(ticket)

    def pull_later(self, token: int, blocks: Blocks, source: BlockSource, limit_s: float) -> None:
        """Begins to pull contents into blocks that nobody reads or writes until `finished` has the token."""
        with self._lock:
            self._pulls.begin(token, blocks, self._clock())
            staging = self._make_staging(token, len(blocks))
        hashes = tuple(block_hash for block_hash, _ in blocks)
        self._send(Pull(token, source, self._form, hashes, limit_s + self._silence_limit_s, staging))

    def _make_staging(self, token: int, num_blocks: int) -> str:
        if sum(each.total_bytes for each in self._stagings.values()) + MOST_BYTES > MOST_BYTES_TOGETHER:
            return ""
        made = BlockStaging.make(num_blocks, self._block_bytes)
        if made is None:
            return ""
        self._stagings[token] = made
        return made.name

    def stop(self, token: int) -> None:
        """Nobody waits for a pull any more; `finished` has its token when nothing is written any more."""
        with self._lock:
            was_under_way = self._pulls.end(token, self._clock())
        if was_under_way:
            self._send(StopPull(token))

    def finished(self) -> list[tuple[int, int]]:
        """Tokens of pulls that have ended since the last call, each with how many first blocks are filled."""
        with self._lock:
            found = self._pulls.finished()
            for token, _ in found:
                # Nobody reads it any more: a pull whose block is being taken has not ended.
                if (staging := self._stagings.pop(token, None)) is not None:
                    staging.close()
            return found

    def counters(self) -> HandOverCounters:
        """What happened since the start."""
        with self._lock:
            counters = self._counters
            counters.num_pulls, counters.pull_s = self._pulls.num_ended, self._pulls.seconds
            counters.num_held_blocks = self._held.num_blocks
            return msgspec.structs.replace(counters, failures=dict(counters.failures))

    def close(self) -> None:
        """Ends the thread."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()
        for staging in self._stagings.values():
            staging.close()

    # The thread.

    def _serve(self, blocks: BlockBytes) -> None:
        with self._connection.makefile("rb") as stream:
            try:
                while (frame := read_frame(stream)) is not None:
                    match self._decoder.decode(frame):
                        case ReadEnded(read):
                            if (staged := self._staged.pop(read, None)) is not None:
                                staged.close()
                        case PulledBlocks(token, first, pulled):
                            for index, (checksum, data) in enumerate(pulled, start=first):
                                self._take(blocks, token, index, checksum, data)
                        case PullEnded(token, reason):
                            self._end(token, reason)
                        case ReadHeld() as asked:
                            self._read(blocks, asked)
            except OSError:
                # The front is gone, and the core ends with it.
                _log.info("the socket for blocks is closed")

    def _take(self, blocks: BlockBytes, token: int, index: int, checksum: bytes, data: bytes) -> None:
        with self._lock:
            found = self._pulls.next_block(token, index)
            if found is None:
                self._counters.num_late += 1
                return
            staging = self._stagings.get(token)
        block_hash, block_id = found
        if staging is not None and data:
            staging.skip(index)
        elif staging is not None:
            data = staging.take(index)
        expected = checksum_of(self._form, block_hash, data)
        is_whole = len(data) == blocks.num_bytes and hmac.compare_digest(checksum, expected)
        if is_whole:
            blocks.write(block_id, data)
        with self._lock:
            self._pulls.written(token, self._clock(), is_whole=is_whole)
            if is_whole:
                self._counters.num_received += 1
                self._counters.received_bytes += len(data)
            else:
                self._counters.failures["checksum"] += 1
        if not is_whole:
            self._send(StopPull(token))

    def _end(self, token: int, reason: str) -> None:
        with self._lock:
            if self._pulls.end(token, self._clock()) and reason:
                self._counters.failures[reason] += 1

    def _read(self, blocks: BlockBytes, asked: ReadHeld) -> None:
        if asked.form != self._form:
            self._send(NotHeld(asked.read, "form"))
            return
        if asked.staging and asked.read not in self._staged:
            self._staged[asked.read] = StagedBlocks.open(asked.staging, blocks.num_bytes)
        staged = self._staged.get(asked.read)
        found: list[Checked] = []
        data: bytes | None = b""
        for index, block_hash in enumerate(asked.hashes, start=asked.first_index):
            data = self._held_bytes(blocks, asked.ticket, block_hash)
            if data is None:
                break
            checksum = checksum_of(self._form, block_hash, data)
            is_there = staged is not None and staged.put(index, data)
            found.append((checksum, b"" if is_there else data))
            if len(found) * len(data) >= _TOGETHER_BYTES:
                self._send(SentBlocks(asked.read, tuple(found), blocks.num_bytes))
                found.clear()
        if found:
            self._send(SentBlocks(asked.read, tuple(found), blocks.num_bytes))
        if data is None:
            self._send(NotHeld(asked.read, "gone"))

    def _held_bytes(self, blocks: BlockBytes, ticket: bytes, block_hash: BlockHash) -> bytes | None:
        """A block's bytes, if it was held from the first to the last of them."""
        with self._lock:
            block_id = self._held.find(ticket, block_hash)
        if block_id is None:
            return None
        data = bytes(blocks.read(block_id))
        with self._lock:
            if self._held.find(ticket, block_hash) != block_id:
                return None
            self._counters.num_sent += 1
            self._counters.sent_bytes += len(data)
        return data

    def _send(self, message: FromCore) -> None:
        with self._sending:
            try:
                self._connection.sendall(framed(msgspec.msgpack.encode(message)))
            except OSError:
                # The front is gone; who serves commands notices.
                _log.info("the socket for blocks is closed")


def checksum_of(form: bytes, block_hash: BlockHash, data: bytes | memoryview) -> bytes:
    """Of a block's bytes, for this form and this content. Processors have instructions for this digest."""
    digest = sha256(form + block_hash)
    digest.update(data)
    return digest.digest()[:_CHECKSUM_BYTES]
