"""Arrays in main memory as the native kernels take them, without torch.

What serves a model natively imports no torch (tests/unit/engine/runner/test_apart.py): it holds numpy arrays
where other back ends hold tensors. Functions here take either, so that tests and tools that have torch at
hand can call the same ops.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

# An array, or a tensor in main memory.
Values: TypeAlias = "NDArray[Any] | torch.Tensor"
# Bytes that a vector unit reads at once.
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class HostDevice:
    """Main memory, where arrays are. Where tensors are is a torch.device."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


HOST = HostDevice()
Device: TypeAlias = "HostDevice | torch.device"


def empty(shape: Sequence[int], dtype: Any = np.float32) -> NDArray[Any]:
    """np.empty on a cache line's border. A large one has pages of its own, which cost nothing until they are
    written, and advice to take huge ones: a system without them gives small ones.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    advise_huge_pages(raw.ctypes.data + start, num_bytes)
    found: NDArray[Any] = raw[start : start + num_bytes].view(dtype).reshape(shape)
    return found


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """For what lies between two borders of pages; of less than a huge page nothing is said."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _HUGE_PAGE:
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """madvise(2) for whole pages: whether the system did it. The interpreter's lock is free meanwhile."""
    return int(_madvise()(address, num_bytes, advice)) == 0


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def address_of(values: Values) -> int:
    """Where the first element lies."""
    if isinstance(values, np.ndarray):
        return int(values.ctypes.data)
    return values.data_ptr()


def row_stride(values: Values) -> int:
    """Elements from one row to the next."""
    if isinstance(values, np.ndarray):
        return values.strides[0] // values.itemsize
    return values.stride(0)


def as_array(values: Values) -> NDArray[Any]:
    """The same memory as an array. Raises TypeError for a tensor that is elsewhere."""
    return values if isinstance(values, np.ndarray) else values.numpy()


def on_host(values: Values) -> NDArray[Any] | None:
    """As `as_array`, or None for a tensor that is elsewhere."""
    if isinstance(values, np.ndarray):
        return values
    return values.numpy() if values.device.type == "cpu" else None


# Numbers on their way to the device.

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
