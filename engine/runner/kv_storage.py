"""The paged cache's tensors, of the size that the plan says, and copies of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.model.spec import ModelSpec
from engine.runner.prefault import Prefault
from engine.types import SchedulerOutput
from kernels.host import Device, HostDevice
from kernels.paged_cache.host import allocate_host_layer
from kernels.transfer import on_device

if TYPE_CHECKING:
    import torch

    from engine.runner.block_transfers import BlockTransfers
    from kernels.paged_cache import LayerCache


class KvStorage:
    """One LayerCache per layer, and room for `host_blocks` blocks in host memory (the offload tier). On a CPU
    the memory of `ahead_blocks` blocks beyond those in use is had from the system while cores are idle.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        device: Device,
        host_blocks: int = 0,
        ahead_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        shape = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_heads": spec.cache_heads,
            "key_dim": spec.query_key_dim,
            "value_dim": spec.cache_value_dim,
            "shared_value_dim": spec.value_dim,
        }
        # HostCache for the native kernels, else LayerCache.
        self.layers: list[Any] = [
            allocate_host_layer(**shape, type_name=kv_dtype)
            if isinstance(device, HostDevice)
            else _torch_layer(shape, kv_dtype, device)
            for _ in range(spec.num_layers)
        ]
        self._tensors: list[Any] = [tensor for layer in self.layers for tensor in layer.tensors()]
        self._transfers: BlockTransfers | None = None
        if host_blocks:
            self._transfers = _transfers(self._tensors, host_blocks, device)
        self._prefault: Prefault | None = None
        if ahead_blocks and device.type == "cpu":
            self._prefault = Prefault(self._tensors, ahead_blocks=ahead_blocks)

    @property
    def spare_slot(self) -> int:
        """A slot of the block that belongs to nobody; padding writes there."""
        return self.num_blocks * self.block_size

    @property
    def num_prefaulted_blocks(self) -> int:
        """Blocks from the first on whose memory is there ahead of their use."""
        return 0 if self._prefault is None else self._prefault.num_blocks

    def apply(self, plan: SchedulerOutput) -> None:
        """Moves the plan's blocks: offloads, restores, copies inside the cache. What runs on the device after
        this call finds them done.
        """
        if self._prefault is not None:
            for new in plan.new_sequences:
                self._prefault.use(1 + max(new.block_ids, default=-1))
            for sequence in plan.scheduled:
                if sequence.new_block_ids:
                    self._prefault.use(1 + max(sequence.new_block_ids))
        if plan.offloads or plan.restores:
            assert self._transfers is not None, "the scheduler knows of no host tier either"
            self._transfers.apply(plan.offloads, plan.restores)
        if plan.block_copies:
            index = np.array(plan.block_copies, np.int64).T.copy()
            for tensor in self._tensors:
                if isinstance(tensor, np.ndarray):
                    tensor[index[1]] = tensor[index[0]]
                else:
                    sources, targets = on_device(index, tensor.device)
                    tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def close(self) -> None:
        """Ends transfers and gives host memory back. No step is outstanding."""
        if self._prefault is not None:
            self._prefault.close()
            self._prefault = None
        if self._transfers is not None:
            if self._device.type == "cuda":
                import torch

                torch.cuda.synchronize(self._tensors[0].device)
            self._transfers.close()
            self._transfers = None


def _torch_layer(shape: dict[str, int], kv_dtype: str, device: torch.device) -> LayerCache:
    import torch

    from kernels.paged_cache import allocate_layer

    dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    return allocate_layer(**shape, dtype=dtype, device=device)


def _transfers(tensors: Sequence[Any], host_blocks: int, device: Device) -> BlockTransfers:
    """Moves blocks as tensors, over the same memory where these are arrays: who sets host memory apart for
    blocks pays for torch with it.
    """
    import torch

    from engine.runner.block_transfers import BlockTransfers
    from engine.runner.streams import streams_of

    if isinstance(device, HostDevice):
        tensors = [torch.from_numpy(tensor.view(np.uint8)) for tensor in tensors]
    return BlockTransfers(tensors, host_blocks, streams_of(tensors[0].device))
