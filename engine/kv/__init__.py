"""Bookkeeping of the paged KV cache: blocks, prefix cache, host tier. Numbers only, no tensors."""

from engine.kv.cache import KvCache, Prefix

__all__ = ["KvCache", "Prefix"]
