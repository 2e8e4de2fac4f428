"""Storage of keys and values in blocks."""

from engine.kernels.paged_cache.store import LayerCache, PlainCache, QuantizedCache, allocate_layer

__all__ = ["LayerCache", "PlainCache", "QuantizedCache", "allocate_layer"]
