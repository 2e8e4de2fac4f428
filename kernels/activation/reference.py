"""Gated activations in plain torch. Shape letters: T tokens, I intermediate size.

Exponentials are separate operations on purpose: torch's fused silu and gelu round differently in the vector
body and in the scalar tail of a row, so a value would depend on where in the batch its row lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * _sigmoid(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: bounded inputs, a steeper sigmoid, and one added to the linear half."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * _sigmoid(1.702 * gate) * (up + 1)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
}


def gate(name: str, gate_and_up: Tensor) -> Tensor:
    """act(gate) * up for gate_and_up [T, 2 I], halves side by side; computed in float32."""
    halves = gate_and_up.float().chunk(2, dim=-1)
    return GATES[name](halves[0].contiguous(), halves[1]).to(gate_and_up.dtype)
