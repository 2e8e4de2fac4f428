"""A layer's storage as the native kernels see it (kv_cache.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from engine.kernels.paged_cache.store import LayerCache, PlainCache, QuantizedCache

# Values of KvType.
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class KvCacheStruct(ctypes.Structure):
    """Mirror of KvCache."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("type", c_int64),
        ("num_heads", c_int64),
        ("block_size", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("shared_value_dim", c_int64),
    )


def describe(cache: LayerCache) -> KvCacheStruct:
    """Points at the tensors of a cache in main memory, which must outlive the result. Raises TypeError for a
    cache that the kernels cannot read.
    """
    if not isinstance(cache, PlainCache | QuantizedCache) or cache.keys.dtype not in KV_TYPES:
        raise TypeError(f"native kernels cannot read {type(cache).__name__}")
    assert cache.keys.device.type == "cpu", "the native kernels run on the CPU"
    assert all(tensor.is_contiguous() for tensor in cache.tensors())
    return KvCacheStruct(
        keys=cache.keys.data_ptr(),
        values=None if cache.values is None else cache.values.data_ptr(),
        scales=cache.scales.data_ptr() if isinstance(cache, QuantizedCache) else None,
        type=KV_TYPES[cache.keys.dtype],
        num_heads=cache.keys.shape[1],
        block_size=cache.block_size,
        key_dim=cache.keys.shape[3],
        value_dim=0 if cache.values is None else cache.values.shape[3],
        shared_value_dim=cache.shared_value_dim,
    )
