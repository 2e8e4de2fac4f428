"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import KvCache, Prefix
from engine.kv.hashing import BlockHash, PrefixHasher

__all__ = ["BlockHash", "KvCache", "Prefix", "PrefixHasher"]
