"""The paged cache's tensors, of the size that the plan says, and copies of its blocks."""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.paged_cache import LayerCache, allocate_layer
from engine.kernels.transfer import on_device
from engine.model.spec import ModelSpec
from engine.runner.block_transfers import BlockTransfers
from engine.runner.lanes import lanes_of
from engine.runner.prefault import Prefault
from engine.types import SchedulerOutput

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


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
        device: torch.device,
        host_blocks: int = 0,
        ahead_blocks: int = 0,
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
        self._transfers: BlockTransfers | None = None
        if host_blocks:
            self._transfers = BlockTransfers(self._tensors, host_blocks, lanes_of(device))
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

    def announce(self, plan: SchedulerOutput) -> None:
        """Begins what of a plan's restores need not wait for the plans before it. Optional; may be called
        from the thread that launches, while another applies.
        """
        if self._transfers is not None and (plan.offloads or plan.restores):
            self._transfers.announce(plan.step_id, plan.offloads, plan.restores)

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
            self._transfers.apply(plan.step_id, plan.offloads, plan.restores)
        if plan.block_copies:
            index = on_device(np.array(plan.block_copies, np.int64).T.copy(), self._tensors[0].device)
            for tensor in self._tensors:
                tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))

    def close(self) -> None:
        """Ends transfers and gives host memory back. No step is outstanding."""
        if self._prefault is not None:
            self._prefault.close()
            self._prefault = None
        if self._transfers is not None:
            if self._tensors[0].device.type == "cuda":
                torch.cuda.synchronize(self._tensors[0].device)
            self._transfers.close()
            self._transfers = None
