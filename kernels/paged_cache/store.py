"""One layer's keys and values, in blocks. Who owns which block is the scheduler's business.

Heads come before positions inside a block ([N, K, P, D]), so that fetching one head's history is a gather of
contiguous pieces. One block more than the plan's is allocated: rows that pad a batch write there.

Shape letters: N blocks, K kv heads, P block size, D key dim, E value dim, T tokens, B gathered rows, C
gathered blocks.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.host import BY_CHANNEL
from kernels.paged_cache.memory import empty_on_huge_pages

# Largest magnitude of each type that quantized keys and values are stored in.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class LayerCache(Protocol):
    """What attention and the model see of one layer's storage."""

    block_size: int
    shared_value_dim: int
    # Name of the type of keys and values.
    type_name: str
    # Whether its blocks are those of layers with a window, where others have none.
    in_windows: bool

    def write(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """Stores keys [T, K, D] and values [T, K, E] at slots [T] (block * P + offset). None: the key holds
        the value.
        """

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """blocks [B, C] -> keys [B, K, C*P, D] and values [B, K, C*P, E] in float32."""

    def tensors(self) -> list[Tensor]:
        """Every tensor whose first axis is blocks, for copies and offload."""


class PlainCache:
    """Keys and values in one floating-point type. With value_dim 0 the value is the first part of the key."""

    def __init__(self, keys: Tensor, values: Tensor | None, shared_value_dim: int = 0) -> None:
        self.keys = keys  # [N, K, P, D]
        self.values = values  # [N, K, P, E]
        self.shared_value_dim = shared_value_dim
        self.block_size = keys.shape[2]
        self.scales = None
        self.in_windows = False
        self.type_name = str(keys.dtype).removeprefix("torch.")

    def write(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys[block, :, offset] = keys.to(self.keys.dtype)
        if self.values is not None and values is not None:
            self.values[block, :, offset] = values.to(self.values.dtype)

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys = _gather(self.keys, blocks).float()
        if self.values is None:
            return keys, keys[..., : self.shared_value_dim]
        return keys, _gather(self.values, blocks).float()

    def tensors(self) -> list[Tensor]:
        return [self.keys] if self.values is None else [self.keys, self.values]


class QuantizedCache:
    """Keys and values as int8 or fp8 (e4m3), one float32 scale per token and head: the largest magnitude maps
    to the type's own.
    """

    def __init__(
        self, keys: Tensor, values: Tensor | None, scales: Tensor, shared_value_dim: int = 0
    ) -> None:
        self.keys = keys  # [N, K, P, D] int8 or float8_e4m3fn
        self.values = values  # [N, K, P, E] of the same type
        self.scales = scales  # [N, K, P, 2] float32: of the key, of the value
        self.shared_value_dim = shared_value_dim
        self.block_size = keys.shape[2]
        self.in_windows = False
        self.type_name = str(keys.dtype).removeprefix("torch.")

    def write(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        block, offset = slots // self.block_size, slots % self.block_size
        levels, key_scale = _quantize(keys, self.keys.dtype)
        as_bytes(self.keys)[block, :, offset] = as_bytes(levels)
        value_scale = key_scale
        if self.values is not None and values is not None:
            levels, value_scale = _quantize(values, self.values.dtype)
            as_bytes(self.values)[block, :, offset] = as_bytes(levels)
        self.scales[block, :, offset] = torch.stack((key_scale, value_scale), dim=-1)

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        scales = _gather(self.scales, blocks)
        keys = _gather(self.keys, blocks).float() * scales[..., :1]
        if self.values is None:
            return keys, keys[..., : self.shared_value_dim]
        return keys, _gather(self.values, blocks).float() * scales[..., 1:]

    def tensors(self) -> list[Tensor]:
        parts = [as_bytes(self.keys), self.scales]
        return parts if self.values is None else [*parts, as_bytes(self.values)]


def allocate_layer(
    *,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    shared_value_dim: int,
    dtype: torch.dtype | Literal["kivi4"],
    device: torch.device,
) -> PlainCache | QuantizedCache | ChannelCache:
    """Storage for num_blocks blocks and the one that padding writes to. It holds anything at first: nobody
    reads a slot before writing it, and on a CPU untouched memory costs nothing. Of kivi4 `keep_newest_keys`
    follows.
    """
    shape = (num_blocks + 1, num_heads, block_size)
    if dtype == BY_CHANNEL:
        return ChannelCache.allocate(shape, key_dim, value_dim, device)
    assert isinstance(dtype, torch.dtype), "kivi4 is the only name"
    keys = empty_on_huge_pages((*shape, key_dim), dtype, device)
    values = empty_on_huge_pages((*shape, value_dim), dtype, device) if value_dim else None
    if dtype in LIMITS:
        scales = empty_on_huge_pages((*shape, 2), torch.float32, device)
        return QuantizedCache(keys, values, scales, shared_value_dim)
    return PlainCache(keys, values, shared_value_dim)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory [..., D] as bytes: fp8 is not indexed on every device."""
    return tensor.view(torch.uint8)


def _gather(store: Tensor, blocks: Tensor) -> Tensor:
    """store [N, K, P, D], blocks [B, C] -> [B, K, C*P, D], one contiguous copy."""
    num_heads, block_size, dim = store.shape[1:]
    heads = torch.arange(num_heads, device=blocks.device)
    rows = (blocks[:, None, :] * num_heads + heads[None, :, None]).flatten()
    flat = store.flatten(0, 1)
    if store.dtype.itemsize == 1:
        gathered = as_bytes(flat).index_select(0, rows).view(store.dtype)
    else:
        gathered = flat.index_select(0, rows)
    return gathered.view(blocks.shape[0], num_heads, blocks.shape[1] * block_size, dim)


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K, D] -> [T, K, D] of dtype and scales [T, K]. A vector with NaN or infinity keeps a non-finite
    scale.
    """
    limit = LIMITS[dtype]
    wide = x.float()
    scale = wide.abs().amax(-1) / limit
    safe = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    levels = torch.nan_to_num(wide / safe[..., None]).clamp(-limit, limit)
    return (levels.round() if dtype == torch.int8 else levels).to(dtype), scale
