"""The paged cache's tensors, of the size that the plan says, and copies of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.paged_cache import LayerCache, allocate_layer
from engine.model.spec import ModelSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class KvStorage:
    """One LayerCache per layer, and a host copy of `host_blocks` blocks for the offload tier."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[LayerCache] = [
            allocate_layer(
                num_blocks=num_blocks,
                block_size=block_size,
                num_heads=spec.cache_heads,
                key_dim=spec.cache_key_dim,
                value_dim=spec.cache_value_dim,
                shared_value_dim=spec.value_dim,
                dtype=TORCH_DTYPES[kv_dtype],
                device=device,
            )
            for _ in range(spec.num_layers)
        ]
        self._tensors = [tensor for layer in self.layers for tensor in layer.tensors()]
        self._host = [
            torch.empty(host_blocks, *tensor.shape[1:], dtype=tensor.dtype) for tensor in self._tensors
        ]

    @property
    def spare_slot(self) -> int:
        """A slot of the block that belongs to nobody; padding writes there."""
        return self.num_blocks * self.block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks inside the cache, in all layers."""
        self._copy(self._tensors, self._tensors, pairs)

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block)."""
        self._copy(self._tensors, self._host, pairs)

    def restore(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block)."""
        self._copy(self._host, self._tensors, pairs)

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        index = torch.tensor(pairs)
        for source, target in zip(sources, targets, strict=True):
            moved = source.index_select(0, index[:, 0].to(source.device))
            target.index_copy_(0, index[:, 1].to(target.device), moved.to(target.device))
