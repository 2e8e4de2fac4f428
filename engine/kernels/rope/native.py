"""Args of the native rotation with cache write (rope_cache.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from engine.kernels.native.mirror import fields
from engine.kernels.paged_cache.native import KvCacheStruct

# Values of QkNorm.
QK_NORMS = {"none": 0, "head": 1, "full": 2}


class RopeCacheArgs(ctypes.Structure):
    """Mirror of rope_cache.h: from fused projections to queries and cache."""

    _fields_ = (
        *fields(c_void_p, "step", "qkv", "q_norm", "k_norm", "cos", "sin"),
        ("cache", KvCacheStruct),
        *fields(c_int64, "num_heads", "rotary_dim", "interleaved", "norm"),
        ("eps", c_float),
    )


class LatentCacheArgs(ctypes.Structure):
    """Mirror of rope_cache.h: latent attention's queries and cache."""

    _fields_ = (
        *fields(c_void_p, "step", "down", "latent_norm", "q", "queries", "cos", "sin"),
        ("cache", KvCacheStruct),
        *fields(c_int64, "num_heads", "nope_dim", "rotary_dim", "interleaved"),
        ("eps", c_float),
    )


class HeadProductArgs(ctypes.Structure):
    """Mirror of rope_cache.h: one small product per head."""

    _fields_ = (
        *fields(c_void_p, "step", "x", "weight", "out"),
        *fields(c_int64, "num_heads", "inputs", "outputs", "x_stride", "out_stride"),
    )
