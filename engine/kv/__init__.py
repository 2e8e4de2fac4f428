"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import Division, KvCache, Prefix
from engine.kv.disk import BlockDisk, DiskRead

__all__ = ["BlockDisk", "DiskRead", "Division", "KvCache", "Prefix"]
