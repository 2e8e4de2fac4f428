"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import KvCache, Prefix
from engine.kv.disk import BlockDisk, DiskRead

__all__ = ["BlockDisk", "DiskRead", "KvCache", "Prefix"]
