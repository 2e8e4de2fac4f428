"""What an engine says of itself to those who send it requests, and why they take one back."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import msgspec


class CancelReason(IntEnum):
    """Why the gateway cancels. Numbers equal those of millrace.engine.v1.CancelReason."""

    CLIENT = 1
    DEADLINE = 2
    STOP_STRING = 3
    BUDGET = 4


def model_key(name: str, revision: str) -> str:
    """One version of a model: name@revision, or the name alone where no revision is told apart. A name that
    ends so already is the key.
    """
    return name if not revision or name.endswith(f"@{revision}") else f"{name}@{revision}"


class AdapterInfo(msgspec.Struct, frozen=True):
    """What a name stands for. Of what is said of one name, the greater `order` holds, whoever says it."""

    name: str
    # Folder, as engines see it.
    path: str = ""
    # Digest of its files; "" where the name was removed.
    version: str = ""
    # Grows with every change of the name; 0 is an engine's configuration.
    generation: int = 0
    # Whether the engine that says so has it in memory.
    loaded: bool = False

    @property
    def order(self) -> tuple[int, str]:
        """By which the newer of two is known, to all alike."""
        return self.generation, self.version


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself when a gateway attaches."""

    engine_id: str
    model: str
    vocabulary_fingerprint: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    # Label that its operator gave it, for routing.
    pool: str = ""
    # Sampling options that its make lacks, by name.
    unsupported: tuple[str, ...] = ()
    # Version of the model; "" where none is told apart.
    revision: str = ""
    # "prefill" computes prompts for others, "decode" goes on with these; "" does both by itself.
    role: str = ""

    @property
    def model_key(self) -> str:
        """The version of the model that it serves."""
        return model_key(self.model, self.revision)


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's report; rides on every step and comes once a second when it is idle."""

    num_running: int = 0
    num_waiting: int = 0
    # Prompt tokens that are not computed yet, of waiting and running requests.
    pending_prefill_tokens: int = 0
    # Not referenced by any sequence: free and cached ones.
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    oldest_wait_s: float = 0.0
    draining: bool = False
    # Since the engine started: prompt tokens that were looked up and found, and preemptions.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    # Median of the latest steps; 0 before the first.
    step_p50_s: float = 0.0


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """Prefix blocks that became reusable, first to last; `parent_hash` is 0 at the start of a prompt."""

    block_hashes: tuple[int, ...]
    parent_hash: int = 0


class BlocksEvicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Prefix blocks whose content is gone."""

    block_hashes: tuple[int, ...]


KvEvent: TypeAlias = BlocksStored | BlocksEvicted
