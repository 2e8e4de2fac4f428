"""Activations of feed-forward layers. A back end is chosen once, by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Gate(Protocol):
    """The activations of one back end."""

    def __call__(
        self, name: str, gate_and_up: Tensor, *, plain: bool = False, coefficients: Tensor | None = None
    ) -> Tensor:
        """act(gate) * up for gate_and_up [T, 2 I], halves side by side -> [T, I]; or act(x) of `plain` rows
        x [T, I]. `coefficients` [4] float32 are those of "xielu".
        """


BACKENDS = {
    "torch": "kernels.activation.reference:gate",
    "triton": "kernels.activation.triton_activation:gate",
}
