"""Every other Triton kernel on the device against its reference on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.activation.reference import gate as reference_gate
from kernels.activation.triton_activation import gate
from kernels.linear.formats import (
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
    pack_levels,
)
from kernels.linear.triton_backend import InvariantLinear, TritonLinear
from kernels.linear.triton_grouped import grouped_product
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_scaled import quantize_rows, scaled_product
from kernels.norm.reference import rms_norm as reference_norm
from kernels.norm.triton_norm import TritonNorm, rms_norm
from kernels.paged_cache import allocate_layer
from kernels.rope.reference import rotate
from kernels.rope.triton_rope import rope_and_store
from kernels.rows import Quantized
from kernels.sampling.filters import apply_min_p, apply_top_k_top_p
from kernels.sampling.noise import gumbel, row_keys
from kernels.sampling.triton_sampling import RowOptions, draw, process
from tests.gpu.conftest import REHEARSES

WIDTHS = (1, 7, 100, 513, *(() if REHEARSES else (4096, 8192)))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm(device: torch.device, width: int) -> None:
    x, residual, weight = drawn(5, width), drawn(5, width, seed=2), drawn(width, seed=1)
    x[3, 0] = float("nan")
    normed = rms_norm(x.to(device), weight.to(device), 1e-6, residual.to(device))
    expected = reference_norm(x + residual, weight, 1e-6)
    torch.testing.assert_close(normed.out.cpu(), expected, equal_nan=True)
    assert bool(normed.out[[0, 1, 2, 4]].isfinite().all()), "a poisoned row stays alone"


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
@pytest.mark.parametrize("width", WIDTHS[2:])
def test_rounding_in_the_norm_is_rounding_after_it(
    device: torch.device, half: torch.dtype, quantized: Quantized, width: int
) -> None:
    if quantized == "fp8" and not REHEARSES and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    x, change = (drawn(5, width, seed=seed).to(device, half) for seed in range(2))
    weight, factors = drawn(width, seed=2).to(device), drawn(width, seed=3).abs().to(device)
    norm = TritonNorm()
    stream, rows = norm.quantized(x, change, weight, 1e-5, quantized, factors)
    expected, normed = norm.added(x, change, weight, 1e-5)
    levels, scale = quantize_rows(normed, quantized, factors=factors)
    assert torch.equal(stream, expected)
    # Two kernels may add up a row's squares in two orders: a number at the edge of two levels can fall to
    # either side.
    torch.testing.assert_close(rows.scale, scale, rtol=1e-2, atol=0.0)
    assert float((rows.levels.float() == levels.float()).float().mean()) > 0.98


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 33, 1100])
def test_gates(device: torch.device, name: str, size: int) -> None:
    x = drawn(3, 2 * size) * 4
    torch.testing.assert_close(gate(name, x.to(device)).cpu(), reference_gate(name, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("key_dim", "value_dim", "rotated"), [(64, 64, 64), (20, 12, 8), (128, 128, 64)])
def test_rope_and_store(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, rotated: int
) -> None:
    def cache_on(place: torch.device):  # type: ignore[no-untyped-def]
        made = allocate_layer(
            num_blocks=4,
            block_size=8,
            num_heads=2,
            key_dim=key_dim,
            value_dim=value_dim,
            shared_value_dim=0,
            dtype=dtype,
            device=place,
        )
        for tensor in made.tensors():
            tensor.fill_(77)
        return made

    sizes = [6 * key_dim, 2 * key_dim, 2 * value_dim]
    joined = drawn(5, sum(sizes))
    angles, slots = drawn(5, rotated // 2, seed=3), torch.tensor([3, 9, 17, 25, 31])

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = torch.split(x, sizes, dim=-1)
        return [q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim)), v.unflatten(1, (-1, value_dim))]

    q, k, v = split(joined)
    expected, found = cache_on(torch.device("cpu")), cache_on(device)
    expected.write(rotate(k, angles.cos(), angles.sin(), interleaved=False), v, slots)
    there = split(joined.to(device))
    turned = angles.to(device)
    out = rope_and_store(*there, turned.cos(), turned.sin(), slots.to(device), found, interleaved=False)
    torch.testing.assert_close(
        out.cpu(), rotate(q, angles.cos(), angles.sin(), interleaved=False), atol=1e-5, rtol=1e-4
    )
    blocks = torch.arange(4)[None]
    for ours, theirs in zip(found.gather(blocks.to(device)), expected.gather(blocks), strict=True):
        # A rounding boundary may fall to either side.
        torch.testing.assert_close(ours.cpu(), theirs, atol=5e-2, rtol=7e-2)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 1), (7, 96, 33), (65, 128, 70)])
@pytest.mark.parametrize("offset", ["none", "zero", "minimum"])
@pytest.mark.parametrize("wide", [False, True])
def test_int4(
    device: torch.device, half: torch.dtype, rows: int, inputs: int, outputs: int, offset: str, wide: bool
) -> None:
    """Levels from the middle, from whole zeros, and with minima; numbers of two bytes are other code."""
    groups = inputs // 32
    # A scale of few bits, so that products with zeros are exact.
    scale = whole(1, 64, outputs, groups) / 256
    minimum = {
        "none": None,
        "zero": -whole(0, 16, outputs, groups, seed=1) * scale,
        "minimum": drawn(outputs, groups, seed=1),
    }[offset]
    packed = pack_levels(whole(0, 16, outputs, inputs))
    x = drawn(rows, inputs, seed=3).to(torch.float32 if wide else half)
    expected = x.float() @ Int4Weight(packed=packed, scale=scale, minimum=minimum).dequantize().T
    there = [None if part is None else part.to(device) for part in (packed, scale, minimum)]
    product = TritonLinear().pack(Int4Weight(packed=there[0], scale=there[1], minimum=there[2]))
    found = product(x.to(device)).cpu().float()
    assert float((found - expected).norm() / expected.norm()) < (1e-4 if wide else 1e-2)


@pytest.mark.parametrize("kind", ["int4", "int8", "w8a8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize("rows", [1, 16, 17, 128, 300])
def test_parts_of_a_sum(device: torch.device, half: torch.dtype, kind: str, rows: int) -> None:
    outputs, inputs = (70, 256) if REHEARSES else (1024, 8192)
    weight = _weight(kind, outputs, inputs, 0, device, half)
    product, x = TritonLinear().pack(weight), drawn(rows, inputs, seed=5).to(device, half)
    expected = x.float() @ weight.dequantize().T
    first = product(x)
    assert float((first.float() - expected).norm() / expected.norm()) < 5e-2
    # Whichever program arrived last.
    assert all(torch.equal(product(x), first) for _ in range(20))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 48, 1), (66, 144, 65)])
def test_int8(device: torch.device, rows: int, inputs: int, outputs: int) -> None:
    values, scale = whole(-127, 128, outputs, inputs).to(torch.int8), drawn(outputs, 1).abs()
    x = drawn(rows, inputs, seed=3)
    found = TritonLinear().pack(Int8Weight(values=values.to(device), scale=scale.to(device)))(x.to(device))
    torch.testing.assert_close(
        found.cpu(), x @ Int8Weight(values=values, scale=scale).dequantize().T, atol=1e-2, rtol=1e-3
    )
    levels, x_scale = whole(-127, 128, rows, inputs, seed=4).to(torch.int8), drawn(rows, seed=5).abs()
    exact = levels.double() @ values.double().T * x_scale.double()[:, None] * scale.double().T
    found = scaled_product(
        levels.to(device),
        x_scale.to(device),
        values.to(device),
        scale[:, 0].contiguous().to(device),
        dtype=torch.float32,
    )
    torch.testing.assert_close(found.cpu(), exact.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 48, 16), (5, 304, 208)])
@pytest.mark.parametrize("blocked", [False, True])
def test_float8(device: torch.device, rows: int, inputs: int, outputs: int, blocked: bool) -> None:
    if not REHEARSES and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    x = drawn(rows, inputs).to(torch.float8_e4m3fn)
    weight = drawn(outputs, inputs, seed=1).to(torch.float8_e4m3fn)
    columns = -(-inputs // 128)
    if blocked:
        x_scale, weight_scale = drawn(rows, columns).abs(), drawn(-(-outputs // 128), columns, seed=2).abs()
        left = x.float() * x_scale.repeat_interleave(128, 1)[:, :inputs]
        wide = weight_scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        expected = left @ (weight.float() * wide).T
    else:
        x_scale, weight_scale = drawn(rows).abs(), drawn(outputs, seed=2).abs()
        expected = (x.float() * x_scale[:, None]) @ (weight.float() * weight_scale[:, None]).T
    found = scaled_product(
        x.to(device), x_scale.to(device), weight.to(device), weight_scale.to(device), dtype=torch.float32
    )
    # The float8 units of Hopper accumulate in 14 bits or so.
    assert float((found.cpu() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("kind", ["dense", "fp8", "w8a8", "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, half: torch.dtype, kind: str) -> None:
    outputs, inputs = (70, 128) if REHEARSES else (1000, 1024)
    product = InvariantLinear().pack(_weight(kind, outputs, inputs, 0, device, half))
    x = drawn(150, inputs, seed=5).to(device, half)
    everything = product(x)
    for first, last in ((0, 1), (0, 17), (60, 70), (149, 150), (3, 140)):
        assert torch.equal(product(x[first:last]), everything[first:last])


@pytest.mark.parametrize("kind", ["int4", "int8", "w8a8", "fp8", "fp8 blocks"])
def test_quantized_experts_equal_their_own_products(
    device: torch.device, half: torch.dtype, kind: str
) -> None:
    tokens, active, inputs, outputs = 21, 2, 256, 130
    weights = [_weight(kind, outputs, inputs, 10 * index, device, half) for index in range(4)]
    linear = InvariantLinear()
    grouped = linear.grouped(weights)
    assert grouped is not None
    x = drawn(tokens, inputs).to(device, half)
    choice = whole(0, 3, tokens * active, seed=2).int()
    found = grouped(x, grouped.group(choice.to(device)), rows_per_input=active)
    alone = [linear.pack(weight)(x) for weight in weights]
    expected = torch.stack([alone[int(w)][row // active] for row, w in enumerate(choice)])
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def _weight(
    kind: str, outputs: int, inputs: int, seed: int, device: torch.device, half: torch.dtype
) -> WeightFormat:
    """A random weight of one format on the device."""
    if kind.startswith("fp8") and not REHEARSES and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    if kind == "dense":
        return DenseWeight(values=drawn(outputs, inputs, seed=seed).to(device, half))
    if kind == "int4":
        packed = pack_levels(whole(0, 16, outputs, inputs, seed=seed))
        scale = drawn(outputs, inputs // 32, seed=seed).abs() / 8
        return Int4Weight(packed=packed.to(device), scale=scale.to(device))
    if kind.startswith("fp8"):
        shape = (-(-outputs // 128), inputs // 128) if kind == "fp8 blocks" else (outputs,)
        values = drawn(outputs, inputs, seed=seed).to(device).to(torch.float8_e4m3fn)
        return Fp8Weight(values=values, scale=drawn(*shape, seed=seed + 1).abs().to(device))
    values = whole(-127, 128, outputs, inputs, seed=seed).to(torch.int8)
    return Int8Weight(
        values=values.to(device),
        scale=(drawn(outputs, 1, seed=seed).abs() / 100).to(device),
        activations="int8" if kind == "w8a8" else "float",
    )


def test_experts(device: torch.device) -> None:
    tokens, active, experts, hidden, size = 21, 2, 5, 40, 24
    x, weights = drawn(tokens, hidden), drawn(experts, size, hidden, seed=1)
    choice = whole(0, experts, tokens * active, seed=2).int()
    groups = GroupedRows.of(choice.to(device), experts)
    found = grouped_product(x.to(device), weights.to(device), groups, rows_per_input=active)
    expected = torch.stack([weights[int(w)] @ x[row // active] for row, w in enumerate(choice)])
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("vocab_size", [3, 1000, *(() if REHEARSES else (128_256,))])
def test_draws_are_those_of_the_torch_sampler(device: torch.device, vocab_size: int) -> None:
    rows = 6
    seeds = np.arange(rows, dtype=np.uint64) * np.uint64(0xFFFF_FFFF_FFFF) + np.uint64(5)
    parts = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.2]),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.0, 0.1, 0.0]),
        "top_k": torch.tensor([5, 0, 3, 40, 0, 1], dtype=torch.int32),
        "top_p": torch.tensor([0.5, 0.3, 1.0, 0.9, 0.95, 1.0]),
        "noise_keys": torch.from_numpy(row_keys(seeds, np.arange(rows) % 2, np.arange(rows) * 7)),
    }
    there = RowOptions(**{name: part.to(device) for name, part in parts.items()})
    equal = total = 0
    for seed in range(4):
        logits = drawn(rows, vocab_size, seed=seed) * 3
        tokens, _, allowed = draw(process(logits.to(device), there), there)
        assert bool(allowed.all())
        warm = logits / torch.where(parts["temperature"] > 0, parts["temperature"], 1.0)[:, None]
        filtered = apply_top_k_top_p(apply_min_p(warm, parts["min_p"]), parts["top_k"].long(), parts["top_p"])
        noisy = filtered.double() + gumbel(parts["noise_keys"], vocab_size)
        expected = torch.where(parts["temperature"] > 0, noisy.argmax(-1), logits.argmax(-1))
        equal += int((tokens.cpu() == expected).sum())
        total += rows
        assert bool(filtered.gather(1, tokens.cpu()[:, None])[1:].isfinite().all()), (
            "a filtered token was drawn"
        )
    # Sums over the vocabulary add up in another order: a token at the very edge of top-p may fall either way.
    assert equal >= total - 1
