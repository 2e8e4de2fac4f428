"""Changes of the prefix cache, told to routers so that they can send a prompt where its prefix is."""

from __future__ import annotations

import msgspec


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """Blocks that became reusable, first to last; parent_hash is 0 at the start of a prompt."""

    block_hashes: tuple[int, ...]
    parent_hash: int = 0


class BlocksEvicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Blocks whose content is gone."""

    block_hashes: tuple[int, ...]


KvEvent = BlocksStored | BlocksEvicted
