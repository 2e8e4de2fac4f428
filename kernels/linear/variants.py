"""Products as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.linear.formats import (
    FP8_BLOCK,
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
)
from kernels.linear.triton_backend import InvariantLinear, TritonLinear
from kernels.linear.triton_scaled import quantize_rows

INPUTS, OUTPUTS, EXPERTS, GROUP = 4096, 6144, 8, 128
# Rows for tiles of few, some and many; the last compute all parts of K in one program.
ROWS = (5, 100, 1000)


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every format of weight, for layers and for experts; rounding."""
    linear, rows = TritonLinear(), _tensor(2, 14336)
    for name, weight in _weights().items():
        product = linear.pack(weight)
        for count in ROWS:
            yield f"{name}, {count} rows", partial(product, _tensor(count, INPUTS))
        for count in (5, 1000):
            yield f"{name} experts, {count} rows", partial(_experts, [weight] * EXPERTS, count)
    dense = DenseWeight(values=_tensor(OUTPUTS, INPUTS))
    for count in ROWS:
        yield f"experts, {count} rows each", partial(_experts, [dense] * EXPERTS, count * EXPERTS)
    yield "rows to int8", partial(quantize_rows, rows, "int8", factors=_tensor(14336, kind=torch.float32))
    yield "rows to fp8", partial(quantize_rows, rows, "fp8")
    for kind in (torch.bfloat16, torch.float32):
        invariant = InvariantLinear().pack(_tensor(OUTPUTS, INPUTS, kind=kind))
        x = _tensor(5, INPUTS, kind=kind)
        yield f"invariant {str(kind).removeprefix('torch.')}", partial(invariant, x)


def _weights() -> dict[str, WeightFormat]:
    bytes_ = _tensor(OUTPUTS, INPUTS, kind=torch.int8)
    groups, halves = (_tensor(OUTPUTS, INPUTS // size, kind=torch.float32) for size in (GROUP, GROUP // 2))
    blocks = _tensor(OUTPUTS // FP8_BLOCK, INPUTS // FP8_BLOCK, kind=torch.float32)
    packed, fp8 = bytes_[:, ::2].view(torch.uint8).contiguous(), bytes_.view(torch.float8_e4m3fn)
    return {
        "W4A16": Int4Weight(packed=packed, scale=groups),
        "W4A16 by 64 with minima": Int4Weight(packed=packed, scale=halves, minimum=halves),
        "W8A16": Int8Weight(values=bytes_, scale=groups),
        "W8A8": Int8Weight(values=bytes_, scale=groups[:, :1], activations="int8"),
        "fp8": Fp8Weight(values=fp8, scale=groups[:, 0].contiguous()),
        "fp8 128x128": Fp8Weight(values=fp8, scale=blocks),
    }


def _experts(weights: Sequence[WeightFormat], rows: int) -> Tensor:
    """Gate and up of as many rows."""
    experts = TritonLinear().grouped(weights)
    assert experts is not None, "of one format"
    x, choice = _tensor(rows, INPUTS), _tensor(rows, kind=torch.int32)
    return experts(x, experts.group(choice), rows_per_input=1, gate="silu")


def _tensor(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=kind, device="meta")
