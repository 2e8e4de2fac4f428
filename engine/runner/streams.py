"""Streams as the runner uses them: work runs in order on one, several run side by side, marks order them.

On a GPU they are CUDA's, and nothing here ever blocks the host. On a CPU work runs when it is handed in.
Tests have streams that run late and in the worst order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Work = Callable[[], None]
# Its classes have no types.
_cuda: Any = torch.cuda


class Stream(Protocol):
    """An ordered queue of device work."""

    def run(self, work: Work) -> None:
        """Queues work; what it touches must stay alive until it has run."""

    def record(self) -> Any:
        """A mark that is reached when everything queued so far has run."""

    def wait(self, mark: Any) -> None:
        """Work queued from now on runs after `mark` is reached. None is a mark that was always reached."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The two streams of a runner: where the model computes, and where blocks move to the host and back."""

    compute: Stream
    copy: Stream


class ImmediateStream:
    """Work is done when it is queued."""

    def run(self, work: Work) -> None:
        work()

    def record(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        """Everything queued before has been done."""


class CudaStream:
    """A stream; None is the one that is current where the stream is used: the model's."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    def run(self, work: Work) -> None:
        with _cuda.stream(self._stream):
            work()

    def record(self) -> Any:
        event = _cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            (self._stream or _cuda.current_stream()).wait_event(mark)


def streams_of(device: torch.device) -> Streams:
    """Streams for the device that holds the cache."""
    if device.type == "cuda":
        return Streams(compute=CudaStream(), copy=CudaStream(_cuda.Stream(device)))
    return Streams(compute=ImmediateStream(), copy=ImmediateStream())
