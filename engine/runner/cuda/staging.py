"""Host memory on the way to the device and back, and marks in the device's queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Steps that are outstanding at most, and one more whose buffers are being filled.
NUM_BUFFERS = 3


def pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that copies to and from the device need not wait for."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A place in the device's queue; on a CPU, where nothing is queued, it is always reached."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Marks what was queued up to now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Blocks until the device has come past the mark: the only wait of a step."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """Buffers [rows, width] of int64 that steps take in turn; the device's copy stays in one place."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.there = torch.zeros(rows * width, dtype=torch.int64, device=device)
        self._rows = rows
        self._buffers = [pinned(rows * width, dtype=torch.int64, device=device) for _ in range(NUM_BUFFERS)]
        self._arrays: list[NDArray[Any]] = [buffer.numpy() for buffer in self._buffers]
        self._next = 0

    def begin(self, width: int) -> NDArray[np.int64]:
        """An array [rows, width] to fill."""
        self._next = (self._next + 1) % NUM_BUFFERS
        return self._arrays[self._next][: self._rows * width].reshape(self._rows, width)

    def send(self, width: int) -> None:
        """Queues the copy of what was filled to the beginning of `there`."""
        size = self._rows * width
        self.there[:size].copy_(self._buffers[self._next][:size], non_blocking=True)

    def view(self, width: int) -> Tensor:
        """What the device has of a step [rows, width]."""
        return self.there[: self._rows * width].view(self._rows, width)
