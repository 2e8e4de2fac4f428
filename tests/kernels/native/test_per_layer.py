"""What layers that differ from one another ask of the native ops: values that are normed or are the keys,
layers that store nothing, a second embedding, gates beside what they multiply, a factor of the stream.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.activation.native import KINDS, ActivationArgs
from kernels.activation.reference import gate
from kernels.embedding.native import TABLE_TYPES, EmbeddingArgs
from kernels.native.library import NativeLibrary
from kernels.norm.native import NormArgs, norm_op
from kernels.norm.reference import rms_norm
from kernels.paged_cache.native import describe
from kernels.per_layer.native import PerLayerArgs
from kernels.rope.native import QK_NORMS, VALUE_KINDS, RopeCacheArgs
from kernels.rope.reference import rotate
from tests.kernels.attention import poisoned_cache
from tests.kernels.native.test_rows import EPS, NAN, run, step_of


@pytest.mark.parametrize("kind", VALUE_KINDS)
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [16, 33, 130])
def test_values_and_layers_that_store_nothing(
    native: NativeLibrary, kind: str, stores: bool, dtype: torch.dtype, dim: int
) -> None:
    torch.manual_seed(dim)
    heads, kv_heads, tokens = 6, 2, 5
    parts = [heads, kv_heads if stores else 0, kv_heads if stores and kind != "of_keys" else 0]
    qkv = torch.randn(tokens, sum(parts) * dim)
    q, k, v = (part.reshape(tokens, -1, dim) for part in qkv.split([part * dim for part in parts], dim=-1))
    q_weight, k_weight = torch.randn(2, dim)
    angles = torch.randn(9, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.tensor([8, 1, 2, 0, 4]), torch.tensor([9, 0, 4, 5, 16])
    rows, cache = qkv.clone(), poisoned_cache(dtype, kv_heads, dim, dim)
    step = step_of(tokens, positions=positions, slots=slots)
    args = RopeCacheArgs(
        step=ctypes.addressof(step),
        qkv=rows.data_ptr(),
        q_norm=q_weight.data_ptr(),
        k_norm=k_weight.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        cache=describe(cache),
        num_heads=heads,
        rotary_dim=dim // 2 * 2,
        norm=QK_NORMS["head"],
        eps=EPS,
        qkv_stride=rows.shape[1],
        stores=int(stores),
        value_kind=VALUE_KINDS[kind],
    )
    run(native, "rope_cache", args)
    turned = rotate(rms_norm(q, q_weight, EPS), cos[positions], sin[positions])
    torch.testing.assert_close(rows[:, : heads * dim], turned.flatten(1), atol=3e-6, rtol=1e-5)
    expected = poisoned_cache(dtype, kv_heads, dim, dim)
    if stores:
        values = {"plain": v, "normed": v, "of_keys": k}[kind]
        values = values if kind == "plain" else rms_norm(values, torch.ones(dim), EPS)
        keys = rotate(rms_norm(k, k_weight, EPS), cos[positions], sin[positions])
        expected.write(keys, values, slots)
    blocks = torch.arange(3)[None]
    for left, right in zip(cache.gather(blocks), expected.gather(blocks), strict=True):
        torch.testing.assert_close(
            left, right, atol=0.04 if dtype != torch.float32 else 3e-6, rtol=1e-2, equal_nan=True
        )


@pytest.mark.parametrize("width", [1, 7, 16, 100])
def test_what_layers_read(native: NativeLibrary, width: int) -> None:
    torch.manual_seed(width)
    layers, tokens = 3, 4
    projected, rows = torch.randn(2, tokens, layers, width)
    weight, out = torch.randn(width), rows.clone()
    step = step_of(tokens)
    args = PerLayerArgs(
        step=ctypes.addressof(step),
        projected=projected.data_ptr(),
        weight=weight.data_ptr(),
        rows=out.data_ptr(),
        num_layers=layers,
        width=width,
        eps=EPS,
        projection_scale=0.3,
        sum_scale=0.7,
    )
    run(native, "per_layer_inputs", args)
    expected = (rms_norm(projected * 0.3, weight, EPS) + rows) * 0.7
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("type_name", TABLE_TYPES)
def test_ids_beyond_a_table_take_its_first_row(native: NativeLibrary, type_name: str) -> None:
    table = torch.randn(5, 33).to(getattr(torch, type_name))
    ids, out = torch.tensor([4, 5, 0, 77]), torch.full((4, 33), NAN)
    step = step_of(4, token_ids=ids)
    args = EmbeddingArgs(
        step=ctypes.addressof(step),
        table=table.data_ptr(),
        out=out.data_ptr(),
        width=33,
        type=TABLE_TYPES[type_name],
        scale=1.5,
        num_rows=5,
    )
    run(native, "embedding", args)
    torch.testing.assert_close(out, table[[4, 0, 0, 0]].float() * 1.5, atol=0, rtol=0)


@pytest.mark.parametrize("width", [1, 7, 16, 513])
def test_gates_beside_what_they_multiply(native: NativeLibrary, width: int) -> None:
    torch.manual_seed(width)
    gates, wide = torch.randn(5, width), torch.randn(5, 3 * width)
    up, out = wide[:, width : 2 * width], gates.clone()
    step = step_of(5)
    args = ActivationArgs(
        step=ctypes.addressof(step),
        gate_up=out.data_ptr(),
        out=out.data_ptr(),
        width=width,
        out_stride=width,
        kind=KINDS["gelu_tanh"],
        up=up.data_ptr(),
        up_stride=3 * width,
    )
    run(native, "activation", args)
    torch.testing.assert_close(out, gate("gelu_tanh", torch.cat((gates, up), -1)), atol=2e-6, rtol=2e-6)


def test_a_factor_of_the_stream(native: NativeLibrary) -> None:
    x, change, (inner, weight) = torch.randn(5, 33), torch.randn(5, 33), torch.randn(2, 33)
    stream, out = x.clone(), torch.full((5, 33), NAN)
    step = step_of(5)
    args = NormArgs(
        step=ctypes.addressof(step),
        x=stream.data_ptr(),
        change=change.data_ptr(),
        change_weight=inner.data_ptr(),
        residual=stream.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        width=33,
        eps=EPS,
        gain=0.6,
    )
    native.run([norm_op(native, args)], num_threads=2)
    expected = (x + rms_norm(change, inner, EPS)) * 0.6
    torch.testing.assert_close(stream, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(out, rms_norm(expected, weight, EPS), atol=4e-6, rtol=4e-6)
