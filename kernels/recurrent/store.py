"""States of one layer, by slot: arrays for the native kernels, tensors for torch. All in float32, because
they sum over the whole context.

Shape letters: N slots, W taps, C channels, H heads of values, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.host import Device, HostDevice, empty

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What one sequence keeps in one layer."""

    taps: int
    channels: int
    # 0 where there is nothing but a convolution.
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def num_bytes(self) -> int:
        """Of one slot."""
        kept = (self.taps - 1) * self.channels + self.num_heads * self.key_dim * self.value_dim
        return kept * np.dtype(np.float32).itemsize


@dataclass(kw_only=True)
class StateCache:
    """Slots of one layer; they hold anything at first, and a sequence begins with zeros all the same."""

    inputs: Any  # [N, W - 1, C] what the convolution took in last, oldest first
    matrix: Any  # [N, H, K, V], or None

    def tensors(self) -> list[Any]:
        """Everything whose first axis is slots; behind one tap there are no inputs."""
        return [part for part in (self.inputs, self.matrix) if part is not None and part.shape[1]]


class NoCache:
    """Of a layer that keeps nothing."""

    def tensors(self) -> list[Any]:
        """None."""
        return []


@dataclass(kw_only=True)
class JointCache:
    """A layer that attends and has a state side by side."""

    keys: Any
    state: StateCache

    def tensors(self) -> list[Any]:
        """Of both."""
        return [*self.keys.tensors(), *self.state.tensors()]


def allocate_states(shape: StateShape, num_slots: int, device: Device) -> StateCache:
    """Room for so many states. Untouched memory costs nothing on a CPU."""

    def make(*sizes: int) -> Any:
        if isinstance(device, HostDevice):
            return empty((num_slots, *sizes))
        return _tensor((num_slots, *sizes), device)

    return StateCache(
        inputs=make(shape.taps - 1, shape.channels),
        matrix=make(shape.num_heads, shape.key_dim, shape.value_dim) if shape.num_heads else None,
    )


def _tensor(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(sizes, dtype=torch.float32, device=device)
