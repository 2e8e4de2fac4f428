"""A layer's storage as the native kernels see it (kv_cache.h)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kernels.host import Values, address_of, row_stride
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP

# Names of types to values of KvType.
KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3, "float8_e4m3fn": 3, "kivi4": 4}


class Storage(Protocol):
    """What the kernels read of a layer's keys and values, whoever holds them."""

    block_size: int
    shared_value_dim: int
    in_windows: bool

    @property
    def keys(self) -> Values:
        """[N, K, P, D], of kivi4 two elements to a byte."""

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
KeyGroupsArgs = structure("KeyGroupsArgs")


def describe(cache: Any) -> Any:
    """Points at the memory of a cache, which must outlive the result. Raises TypeError for a cache that the
    kernels cannot read.
    """
    if cache.type_name not in KV_TYPES:
        raise TypeError(f"native kernels cannot read a cache of {cache.type_name}")
    for part in (cache.keys, cache.values, cache.scales):
        assert part is None or isinstance(part, np.ndarray) or part.device.type == "cpu", "in main memory"
        assert part is None or _is_contiguous(part)
    in_byte = 2 if cache.type_name == BY_CHANNEL else 1
    channels, recent = getattr(cache, "channels", None), getattr(cache, "recent", None)
    assert cache.type_name != BY_CHANNEL or cache.block_size == KEY_GROUP, f"blocks of {cache.block_size}"
    return KvCacheStruct(
        keys=address_of(cache.keys),
        values=None if cache.values is None else address_of(cache.values),
        scales=None if cache.scales is None else address_of(cache.scales),
        channels=None if channels is None else address_of(channels),
        recent=None if recent is None else address_of(recent),
        type=KV_TYPES[cache.type_name],
        num_heads=cache.keys.shape[1],
        block_size=cache.block_size,
        key_dim=cache.keys.shape[3] * in_byte,
        value_dim=0 if cache.values is None else cache.values.shape[3] * in_byte,
        shared_value_dim=cache.shared_value_dim,
    )


def key_group_ops(
    library: NativeLibrary, step: int, cache: Any, keys: Any, *, copies_slots: bool = False
) -> tuple[list[Op], list[Op]]:
    """Of keys by channel what comes before attention and what behind it; `step` is an address, `keys`
    [T, K * D] float32 those of the step, rotated. Nothing of other types.
    """
    if cache.type_name != BY_CHANNEL:
        return [], []
    args = KeyGroupsArgs(step=step, cache=describe(cache), keys=address_of(keys), key_stride=row_stride(keys))
    names = ("copy_recent", "close_groups", "keep_recent")
    *before, keep = (Op(library, name, args, cache, keys) for name in names[not copies_slots :])
    return before, [keep]


def _is_contiguous(part: Values) -> bool:
    return part.flags.c_contiguous if isinstance(part, np.ndarray) else part.is_contiguous()
