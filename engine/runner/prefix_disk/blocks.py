"""The bytes of single blocks and states, out of the cache and into it, beside the steps that compute.

Who asks knows that nobody writes them meanwhile, or throws away what was read. Shape letters: N blocks or
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.types.places import slot_of


class BlockBytes:
    """One thread's way to the blocks of a cache, whose tensors [N, ...] are arrays or torch's; and to the
    `states` of layers that carry one, whose slots have numbers below 0 (engine.types.places).
    """

    def __init__(self, tensors: Sequence[Any], states: Sequence[Any] = ()) -> None:
        self._states = BlockBytes(states) if states else None
        self._rows: list[Any] = [_rows(tensor) for tensor in tensors]
        self._sizes = [int(rows.shape[1]) for rows in self._rows]
        self.num_bytes = sum(self._sizes)
        self._on_device = not all(isinstance(rows, np.ndarray) for rows in self._rows)
        self._staged: NDArray[np.uint8] = np.empty(self.num_bytes, np.uint8)
        self._stream: Any = None
        self._pinned: Any = None

    @property
    def num_state_bytes(self) -> int:
        """Of one slot, in all layers."""
        return 0 if self._states is None else self._states.num_bytes

    def read(self, block_id: int) -> memoryview:
        """The block's bytes, until the next call."""
        if block_id < 0:
            assert self._states is not None, "a slot of a cache without states"
            return self._states.read(slot_of(block_id))
        if self._on_device:
            self._begin()
            self._on_stream(lambda part, rows: part.copy_(rows[block_id], non_blocking=True))
        else:
            for part, rows in self._parts(self._staged):
                part[:] = rows[block_id]
        return self._staged.data

    def write(self, block_id: int, block: bytes | memoryview) -> None:
        """Fills a block."""
        if block_id < 0:
            assert self._states is not None, "a slot of a cache without states"
            self._states.write(slot_of(block_id), block)
            return
        data = np.frombuffer(block, np.uint8)
        if self._on_device:
            self._begin()
            self._staged[:] = data
            self._on_stream(lambda part, rows: rows[block_id].copy_(part, non_blocking=True))
        else:
            for part, rows in self._parts(data):
                rows[block_id] = part

    def _parts(self, block: Any) -> list[tuple[Any, Any]]:
        offsets = np.cumsum([0, *self._sizes]).tolist()
        return [
            (block[first : first + size], rows)
            for first, size, rows in zip(offsets, self._sizes, self._rows, strict=False)
        ]

    def _begin(self) -> None:
        """A stream of this thread, and pinned memory for it, when it is first needed."""
        if self._stream is None:
            import torch

            cuda: Any = torch.cuda
            self._stream = cuda.Stream(self._rows[0].device)
            self._pinned = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
            self._staged = self._pinned.numpy()

    def _on_stream(self, copy: Callable[[Any, Any], object]) -> None:
        """Copies every part, and waits for it; steps go on meanwhile, on streams of theirs."""
        import torch

        cuda: Any = torch.cuda
        with torch.inference_mode(), cuda.stream(self._stream):
            for part, rows in self._parts(self._pinned):
                copy(part, rows)
        self._stream.synchronize()


def _rows(tensor: Any) -> Any:
    """A tensor's blocks as bytes [N, size]; an array where they are in host memory."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(tensor.shape[0], -1).view(np.uint8)
    import torch

    rows = tensor.flatten(1).view(torch.uint8)
    return rows.numpy() if rows.device.type == "cpu" else rows
