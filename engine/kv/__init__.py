"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from contract.prefix import BlockHash, PrefixHasher
from engine.kv.cache import KvCache, Prefix

__all__ = ["BlockHash", "KvCache", "Prefix", "PrefixHasher"]
