"""Opens the tier of other engines: what engines must have in common, and which models hand nothing over."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_disk.build import fingerprint
from engine.runner.prefix_peers.tier import PeerTier
from engine.types import MemoryPlan, ModelFacts
from runtime.config import ModelConfig
from runtime.errors import ConfigError

# Of each file of the checkpoint so many pieces are compared, of so many bytes: copies on other machines have
# other times.
_NUM_PIECES, _PIECE_BYTES = 64, 1 << 14


def open_peers(
    config: EngineConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    facts: ModelFacts,
    blocks: Callable[[], BlockBytes] | None,
    connection: socket.socket | None,
) -> PeerTier | None:
    """The tier, its thread started; None where engines hand nothing over. Raises ConfigError where the model
    cannot be handed over.
    """
    if connection is None:
        return None
    for is_so, what in (
        (memory.num_states > 0, "its layers carry a state, which is not handed over"),
        (facts.window is not None, "its layers let go of what lies behind their window"),
        (bool(facts.tasks) or not facts.shares_prefixes, "prefixes of its prompts are of no use to others"),
        (blocks is None, "it has no keys and values"),
    ):
        if is_so:
            raise ConfigError(f'engine.role = {config.role!r}: not with this model: {what}; set it to "both"')
    assert blocks is not None, "was refused"
    form = fingerprint(config, model, memory, facts, _of_any_copy)
    return PeerTier(connection, blocks, form, config.hand_over, role=config.role)


def _of_any_copy(path: Path) -> bytes:
    """A file by its name, its size and pieces of what is in it."""
    size = path.stat().st_size
    digest = blake2b(msgspec.json.encode((path.name, size)))
    with path.open("rb") as file:
        for number in range(_NUM_PIECES):
            digest.update(os.pread(file.fileno(), _PIECE_BYTES, size * number // _NUM_PIECES))
    return digest.digest()
