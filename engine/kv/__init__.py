"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import KvCache, Prefix
from engine.kv.disk import BlockDisk, DiskRead, state_name
from engine.kv.division import Division
from engine.kv.peers import NO_TIERS, BlockPeers, PrefixTiers

__all__ = [
    "NO_TIERS",
    "BlockDisk",
    "BlockPeers",
    "DiskRead",
    "Division",
    "KvCache",
    "Prefix",
    "PrefixTiers",
    "state_name",
]
