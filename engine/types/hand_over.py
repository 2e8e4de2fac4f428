"""What an engine's core and its front say to each other of blocks that go from one engine to another.

They have a socket of their own for it (contract.frames), so that tokens never wait behind blocks. See
engine/runner/prefix_peers/DESIGN.md.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from contract.prefix import BlockHash

TICKET_BYTES = 16


class BlockSource(msgspec.Struct, frozen=True):
    """The engine that computed a prompt: where it is, and what its blocks are held under."""

    address: str
    ticket: bytes


# Core to front.


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Begins to pull blocks, first to last; answered by PulledBlocks and PullEnded."""

    token: int
    source: BlockSource
    form: bytes
    hashes: tuple[BlockHash, ...]
    # Seconds after which nobody waits for more.
    limit_s: float
    # Memory in which an engine of this machine may leave them (engine/runner/prefix_peers/staging); or empty.
    staging: str = ""


class StopPull(msgspec.Struct, frozen=True, tag="stop_pull"):
    """Nobody wants the blocks any more."""

    token: int


# A block's checksum, and its bytes; none where they lie in the staging memory.
Checked: TypeAlias = tuple[bytes, bytes]


class SentBlocks(msgspec.Struct, frozen=True, tag="sent_blocks"):
    """Blocks that another engine has asked for, in the order in which it did."""

    read: int
    blocks: tuple[Checked, ...]
    # Of each block.
    num_bytes: int


class NotHeld(msgspec.Struct, frozen=True, tag="not_held"):
    """Ends a read: "gone" or "form"."""

    read: int
    reason: str


FromCore: TypeAlias = Pull | StopPull | SentBlocks | NotHeld

# Front to core.


class ReadHeld(msgspec.Struct, frozen=True, tag="read_held"):
    """Asks for blocks that are held under a ticket; answered by SentBlocks, or by NotHeld."""

    read: int
    ticket: bytes
    form: bytes
    # The place of the first one in all that is read.
    first_index: int
    hashes: tuple[BlockHash, ...]
    staging: str = ""


class ReadEnded(msgspec.Struct, frozen=True, tag="read_ended"):
    """Nothing more is asked for."""

    read: int


class PulledBlocks(msgspec.Struct, frozen=True, tag="pulled_blocks"):
    """Blocks of a pull, by the place of the first one there."""

    token: int
    first_index: int
    blocks: tuple[Checked, ...]


class PullEnded(msgspec.Struct, frozen=True, tag="pull_ended"):
    """Nothing more comes; `reason` is empty where all has."""

    token: int
    reason: str = ""


ToCore: TypeAlias = ReadHeld | ReadEnded | PulledBlocks | PullEnded

# Why a pull brought less than was asked for.
PULL_FAILURES = ("lost", "silence", "gone", "form", "checksum", "slow")


class HandOverCounters(msgspec.Struct, kw_only=True):
    """Of an engine that takes part in hand-overs, since it started."""

    num_sent: int = 0
    num_received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    # Pulls that ended, cancelled ones included, and the seconds from their beginning.
    num_pulls: int = 0
    pull_s: float = 0.0
    # Blocks of no pull that is under way, or not its next one; they were dropped.
    num_late: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PULL_FAILURES, 0))
    # Held now, under tickets.
    num_held_blocks: int = 0
