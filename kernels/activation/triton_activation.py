"""act(gate) * up in one pass. Shape letters: T tokens, I intermediate size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kernel's number of each gate of reference.GATES.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
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
    else:
        # NaN passes a comparison, so that a poisoned row stays one.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    return result


@triton.jit
def gate_kernel(gate_and_up, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    gate = tl.load(gate_and_up + row * 2 * size + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * size + size + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + offset, gated(gate, up, KIND).to(out.dtype.element_ty), mask=inside)


def gate(name: str, gate_and_up: Tensor) -> Tensor:
    """gate_and_up [T, 2 I], halves side by side -> [T, I]."""
    rows, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    assert gate_and_up.is_contiguous(), "halves lie side by side"
    out = torch.empty(rows, size, dtype=gate_and_up.dtype, device=gate_and_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(size, BLOCK))](gate_and_up, out, size, KIND=KINDS[name], BLOCK=BLOCK)
    return out
