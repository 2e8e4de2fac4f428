"""Moves blocks between the device and host memory beside the model's work.

Out: the model's stream gathers blocks into a staging buffer (device memory to device memory, a matter of
microseconds) and goes on, so that the blocks may be overwritten at once; the copy stream then takes it to the
host. In: the copy stream fetches rows into a staging buffer from the launch of the step on, and the
model's stream spreads it over the blocks when it gets there. All blocks of a step move with one gather per
buffer and one copy per run of neighbouring host blocks.

Guarantees
- A block is overwritten only after it was gathered, and read only after it was restored: both happen on the
  model's stream, in the order of the plan.
- A host row is written, read and written again in the order of the plans: there is one copy stream.
- A staging buffer serves again when the stream that used it last is through: streams wait, the host does not.

Shape letters: N blocks of the cache, R host rows, X tensors of the cache, B blocks of a buffer, W words of
four bytes that a block takes in all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.runner.streams import Streams
from kernels.host import on_device
from runtime.errors import ConfigError

Pairs = Sequence[tuple[int, int]]
WORD_BYTES = 4
# Device memory of all staging buffers, and their number: some hold what goes out, some what comes in.
STAGING_BYTES = 64 << 20
NUM_BUFFERS = 4


def staging_bytes(bytes_per_block: int) -> int:
    """Device memory that staging takes: at least a block in each buffer."""
    return NUM_BUFFERS * max(1, STAGING_BYTES // NUM_BUFFERS // bytes_per_block) * bytes_per_block


class HostArena:
    """Rows of bytes [rows, row_bytes] in host memory. Pinned ones are registered with CUDA as a whole, since
    torch's own pinned allocator would round the size up to a power of two.
    """

    def __init__(self, num_rows: int, row_bytes: int, *, pinned: bool) -> None:
        # Its functions have no types.
        self._cuda: Any = torch.cuda
        self.rows = torch.empty(num_rows, row_bytes, dtype=torch.uint8)
        self.pinned = pinned and num_rows > 0
        if self.pinned:
            status = self._cuda.cudart().cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, 0)
            if int(status) != 0:
                self.pinned = False
                raise ConfigError(
                    f"engine.cache.host_bytes: CUDA could not pin {self.rows.nbytes} bytes of host memory "
                    f"(error {int(status)}); lower it, or raise the limit of locked memory (ulimit -l)"
                )

    def close(self) -> None:
        """Unregisters; further calls do nothing."""
        if self.pinned:
            self.pinned = False
            self._cuda.cudart().cudaHostUnregister(self.rows.data_ptr())


@dataclass
class _Buffer:
    """Rows [B, W] on the device; `free` is reached when nothing uses them any more."""

    rows: Tensor
    free: Any = None


class BlockTransfers:
    """Offloads and restores of one cache, whose tensors share their first axis [N, ...]."""

    def __init__(self, tensors: Sequence[Tensor], num_host_blocks: int, streams: Streams) -> None:
        self._streams = streams
        self._pieces = _Pieces(tensors)
        words = self._pieces.row_words
        device = tensors[0].device
        self.arena = HostArena(num_host_blocks, words * WORD_BYTES, pinned=device.type == "cuda")
        self._host = self.arena.rows.view(torch.int32)  # [R, W]
        size = staging_bytes(words * WORD_BYTES) // NUM_BUFFERS // (words * WORD_BYTES)
        self._buffer_blocks = max(1, min(size, num_host_blocks))
        self._buffers = [
            _Buffer(torch.empty(self._buffer_blocks, words, dtype=torch.int32, device=device))
            for _ in range(NUM_BUFFERS)
        ]
        if device.type == "cuda":
            # Compiled now, and not while requests wait; a block that is nobody's yet stays as it is.
            row = self._buffers[0].rows[:1]
            self._pieces.gather([0], row)
            self._pieces.scatter(row, [0])

    def close(self) -> None:
        """Gives host memory back; nothing may be on its way."""
        self.arena.close()

    def apply(self, offloads: Pairs, restores: Pairs) -> None:
        """Queues a plan's offloads (device block, host block), then its restores (host block, device block),
        before whatever the model's stream is given next.
        """
        by_host = sorted(offloads, key=lambda pair: pair[1])
        for first in range(0, len(by_host), self._buffer_blocks):
            self._offload(by_host[first : first + self._buffer_blocks])
        by_host = sorted(restores)
        for first in range(0, len(by_host), self._buffer_blocks):
            self._restore(by_host[first : first + self._buffer_blocks])

    def _offload(self, pairs: Pairs) -> None:
        compute, copy = self._streams.compute, self._streams.copy
        buffer, blocks = self._buffers.pop(0), [device for device, _ in pairs]
        rows, runs = buffer.rows[: len(pairs)], _runs([host for _, host in pairs])
        compute.wait(buffer.free)
        compute.run(lambda: self._pieces.gather(blocks, rows))
        copy.wait(compute.record())

        def out() -> None:
            for first, host, count in runs:
                self._host[host : host + count].copy_(rows[first : first + count], non_blocking=True)

        copy.run(out)
        buffer.free = copy.record()
        self._buffers.append(buffer)

    def _restore(self, pairs: Pairs) -> None:
        compute, copy = self._streams.compute, self._streams.copy
        buffer, blocks = self._buffers.pop(0), [device for _, device in pairs]
        rows, runs = buffer.rows[: len(pairs)], _runs([host for host, _ in pairs])
        copy.wait(buffer.free)

        def fetch() -> None:
            for first, host, count in runs:
                rows[first : first + count].copy_(self._host[host : host + count], non_blocking=True)

        copy.run(fetch)
        compute.wait(copy.record())
        compute.run(lambda: self._pieces.scatter(rows, blocks))
        buffer.free = compute.record()
        self._buffers.append(buffer)


class _Pieces:
    """The parts of a row: one per tensor of the cache, each block as words [N, its size]."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words = [
            tensor.view(torch.uint8).flatten(1).view(torch.int32)
            if tensor.element_size() < WORD_BYTES
            else tensor.flatten(1).view(torch.int32)
            for tensor in tensors
        ]
        sizes = [words.shape[1] for words in self._words]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self.row_words = sum(sizes)
        self._device = tensors[0].device
        if self._device.type == "cuda":
            addresses = [words.data_ptr() for words in self._words]
            self._table = torch.tensor([addresses, self._offsets, sizes], device=self._device)
            self._largest = max(sizes)

    def gather(self, blocks: list[int], rows: Tensor) -> None:
        """Blocks [B] of every tensor into rows [B, W]."""
        if self._device.type == "cuda":
            self._launch(blocks, rows, out=True)
            return
        index = torch.tensor(blocks)
        for words, offset in zip(self._words, self._offsets, strict=True):
            rows[:, offset : offset + words.shape[1]] = words[index]

    def scatter(self, rows: Tensor, blocks: list[int]) -> None:
        """Rows [B, W] into blocks [B] of every tensor."""
        if self._device.type == "cuda":
            self._launch(blocks, rows, out=False)
            return
        index = torch.tensor(blocks)
        for words, offset in zip(self._words, self._offsets, strict=True):
            words[index] = rows[:, offset : offset + words.shape[1]]

    def _launch(self, blocks: list[int], rows: Tensor, *, out: bool) -> None:
        from kernels.paged_cache.triton_blocks import move_blocks

        index = on_device(np.array(blocks, np.int64), self._device)
        bases, offsets, sizes = self._table.unbind()
        move_blocks(bases, offsets, sizes, index, rows, largest=self._largest, out=out)


def _runs(hosts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index in `hosts`, first host block, number) of each run of consecutive host blocks."""
    runs: list[tuple[int, int, int]] = []
    for first, host in enumerate(hosts):
        if runs and runs[-1][1] + runs[-1][2] == host:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((first, host, 1))
    return runs
