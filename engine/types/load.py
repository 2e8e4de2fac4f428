"""What the engine says of itself between two steps: load for routers, counts for metrics."""

from __future__ import annotations

import msgspec

from contract.engines import EngineLoad


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
    # Cause (see observability.emit.names.Cause) to preemptions.
    preemptions: dict[str, int] = {}

    @property
    def num_preemptions(self) -> int:
        """Preemptions of any cause."""
        return sum(self.preemptions.values())


class SchedulerLoad(EngineLoad, frozen=True, kw_only=True):
    """The present load, with what the engine's own metrics and scheduling policy look at beside it."""

    # Of the free blocks, the ones whose content can be reused.
    num_cached_blocks: int
    counters: SchedulerCounters
