"""Capturing and replaying device work: CUDA graphs, and what stands for them where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Runs before a capture: kernels are compiled, libraries take their workspaces.
NUM_WARM_UPS = 2


class Recording(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queues the work again, on the same addresses."""


class GraphRecorder(Protocol):
    """Captures work that asks the device for nothing and whose tensors stay where they are."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Runs `work` to warm up, and captures it."""


class CudaGraphRecorder:
    """CUDA graphs that share one memory pool, so the largest should be recorded first. They must not run at
    the same time, and what they leave must lie in tensors from outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        # Captures share memory only on one stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Recording:
        """See GraphRecorder."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads (grammar masks, copies) may go on with theirs.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize(self._device)
        return graph
