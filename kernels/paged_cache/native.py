"""A layer's storage as the native kernels see it (kv_cache.h)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kernels.host import Values, address_of
from kernels.native.mirror import structure

# Names of types to values of KvType.
KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "fp8": 4, "float8_e4m3fn": 4}


class Storage(Protocol):
    """What the kernels read of a layer's keys and values, whoever holds them."""

    block_size: int
    shared_value_dim: int
    in_windows: bool

    @property
    def keys(self) -> Values:
        """[N, K, P, D], of int4 two elements to a byte."""

    @property
    def values(self) -> Values | None:
        """[N, K, P, E]."""

    @property
    def scales(self) -> Values | None:
        """[N, K, P, 2] of quantized ones."""

    @property
    def type_name(self) -> str:
        """The type of keys and values."""


KvCacheStruct = structure("KvCache")
CopySlotsArgs = structure("CopySlotsArgs")


def describe(cache: Any) -> Any:
    """Points at the memory of a cache, which must outlive the result. Raises TypeError for a cache that the
    kernels cannot read.
    """
    if cache.type_name not in KV_TYPES:
        raise TypeError(f"native kernels cannot read a cache of {cache.type_name}")
    for part in (cache.keys, cache.values, cache.scales):
        assert part is None or isinstance(part, np.ndarray) or part.device.type == "cpu", "in main memory"
        assert part is None or _is_contiguous(part)
    in_byte = 2 if cache.type_name == "int4" else 1
    return KvCacheStruct(
        keys=address_of(cache.keys),
        values=None if cache.values is None else address_of(cache.values),
        scales=None if cache.scales is None else address_of(cache.scales),
        type=KV_TYPES[cache.type_name],
        num_heads=cache.keys.shape[1],
        block_size=cache.block_size,
        key_dim=cache.keys.shape[3] * in_byte,
        value_dim=0 if cache.values is None else cache.values.shape[3] * in_byte,
        shared_value_dim=cache.shared_value_dim,
    )


def _is_contiguous(part: Values) -> bool:
    return part.flags.c_contiguous if isinstance(part, np.ndarray) else part.is_contiguous()
