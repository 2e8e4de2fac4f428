"""Activations of feed-forward layers in plain torch. Shape letters: T tokens, I intermediate size.

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


def _relu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.clamp(min=0.0) * up


def _relu2(gate: Tensor, up: Tensor) -> Tensor:
    positive = gate.clamp(min=0.0)
    return positive * positive * up


def _xielu(x: Tensor, coefficients: Tensor) -> Tensor:
    """arXiv 2411.13010; coefficients [4]: of x > 0, of the others, beta, largest exponent."""
    above, below, beta, most = coefficients
    power = torch.minimum(x, most)
    # The beginning of its series near zero, where e^x - 1 would cancel.
    near = torch.full_like(power, 1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        near = near * power + factor
    grown = torch.where(power > -0.35, near * power, torch.exp(power) - 1.0)
    return torch.where(x > 0, above * x * x + beta * x, (grown - x) * below + beta * x)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
    "relu": _relu,
    "relu2": _relu2,
}


def gate(
    name: str, gate_and_up: Tensor, *, plain: bool = False, coefficients: Tensor | None = None
) -> Tensor:
    """act(gate) * up for gate_and_up [T, 2 I], halves side by side, or act(x) of `plain` rows x [T, I];
    computed in float32.
    """
    wide = gate_and_up.float()
    first, second = (wide, torch.ones((), device=wide.device)) if plain else wide.chunk(2, dim=-1)
    if name == "xielu":
        assert coefficients is not None, "they are learned"
        return (_xielu(first, coefficients) * second).to(gate_and_up.dtype)
    return GATES[name](first.contiguous(), second).to(gate_and_up.dtype)
