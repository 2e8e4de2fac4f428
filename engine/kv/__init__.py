"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import KvCache, Prefix
from engine.kv.disk import BlockDisk, DiskRead, state_name
from engine.kv.division import Division

__all__ = ["BlockDisk", "DiskRead", "Division", "KvCache", "Prefix", "state_name"]
