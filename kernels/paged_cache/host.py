"""One layer's keys and values in main memory, for the native kernels alone: numpy knows no bfloat16, so it
holds their bits. `store` has the same in tensors, and says how they lie in blocks.

Shape letters: N blocks, K kv heads, P block size, D key dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import empty

# Name of a type to what holds its bits.
BITS: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
    "fp8": np.uint8,
    "int4": np.uint8,
}
# Those with a scale for each key and value.
SCALED = ("int8", "fp8", "int4")


@dataclass(kw_only=True)
class HostCache:
    """Blocks of one layer. With value_dim 0 the value is the first part of the key."""

    keys: NDArray[Any]  # [N, K, P, D], of int4 two elements to a byte
    values: NDArray[Any] | None  # [N, K, P, E]
    scales: NDArray[np.float32] | None  # [N, K, P, 2] of quantized ones: of the key, of the value
    type_name: str
    block_size: int
    shared_value_dim: int
    # Whether its blocks are those of layers with a window, where others have none.
    in_windows: bool = False

    def tensors(self) -> list[NDArray[Any]]:
        """Every array whose first axis is blocks, for copies and offload."""
        return [part for part in (self.keys, self.scales, self.values) if part is not None]


def allocate_host_layer(
    *,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    shared_value_dim: int,
    type_name: str,
) -> HostCache:
    """Storage for num_blocks blocks and the one that padding writes to. It holds anything at first: nobody
    reads a slot before writing it, and untouched memory costs nothing.
    """
    shape = (num_blocks + 1, num_heads, block_size)
    bits, in_byte = BITS[type_name], 2 if type_name == "int4" else 1
    return HostCache(
        keys=empty((*shape, key_dim // in_byte), bits),
        values=empty((*shape, value_dim // in_byte), bits) if value_dim else None,
        scales=empty((*shape, 2), np.float32) if type_name in SCALED else None,
        type_name=type_name,
        block_size=block_size,
        shared_value_dim=shared_value_dim,
    )
