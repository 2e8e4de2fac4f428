"""Room for the states of layers that carry one from token to token: a slot for each sequence that runs, and
copies at block boundaries, from which prompts with the same beginning go on. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.config import EngineConfig
from engine.model.spec import ModelSpec
from engine.types import MemoryPlan
from runtime.errors import ConfigError

# Keys and values that lie between two copies take so many times a copy's bytes, within limits of tokens.
INTERVAL_FACTOR = 4
LEAST_INTERVAL_BLOCKS = 4
LARGEST_INTERVAL = 2048
# Blocks there are at most of a model whose blocks have no bytes: each costs what finds it.
MOST_KEYLESS_BLOCKS = 1 << 18
# Copies there are at least, beside the slots of sequences that run.
LEAST_COPIES = 4
# Slots of a draft model for each sequence: behind what is known, and behind drafts.
DRAFT_SLOTS = 2


class StateRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of all layers together; nothing where the model has no states."""

    bytes_per_state: int = 0
    # For sequences that run, and the few copies without which nothing could be found again.
    least: int = 0
    # Tokens from one copy to the next.
    interval: int = 0
    # Whether no layer attends: all bytes are for states.
    is_keyless: bool = False

    @property
    def least_bytes(self) -> int:
        """What must be there in any case."""
        return self.least * self.bytes_per_state

    def num_states(self, cache_bytes: int) -> int:
        """Slots of a cache of so many bytes, the rest of which is for keys and values."""
        if not self.bytes_per_state:
            return 0
        parts = 1 if self.is_keyless else 1 + INTERVAL_FACTOR
        copies = (cache_bytes - self.least_bytes) // (parts * self.bytes_per_state)
        return self.least + max(0, copies)

    def num_blocks(self, fitting: int, config: EngineConfig, num_states: int, sequence_blocks: int) -> int:
        """Blocks: as many as fit by their bytes. Of a model that keeps states alone they have none and say
        where those lie among tokens: for every sequence that runs, and all tokens between copies.
        """
        if not self.is_keyless or fitting < 0:
            return fitting
        wanted = config.scheduler.max_num_seqs * sequence_blocks
        wanted += num_states * self.interval // config.cache.block_size
        return max(min(wanted, MOST_KEYLESS_BLOCKS), sequence_blocks)


def state_room(
    spec: ModelSpec, config: EngineConfig, kv_bytes_per_token: int, *, is_keyless: bool = False
) -> StateRoom:
    """What the states of a model need that stores so many bytes of keys and values for each token;
    `is_keyless`: no layer of it attends, in no stage.
    """
    if spec.state is None:
        return StateRoom()
    size, block = spec.state.num_bytes, config.cache.block_size
    wanted = INTERVAL_FACTOR * size // max(1, kv_bytes_per_token)
    tokens = min(max(wanted, LEAST_INTERVAL_BLOCKS * block), LARGEST_INTERVAL)
    # A row leaves a copy before each of its drafts.
    drafts = 0 if config.speculation.method == "off" else config.speculation.num_draft_tokens
    return StateRoom(
        bytes_per_state=size,
        least=config.scheduler.max_num_seqs + LEAST_COPIES + drafts,
        interval=-(-tokens // block) * block,
        is_keyless=is_keyless and not kv_bytes_per_token,
    )


def of_stages(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """What holds in each stage of a pipeline, as the one has it that has room for the fewest blocks: states
    as many as any stage has room for, and as often as the one that leaves the fewest copies.
    """
    fullest = min(plans, key=lambda plan: plan.num_blocks)
    counts = [plan.num_states for plan in plans if plan.num_states]
    if len(plans) == 1 or not counts:
        return fullest
    per_state = fullest.state_bytes // fullest.num_states if fullest.num_states else 0
    return msgspec.structs.replace(
        fullest,
        num_states=min(counts),
        state_bytes=min(counts) * per_state,
        state_interval=max(plan.state_interval for plan in plans),
    )


def num_draft_states(draft: ModelSpec, config: EngineConfig) -> int:
    """Slots of a draft model's states."""
    return 0 if draft.state is None else DRAFT_SLOTS * config.scheduler.max_num_seqs


def draft_states_bytes(draft: ModelSpec, config: EngineConfig) -> int:
    """What they take."""
    return 0 if draft.state is None else num_draft_states(draft, config) * draft.state.num_bytes


def check_draft_states(field: str, spec: ModelSpec, device: str, remedy: str) -> None:
    """Raises ConfigError for drafts that states cannot go back behind: captured steps leave no copies on the
    way.
    """
    if spec.state is not None and device != "cpu":
        raise ConfigError(
            f"{field}: {spec.architecture} has layers that carry a state, which goes back behind rejected "
            f"drafts on CPUs alone; {remedy}"
        )
