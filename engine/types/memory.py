"""The memory plan: one statement that start-up, admission and `millrace plan` share."""

from __future__ import annotations

import msgspec


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory goes, in bytes, and what fits into it."""

    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    headroom_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    # Slots for adapters.
    adapter_bytes: int = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.num_blocks * self.block_size


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """What parts of the plan really take, in bytes, measured."""

    weights_bytes: int = 0
    # On a CPU, blocks that were written at least once; on an accelerator, all of them.
    kv_cache_bytes: int = 0
    # Peak since start-up of what is neither.
    workspace_bytes: int = 0
