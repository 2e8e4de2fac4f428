"""What adapters add, in plain torch: the oracle, and what computes where Triton does not.

Shape letters: T tokens, S slots, K inputs, N outputs, P parts, W width (the largest rank, rounded up).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.adapters.low_rank import LowRankChange
from kernels.adapters.rows import NO_ADAPTER

# Rows are multiplied so many at a time, always: their bits do not depend on how many there are.
TILE_ROWS = 16
# Triton's products need ranks that are multiples of this.
WIDTH_MULTIPLE = 16


class TorchChanges:
    """What the adapters of all slots add to one linear layer, whose parts have `sizes` outputs. Zeros fill up
    smaller ranks, and parts that an adapter leaves alone.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.inputs, self.sizes = inputs, tuple(sizes)
        self.width = -(-max_rank // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        inner = len(self.sizes) * self.width
        self.down = torch.zeros(num_slots, inner, inputs, dtype=dtype, device=device)  # [S, P * W, K]
        self.up = torch.zeros(num_slots, sum(sizes), self.width, dtype=dtype, device=device)  # [S, N, W]

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.down.shape[0])

    def put(self, slot: int, parts: Sequence[LowRankChange | None]) -> None:
        """Puts an adapter in a slot; None where it leaves a part alone."""
        down = torch.zeros(self.down.shape[1:])
        up = torch.zeros(self.up.shape[1:])
        begin = 0
        for index, (change, size) in enumerate(zip(parts, self.sizes, strict=True)):
            if change is not None:
                first = index * self.width
                down[first : first + change.rank] = torch.from_numpy(change.down)
                up[begin : begin + size, : change.rank] = torch.from_numpy(change.up)
            begin += size
        # In the type of the slot first, so that what is copied to a device is what lies there.
        self.down[slot].copy_(down.to(self.down.dtype))
        self.up[slot].copy_(up.to(self.up.dtype))


class TorchAdapterStep:
    """The rows of one step, by slot. The host knows them."""

    def __init__(self, slots: Tensor) -> None:
        """slots [T], NO_ADAPTER for the base model."""
        found = [slot for slot in torch.unique(slots).tolist() if slot != NO_ADAPTER]
        self._rows = [(slot, torch.nonzero(slots == slot)[:, 0]) for slot in found]

    def add(self, changes: TorchChanges, x: Tensor, out: Tensor) -> Tensor:
        """x [T, K], out [T, N] -> out with what the rows' adapters add."""
        if not self._rows:
            return out
        out = out.clone()
        for slot, rows in self._rows:
            padded = F.pad(x.index_select(0, rows), (0, 0, 0, -rows.numel() % TILE_ROWS))
            tiles = [_of_tile(changes, slot, tile) for tile in torch.split(padded, TILE_ROWS)]
            change = torch.cat(tiles)[: rows.numel()]
            out[rows] = (out[rows].float() + change).to(out.dtype)
        return out


def _of_tile(changes: TorchChanges, slot: int, x: Tensor) -> Tensor:
    """x [TILE_ROWS, K] -> [TILE_ROWS, N] in float32; the rank between is not rounded."""
    inner = F.linear(x.float(), changes.down[slot].float())
    up = torch.split(changes.up[slot].float(), list(changes.sizes))
    parts = torch.split(inner, changes.width, dim=1)
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, up, strict=True)], dim=1)
