"""act(gate) * up, or act(x), in one pass. Shape letters: T tokens, I intermediate size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kernel's number of each gate of reference.GATES.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3, "relu2": 4, "xielu": 5, "relu": 6}
BLOCK = 1024


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """act(gate) * up, of any shape in float32."""
    if KIND == 0:
        result = gate * _sigmoid(gate) * up
    elif KIND == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(x) = 2 sigmoid(2x) - 1
        result = gate * _sigmoid(2.0 * inner) * up
    elif KIND == 4:
        positive = tl.where(gate < 0.0, 0.0, gate)
        result = positive * positive * up
    elif KIND == 6:
        result = tl.where(gate < 0.0, 0.0, gate) * up
    else:
        # NaN passes a comparison, so that a poisoned row stays one.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    return result


@triton.jit
def _xielu(x, coefficients):
    """See reference; near zero e^x - 1 is summed up, as it would cancel."""
    most = tl.load(coefficients + 3)
    power = tl.where(x > most, most, x)
    near = 1.0 / 24 + power * (1.0 / 120 + power * (1.0 / 720 + power * (1.0 / 5040)))
    near = power * (1.0 + power * (0.5 + power * (1.0 / 6 + power * near)))
    grown = tl.where(power > -0.35, near, tl.exp(power) - 1.0)
    line = tl.load(coefficients + 2) * x
    above = tl.load(coefficients) * x * x + line
    return tl.where(x > 0.0, above, (grown - x) * tl.load(coefficients + 1) + line)


@triton.jit
def gate_kernel(
    gate_and_up, coefficients, out, size, KIND: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    if PLAIN:
        gate = tl.load(gate_and_up + row * size + offset, mask=inside, other=0.0).to(tl.float32)
        up = 1.0
    else:
        gate = tl.load(gate_and_up + row * 2 * size + offset, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_and_up + row * 2 * size + size + offset, mask=inside, other=0.0).to(tl.float32)
    if KIND == 5:
        result = _xielu(gate, coefficients) * up
    else:
        result = gated(gate, up, KIND)
    tl.store(out + row * size + offset, result.to(out.dtype.element_ty), mask=inside)


def gate(
    name: str, gate_and_up: Tensor, *, plain: bool = False, coefficients: Tensor | None = None
) -> Tensor:
    """gate_and_up [T, 2 I], halves side by side, or `plain` rows [T, I] -> [T, I]."""
    rows, size = gate_and_up.shape[0], gate_and_up.shape[1] // (1 if plain else 2)
    assert gate_and_up.is_contiguous(), "halves lie side by side"
    out = torch.empty(rows, size, dtype=gate_and_up.dtype, device=gate_and_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(size, BLOCK))](
            gate_and_up,
            gate_and_up if coefficients is None else coefficients,
            out,
            size,
            KIND=KINDS[name],
            PLAIN=plain,
            BLOCK=BLOCK,
        )
    return out
