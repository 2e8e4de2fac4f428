"""One layer's keys and values in main memory, for the native kernels alone: numpy knows no bfloat16, so it
holds their bits. `store` has the same in tensors, and says how they lie in blocks.

Shape letters: N blocks, K kv heads, P block size, D key dim, E value dim, R sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
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
    "kivi4": np.uint8,
}
# Those with a scale for each key and value.
SCALED = ("int8", "fp8")
# Four bits: values by token (four_bits), keys by channel in groups of so many tokens, a block each
# (key_groups.h).
BY_CHANNEL, KEY_GROUP = "kivi4", 64


@dataclass(kw_only=True)
class HostCache:
    """Blocks of one layer. With value_dim 0 the value is the first part of the key."""

    keys: NDArray[Any]  # [N, K, P, D], of kivi4 two elements to a byte
    values: NDArray[Any] | None  # [N, K, P, E]
    # [N, K, P, 2] of quantized ones: of the key, of the value; of kivi4 [N, K, P, 1] of the value.
    scales: NDArray[np.float32] | None
    type_name: str
    block_size: int
    shared_value_dim: int
    # Whether its blocks are those of layers with a window, where others have none.
    in_windows: bool = False
    # Of kivi4, in bits of bfloat16: middle and half a step of each channel of a full block [N, K, 2, D]; and
    # the keys of each sequence's newest two blocks, one behind the other [2 R, K, P, D].
    channels: NDArray[np.uint16] | None = None
    recent: NDArray[np.uint16] | None = None

    def tensors(self) -> list[NDArray[Any]]:
        """Every array whose first axis is blocks, for copies and offload."""
        parts = (self.keys, self.scales, self.values, self.channels)
        return [part for part in parts if part is not None]

    def by_slot(self) -> list[NDArray[Any]]:
        """Those whose third axis is slots of a block. Keys of kivi4 are of their block."""
        parts = (None if self.channels is not None else self.keys, self.scales, self.values)
        return [part for part in parts if part is not None]

    def keep_newest_keys(self, num_sequences: int) -> None:
        """Room for the newest keys of so many sequences."""
        num_heads, block_size, num_bytes = self.keys.shape[1:]
        self.recent = empty((2 * num_sequences, num_heads, block_size, 2 * num_bytes), np.uint16)

    def wide_keys(self, blocks: NDArray[np.int64]) -> NDArray[np.float32]:
        """Keys [B, K, P, D] of some blocks [B], as they were but for what their type has rounded. Those of
        kivi4 are full.
        """
        found = self.keys[blocks]
        keys: NDArray[np.float32]
        if self.type_name == "bfloat16":
            return _widened(found)
        if self.channels is not None:
            codes = _levels()[found.reshape(*found.shape[:3], -1, 4)]
            middles, halves = np.moveaxis(_widened(self.channels[blocks]), 2, 0)[:, :, :, None]
            keys = codes.swapaxes(-1, -2).reshape(*found.shape[:3], -1) * halves
            keys += middles
            return keys
        keys = _float8_values()[found] if self.type_name == "fp8" else found.astype(np.float32)
        if self.scales is not None:
            keys *= self.scales[blocks][..., :1]
        return keys

    def newest_keys(self, recent_row: int, index: int) -> NDArray[np.float32]:
        """Whole keys [K, P, D] of block `index` of a history (recent_of in key_groups.h)."""
        assert self.recent is not None, "of kivi4, with room for them"
        return _widened(self.recent[recent_row ^ index & 1])

    def put_keys(self, keys: NDArray[np.float32], blocks: NDArray[np.int64]) -> None:
        """Rounds keys [B, K, P, D] of full blocks [B] by channel, as key_groups.cc does."""
        assert self.channels is not None, "of kivi4"
        least, most = keys.min(2), keys.max(2)
        middles = _narrowed(least * np.float32(0.5) + most * np.float32(0.5))
        middle = _widened(middles)
        halves = _narrowed(np.maximum(most - middle, middle - least) / np.float32(15))
        half = _widened(halves)
        steps = np.where((half > 0) & (half < np.inf), half, np.float32(1))
        levels = (keys - middle[:, :, None]) / steps[:, :, None]
        codes = np.clip(np.rint((levels + 15) * np.float32(0.5)), 0, 15).astype(np.uint8)
        codes = codes.reshape(*keys.shape[:3], -1, 2, 4)
        self.keys[blocks] = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*keys.shape[:3], -1)
        self.channels[blocks] = np.stack((middles, halves), axis=2)


def _narrowed(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest numbers of bfloat16, of two the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Numbers of bfloat16 from their bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@cache
def _float8_values() -> NDArray[np.float32]:
    """Of each byte that is a float8_e4m3fn: a sign, four bits of exponent, three of fraction."""
    size = np.arange(128)
    exponent, fraction = size >> 3, (size & 7) / 8
    values = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


@cache
def _levels() -> NDArray[np.float32]:
    """Of each byte the levels [2] of its low half and its high one (four_bits)."""
    codes = np.arange(256)
    return (2 * np.stack((codes & 15, codes >> 4), -1) - 15).astype(np.float32)


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
    reads a slot before writing it, and untouched memory costs nothing. Of kivi4 `keep_newest_keys` follows.
    """
    shape = (num_blocks + 1, num_heads, block_size)
    by_channel = type_name == BY_CHANNEL
    bits, in_byte = BITS[type_name], 2 if by_channel else 1
    return HostCache(
        keys=empty((*shape, key_dim // in_byte), bits),
        values=empty((*shape, value_dim // in_byte), bits) if value_dim else None,
        scales=empty((*shape, 1 if by_channel else 2), np.float32)
        if by_channel or type_name in SCALED
        else None,
        type_name=type_name,
        block_size=block_size,
        shared_value_dim=shared_value_dim,
        channels=empty((*shape[:2], 2, key_dim), np.uint16) if by_channel else None,
    )
