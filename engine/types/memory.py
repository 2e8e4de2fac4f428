"""The memory plan: one statement that start-up, admission and `millrace plan` share."""

from __future__ import annotations

import msgspec

from contract.engines import EngineLoad
from engine.types.hand_over import HandOverCounters

# State of the engine between two steps: load for routers, counts for metrics.


class DiskCounters(msgspec.Struct, kw_only=True):
    """Blocks of the prefix cache on disk since the engine started."""

    num_written: int = 0
    num_read: int = 0
    # Not what was written under their names; removed.
    num_damaged: int = 0
    # Given away on the device before they were written.
    num_dropped: int = 0
    # Writes, and looks at the folder, that the system refused.
    num_failed: int = 0
    # Removed to keep the bound.
    num_evicted: int = 0
    # All that the folder holds now.
    num_bytes: int = 0


class SchedulerCounters(msgspec.Struct, kw_only=True):
    """Events since the engine started. Only ever grows; readers take differences."""

    # Prompt tokens of admitted sequences: looked up, found on the device, brought back from the host.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    restored_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    offloaded_blocks: int = 0
    restored_blocks: int = 0
    # Answers that went on beyond the model's positions, and their pauses.
    num_renewals: int = 0
    renewal_s: float = 0.0
    # Cause (see observability.emit.names.Cause) to preemptions.
    preemptions: dict[str, int] = {}
    # Where there is a disk, and where blocks go from engine to engine.
    disk: DiskCounters | None = None
    hand_over: HandOverCounters | None = None

    @property
    def num_preemptions(self) -> int:
        """Preemptions of any cause."""
        return sum(self.preemptions.values())


class SchedulerLoad(EngineLoad, frozen=True, kw_only=True):
    """The present load, with what the engine's own metrics and scheduling policy look at beside it."""

    # Free blocks whose content can be reused.
    num_cached_blocks: int
    counters: SchedulerCounters


def blocks_in_window(window: int, block_size: int) -> int:
    """Most blocks of a sequence that layers with a window keep, once its prompt is computed: those of the
    window, one that has left it in part, one of slack and one to grow into.
    """
    return -(-window // block_size) + 3


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
    # Slots for states of sequences that run, and copies of them: all bytes, and how many there are.
    state_bytes: int = 0
    num_states: int = 0
    # Tokens from one copy to the next, which take as many bytes as one.
    state_interval: int = 0
    # Where only some layers have a window: its tokens, how many blocks they keep (others keep `num_blocks`),
    # and their part of `kv_bytes_per_token`. 0 where all layers keep the same blocks.
    window: int = 0
    num_window_blocks: int = 0
    window_bytes_per_token: int = 0
    # Ids of blocks and of window blocks, where memory goes from one kind to the other with the load: more
    # than there is memory for at a time. 0 where the division stays.
    num_block_ids: int = 0
    num_window_block_ids: int = 0
    # For the keys of forgotten blocks, and what those of one block take: of answers that say what they lost.
    forgotten_bytes: int = 0
    forgotten_block_bytes: int = 0

    @classmethod
    def of_counts(cls, num_blocks: int, block_size: int, max_model_len: int) -> MemoryPlan:
        """A plan of which only counts matter: where nothing is computed, a token takes a byte."""
        kv_bytes = num_blocks * block_size
        return cls(
            total_bytes=kv_bytes,
            weights_bytes=0,
            workspace_bytes=0,
            headroom_bytes=0,
            kv_cache_bytes=kv_bytes,
            kv_bytes_per_token=1,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=min(max_model_len, kv_bytes),
        )

    @property
    def most_window_blocks(self) -> int:
        """See blocks_in_window; 0 where all layers keep the same blocks."""
        return blocks_in_window(self.window, self.block_size) if self.num_window_blocks else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in layers that keep all of them."""
        return (self.kv_bytes_per_token - self.window_bytes_per_token) * self.block_size

    @property
    def window_block_bytes(self) -> int:
        """Bytes of a window block."""
        return self.window_bytes_per_token * self.block_size

    def num_host_blocks(self, host_bytes: int) -> int:
        """Blocks that so many bytes of host memory hold, with their part of `num_host_states`."""
        each = self.kv_bytes_per_token * self.block_size
        if not self.state_interval:
            return host_bytes // each if each else 0
        per_state = self.state_bytes // self.num_states
        return host_bytes * self.state_interval // (each * self.state_interval + per_state * self.block_size)

    def num_host_states(self, num_host_blocks: int) -> int:
        """States in host memory beside so many blocks: as many copies as are left in their tokens."""
        return num_host_blocks * self.block_size // self.state_interval if self.state_interval else 0

    def streams_of(self, num_blocks: int, num_window_blocks: int) -> float:
        """Sequences that fit which hold so many blocks and window blocks each."""
        if not self.num_window_blocks:
            return self.num_blocks / num_blocks
        most = self.num_blocks / num_blocks, self.num_window_blocks / num_window_blocks
        if not self.num_block_ids:
            return min(most)
        each = num_blocks * self.block_bytes + num_window_blocks * self.window_block_bytes
        most = self.num_block_ids / num_blocks, self.num_window_block_ids / num_window_blocks
        return min(*most, self.kv_cache_bytes / each)

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
