"""Args of the native rotation with cache write (rope_cache.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from engine.kernels.paged_cache.native import KvCacheStruct

# Values of QkNorm.
QK_NORMS = {"none": 0, "head": 1, "full": 2}


class RopeCacheArgs(ctypes.Structure):
    """Mirror of rope_cache.h: from fused projections to queries and cache."""

    _fields_ = (
        ("step", c_void_p),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("cache", KvCacheStruct),
        ("num_heads", c_int64),
        ("rotary_dim", c_int64),
        ("interleaved", c_int64),
        ("norm", c_int64),
        ("eps", c_float),
    )


class LatentCacheArgs(ctypes.Structure):
    """Mirror of rope_cache.h: latent attention's queries and cache."""

    _fields_ = (
        ("step", c_void_p),
        ("down", c_void_p),
        ("latent_norm", c_void_p),
        ("q", c_void_p),
        ("queries", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("cache", KvCacheStruct),
        ("num_heads", c_int64),
        ("nope_dim", c_int64),
        ("rotary_dim", c_int64),
        ("interleaved", c_int64),
        ("eps", c_float),
    )


class HeadProductArgs(ctypes.Structure):
    """Mirror of rope_cache.h: one small product per head."""

    _fields_ = (
        ("step", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
    )
