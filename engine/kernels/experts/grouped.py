"""All experts of a layer at once, on devices whose products take rows by the weight that each chose.

Shape letters: T tokens, E hidden size, X experts, A active experts, I intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.activation import Gate
from engine.kernels.linear import GroupedProduct


class ExpertsTogether:
    """All experts of a layer in two grouped products, so that the host need not know who chose whom."""

    def __init__(
        self,
        gate_up: GroupedProduct,
        down: GroupedProduct,
        gate: Gate,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self._biases = biases  # [X, 2 I], [X, E]

    def __call__(self, x: Tensor, ids: Tensor, activation: str) -> Tensor:
        """x [T, E], ids [T, A] -> [T * A, E], each token's experts side by side."""
        flat = ids.flatten()
        groups = self._gate_up.group(flat.int())
        inner = self._gate_up(x, groups, rows_per_input=ids.shape[1])
        if self._biases is not None:
            inner = inner + self._biases[0].index_select(0, flat)
        out = self._down(self._gate(activation, inner), groups, rows_per_input=1)
        return out if self._biases is None else out + self._biases[1].index_select(0, flat)
