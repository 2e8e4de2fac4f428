"""Adapters' weights as the native ops take them (adapters.h), and those ops. No torch.

Shape letters: S slots, K inputs, N outputs, P parts, W width (the largest rank, rounded up).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.adapters.low_rank import LowRankChange
from kernels.host import address_of, empty
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure

# Widths are multiples of this.
LANES = 16


class NativeChanges:
    """What the adapters of all slots add to one linear layer, whose parts have `sizes` outputs."""

    def __init__(
        self, inputs: int, sizes: Sequence[int], *, num_slots: int, max_rank: int, bfloat16: bool
    ) -> None:
        self.inputs, self.sizes = inputs, tuple(sizes)
        self.width = -(-max_rank // LANES) * LANES
        self.bfloat16 = bfloat16
        kind, outputs = np.uint16 if bfloat16 else np.float32, sum(sizes)
        # Memory of slots that nobody has used is not touched: it costs nothing yet.
        self.down = empty((num_slots, inputs, len(self.sizes) * self.width), kind)  # [S, K, P * W]
        self.up = empty((num_slots, self.width, outputs), kind)  # [S, W, N]
        self.ranks = np.zeros((num_slots, len(self.sizes)), np.int64)  # [S, P]
        self.starts = np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)  # [P + 1]

    @property
    def inner_width(self) -> int:
        """P * W."""
        return len(self.sizes) * self.width

    def put(self, slot: int, parts: Sequence[LowRankChange | None]) -> None:
        """Puts an adapter in a slot; None where it leaves a part alone."""
        self.ranks[slot] = 0
        for index, change in enumerate(parts):
            if change is None:
                continue
            rank, first = change.rank, index * self.width
            begin, end = self.starts[index], self.starts[index + 1]
            # Columns beyond the last rank are zeroed, because vectors compute them although nobody reads
            # them.
            self.down[slot, :, first : first + self.width] = 0
            self.down[slot, :, first : first + rank] = self._stored(change.down.T)
            self.up[slot, :rank, begin:end] = self._stored(change.up.T)
            self.ranks[slot, index] = rank

    def _stored(self, values: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.uint16]:
        return bfloat16_bits(values) if self.bfloat16 else values

    def ops(
        self,
        library: NativeLibrary,
        step: int,
        x: NDArray[np.float32],
        out: NDArray[np.float32],
        inner: NDArray[np.float32],
    ) -> list[Op]:
        """What adds them to out, for x; `inner` [T, P * W or more] is room for what is between. Rows may be
        wider than the layer.
        """
        args: ctypes.Structure = structure("AdapterArgs")(
            step=step,
            x=address_of(x),
            out=address_of(out),
            inner=address_of(inner),
            down=address_of(self.down),
            up=address_of(self.up),
            ranks=address_of(self.ranks),
            starts=address_of(self.starts),
            x_stride=x.strides[0] // x.itemsize,
            out_stride=out.strides[0] // out.itemsize,
            inputs=self.inputs,
            outputs=sum(self.sizes),
            num_parts=len(self.sizes),
            width=self.width,
            bfloat16=int(self.bfloat16),
        )
        return [Op(library, name, args, self, x, out, inner) for name in ("adapter_shrink", "adapter_expand")]


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded
