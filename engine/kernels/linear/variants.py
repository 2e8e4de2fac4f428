"""Products as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.kernels.linear.formats import FP8_BLOCK, DenseWeight, Fp8Weight, Int4Weight, Int8Weight
from engine.kernels.linear.triton_backend import InvariantLinear, TritonLinear
from engine.kernels.linear.triton_linear import quantize_rows

INPUTS, OUTPUTS, EXPERTS, GROUP = 4096, 14336, 8, 128


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every format of weight, for layers and for experts; rounding."""
    x, rows, choice = _tensor(5, INPUTS), _tensor(2, 14336), _tensor(5, kind=torch.int32)
    linear, bytes_ = TritonLinear(), _tensor(OUTPUTS, INPUTS, kind=torch.int8)
    groups = _tensor(OUTPUTS, INPUTS // GROUP, kind=torch.float32)
    blocks = _tensor(OUTPUTS // FP8_BLOCK, INPUTS // FP8_BLOCK, kind=torch.float32)
    packed, fp8 = bytes_[:, ::2].view(torch.uint8).contiguous(), bytes_.view(torch.float8_e4m3fn)
    for name, weight in (
        ("W4A16", Int4Weight(packed=packed, scale=groups)),
        ("W4A16 with minima", Int4Weight(packed=packed, scale=groups, minimum=groups)),
        ("W8A16", Int8Weight(values=bytes_, scale=groups)),
        ("W8A8", Int8Weight(values=bytes_, scale=groups[:, :1], activations="int8")),
        ("fp8", Fp8Weight(values=fp8, scale=groups[:, 0].contiguous())),
        ("fp8 128x128", Fp8Weight(values=fp8, scale=blocks)),
    ):
        yield name, partial(linear.pack(weight), x)
        experts = linear.grouped([weight] * EXPERTS)
        assert experts is not None, "of one format"
        yield f"{name} experts", partial(experts, x, experts.group(choice), rows_per_input=1)
    dense = DenseWeight(values=_tensor(OUTPUTS, INPUTS))
    experts = linear.grouped([dense] * EXPERTS)
    assert experts is not None, "of one format"
    yield "experts", partial(experts, x, experts.group(choice), rows_per_input=1)
    yield "rows to int8", partial(quantize_rows, rows, "int8", factors=_tensor(14336, kind=torch.float32))
    yield "rows to fp8", partial(quantize_rows, rows, "fp8")
    for kind in (torch.bfloat16, torch.float32):
        invariant = InvariantLinear().pack(_tensor(OUTPUTS, INPUTS, kind=kind))
        yield f"invariant {str(kind).removeprefix('torch.')}", partial(invariant, x.to(kind))


def _tensor(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=kind, device="meta")
