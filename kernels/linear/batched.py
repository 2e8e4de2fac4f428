"""Batched matrix products whose rows depend neither on the number of rows nor on the size of the batch.

As for plain products (see reference.py), libraries keep to one kernel while the rows are a multiple of
ROW_MULTIPLE, and that is proven for each inner shape when it is first used; otherwise each 16 rows are a
product of their own.

Shape letters: B batch, M rows, K inner size, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.rows import ROW_MULTIPLE

PROBED_SHAPES = ((1, 16), (2, 16), (7, 32), (33, 16), (3, 64), (1, 128), (2, 256), (65, 16))

_proven: dict[tuple[int, int, torch.dtype, torch.device, int], bool] = {}


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """left [B, M, K], right [B, K, N] -> [B, M, N]. M is a multiple of ROW_MULTIPLE."""
    num_rows, inner = left.shape[1:]
    assert num_rows % ROW_MULTIPLE == 0, f"{num_rows} rows"
    key = (inner, right.shape[2], left.dtype, left.device, torch.get_num_threads())
    if key not in _proven:
        _proven[key] = _rows_are_invariant(inner, right.shape[2], left.dtype, left.device)
    if _proven[key] or num_rows == ROW_MULTIPLE:
        return torch.bmm(left, right)
    tiles = num_rows // ROW_MULTIPLE
    split = left.reshape(-1, ROW_MULTIPLE, inner)
    return torch.bmm(split, right.repeat_interleave(tiles, 0)).view(left.shape[0], num_rows, -1)


def _rows_are_invariant(inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    most_batch, most_rows = (max(sizes) for sizes in zip(*PROBED_SHAPES, strict=True))
    left = torch.randn(1, most_rows, inner, generator=generator).to(device, dtype).expand(most_batch, -1, -1)
    right = torch.randn(1, inner, columns, generator=generator).to(device, dtype).expand(most_batch, -1, -1)
    # The right side is a transpose, because attention multiplies by transposed keys or by values.
    transposed = right.transpose(1, 2).contiguous().transpose(1, 2)
    expected = torch.bmm(left[:1], right[:1])[0]
    return all(
        torch.equal(torch.bmm(left[:batch, :rows].contiguous(), side[:batch])[-1], expected[:rows])
        for batch, rows in PROBED_SHAPES
        for side in (right.contiguous(), transposed)
    )
