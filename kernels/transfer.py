"""Numbers on their way to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from kernels.host import Device, HostDevice, Values

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@overload
def on_device(array: NDArray[Any], device: torch.device) -> Tensor: ...
@overload
def on_device(array: NDArray[Any], device: Device) -> Values: ...
def on_device(array: NDArray[Any], device: Device) -> Values:
    """A copy of `array` on a GPU without waiting for what it is doing; elsewhere the array itself, as a
    tensor where tensors are.
    """
    if isinstance(device, HostDevice):
        return array
    import torch

    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if not array.size:
        # Nothing can be pinned of nothing.
        return torch.empty_like(tensor, device=device)
    # A copy from pageable memory would wait.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
