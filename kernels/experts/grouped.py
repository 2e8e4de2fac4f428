"""All experts of a layer at once, on devices whose products take rows by the weight that each chose.

Shape letters: T tokens, E hidden size, X experts, A active experts, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.experts.routing import Routing
from kernels.experts.triton_experts import combine, route
from kernels.linear.backends import GroupedProduct


class ExpertsTogether:
    """All experts of a layer in two grouped products, so that the host need not know who chose whom."""

    def __init__(
        self, gate_up: GroupedProduct, down: GroupedProduct, biases: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._biases = biases or (None, None)  # [X * 2 I], [X * E]

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        *,
        correction: Tensor | None,
        activation: str,
        shared: Tensor | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x [T, E], logits [T, X] float32, shared [T, E] (what all tokens pass) -> [T, E]. Shares are
        multiplied by the `scales` [X] of their experts.
        """
        ids, shares = route(logits, routing, correction)
        shares = shares if scales is None else shares * scales[ids]
        groups = self._gate_up.group(ids.flatten())
        gate_bias, down_bias = self._biases
        active = ids.shape[1]
        if routing.weighs_inputs:
            x = (x[:, None] * shares[..., None].to(x.dtype)).flatten(0, 1)
            active, shares = 1, torch.ones_like(shares)
        inner = self._gate_up(x, groups, rows_per_input=active, bias=gate_bias, gate=activation)
        return combine(self._down(inner, groups, rows_per_input=1, bias=down_bias), shares, shared)
