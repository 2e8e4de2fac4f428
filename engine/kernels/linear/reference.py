"""x W^T + b, where each row of the result is bitwise the same whatever other rows there are.

BLAS libraries choose their inner kernel by the number of rows, and different kernels add in different orders.
With the number of rows always a multiple of ROW_MULTIPLE the libraries measured so far (MKL and oneDNN on
x86) stay with one kernel; `choose_linear` proves it at start for the shapes at hand and falls back to tiles
of one fixed size, which are invariant by construction.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

LinearKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
ROW_MULTIPLE = 16
# Numbers of rows that the proof compares: decode batches, and prefill chunks around the libraries' block
# sizes.
PROBED_ROWS = (16, 32, 48, 64, 96, 128, 208, 256, 400, 512)


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in one product. M is a multiple of ROW_MULTIPLE."""
    assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
    return F.linear(x, weight, bias)


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by tiles of ROW_MULTIPLE rows: slower, invariant by construction."""
    assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
    return torch.cat([F.linear(tile, weight, bias) for tile in torch.split(x, ROW_MULTIPLE)])


def choose_linear(weights: Iterable[Tensor]) -> LinearKernel:
    """`padded_linear` when its rows are proven equal over PROBED_ROWS for every distinct shape, else
    `tiled_linear`.
    """
    probed: set[tuple[int, ...]] = set()
    for weight in weights:
        if tuple(weight.shape) in probed:
            continue
        probed.add(tuple(weight.shape))
        if not _rows_are_invariant(weight):
            return tiled_linear
    return padded_linear


def _rows_are_invariant(weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBED_ROWS[-1], weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    expected = F.linear(x, weight)
    first_tile = expected[:ROW_MULTIPLE]
    moved = torch.cat((x[ROW_MULTIPLE:], x[:ROW_MULTIPLE]))
    return torch.equal(F.linear(moved, weight)[-ROW_MULTIPLE:], first_tile) and all(
        torch.equal(F.linear(x[:count], weight), expected[:count]) for count in PROBED_ROWS
    )
