"""What the cache's bookkeeping asks of whoever moves blocks between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.prefix import BlockHash
from engine.kv.disk import BlockDisk
from engine.types.hand_over import BlockSource, HandOverCounters


class BlockPeers(Protocol):
    """The runner's tier of other engines (engine.runner.prefix_peers). No method waits for one."""

    # Whether this engine pulls blocks, and whether it holds some for others.
    receives: bool
    sends: bool
    # How long it holds them, in seconds.
    hold_s: float

    def offer(self, ticket: bytes, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """The blocks hold these contents until `withdraw`."""

    def withdraw(self, ticket: bytes) -> None:
        """The blocks may get other content."""

    def pull_later(
        self, token: int, blocks: Sequence[tuple[BlockHash, int]], source: BlockSource, limit_s: float
    ) -> None:
        """Begins to pull contents into blocks that nobody reads or writes until `finished` has the token."""

    def stop(self, token: int) -> None:
        """Nobody waits for a pull any more; `finished` has its token when nothing is written any more."""

    def finished(self) -> list[tuple[int, int]]:
        """Tokens of pulls that have ended since the last call, each with how many first blocks are filled."""

    def counters(self) -> HandOverCounters:
        """What happened since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTiers:
    """Where blocks of prefixes are besides this process; None where an engine has no such place."""

    disk: BlockDisk | None = None
    peers: BlockPeers | None = None


NO_TIERS = PrefixTiers()
