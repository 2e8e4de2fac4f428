"""Which back end adds what adapters change where torch multiplies."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.adapters.reference import TorchAdapterStep, TorchChanges
from kernels.selection import Kernels


class AdapterStep(Protocol):
    """The rows of one step, with their adapters."""

    def add(self, changes: TorchChanges, x: Tensor, out: Tensor) -> Tensor:
        """x [T, K], out [T, N] -> out with what the rows' adapters add; perhaps in place."""


def captures_adapters(kernels: Kernels) -> bool:
    """Whether a step's adapters can be captured in a graph: the host is asked for nothing."""
    return kernels.names["linear"] != "torch"


def adapter_step(kernels: Kernels, slots: Tensor, num_slots: int) -> AdapterStep:
    """Of slots [T], negative for the base model; by the back end that multiplies."""
    if not captures_adapters(kernels):
        return TorchAdapterStep(slots)
    from kernels.adapters.triton_adapters import TritonAdapterStep

    return TritonAdapterStep(slots, num_slots)
