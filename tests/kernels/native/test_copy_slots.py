"""Copies of slots inside a layer's cache: whatever its type, all of a slot and nothing else."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kernels.native.library import NativeLibrary, Op, StepStruct
from kernels.paged_cache.host import allocate_host_layer
from kernels.paged_cache.native import CopySlotsArgs, describe


@pytest.mark.parametrize("type_name", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("value_dim", [8, 0])
def test_slots_are_copied_whole(native: NativeLibrary, type_name: str, value_dim: int) -> None:
    cache = allocate_host_layer(
        num_blocks=5,
        block_size=4,
        num_heads=3,
        key_dim=24,
        value_dim=value_dim,
        shared_value_dim=0 if value_dim else 16,
        type_name=type_name,
    )
    draw = np.random.default_rng(1)
    for tensor in cache.tensors():
        tensor.view(np.uint8)[:] = draw.integers(0, 256, tensor.view(np.uint8).shape)
    pairs = np.array([[0, 9], [0, 10], [7, 22], [23, 4], [19, 5]], np.int64)
    expected = [tensor.copy() for tensor in cache.tensors()]
    for tensor in expected:
        for source, target in pairs.tolist():
            tensor[target // 4, :, target % 4] = tensor[source // 4, :, source % 4]
    step = StepStruct(num_slot_copies=len(pairs), slot_copies=pairs.ctypes.data)
    args = CopySlotsArgs(step=ctypes.addressof(step), cache=describe(cache))
    native.run([Op(native, "copy_slots", args)], num_threads=2)
    for tensor, other in zip(cache.tensors(), expected, strict=True):
        assert tensor.tobytes() == other.tobytes()
