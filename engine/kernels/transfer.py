"""Numbers on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `array` on a GPU without waiting for what it is doing; elsewhere the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if not array.size:
        # Nothing can be pinned of nothing.
        return torch.empty_like(tensor, device=device)
    # A copy from pageable memory would wait.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
