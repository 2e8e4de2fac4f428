"""Every other Triton kernel against its reference on the CPU: interpreted here, and on a GPU by tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.activation.reference import GATES
from kernels.activation.reference import gate as reference_gate
from kernels.activation.triton_activation import KINDS, gate
from kernels.linear.formats import Fp8Weight, Int4Weight, Int8Weight, pack_levels
from kernels.linear.triton_backend import InvariantLinear, TritonLinear
from kernels.linear.triton_grouped import grouped_product
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_scaled import quantize_rows, scaled_product
from kernels.norm.backends import RowNorm
from kernels.norm.reference import rms_norm as reference_norm
from kernels.norm.triton_norm import TritonNorm, rms_norm
from kernels.paged_cache.channel_cache import ChannelCache, begin_step
from kernels.rope.reference import rotate, rotate_and_store
from kernels.rope.triton_rope import rope_and_store
from kernels.rows import Quantized
from kernels.sampling.triton_sampling import draw, process
from tests.kernels.attention import CPU, assert_near_codes, batch_of, poisoned_cache
from tests.kernels.drawn import drawn, moved, weight_of, whole
from tests.kernels.places import INTERPRETED, needs_float8
from tests.kernels.triton.options import filtered_and_drawn, mixed_options, on

HALF = torch.bfloat16
WIDTHS = (1, 7, 64, 100, 513, *(() if INTERPRETED else (4096, 8192)))
QUANTIZED = ["int4", "int4 minimum", "int8", "w8a8", "fp8", "fp8 blocks"]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all numbers together, in proportion to their size."""
    found, expected = found.float().cpu(), expected.float().cpu()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF] if INTERPRETED else [torch.float32])
@pytest.mark.parametrize("adds", [False, True])
def test_norm(device: torch.device, width: int, dtype: torch.dtype, adds: bool) -> None:
    """The residual is added first; a poisoned row stays alone."""
    x, weight = drawn(5, width).to(dtype), drawn(width, seed=1)
    x[3, 0] = float("nan")
    residual = drawn(5, width, seed=2).to(dtype) if adds else None
    normed = rms_norm(
        x.to(device), weight.to(device), 1e-6, None if residual is None else residual.to(device)
    )
    stream = x if residual is None else x + residual
    if residual is not None:
        assert normed.residual is not None
        torch.testing.assert_close(normed.residual.cpu(), stream, equal_nan=True)
    torch.testing.assert_close(normed.out.cpu(), reference_norm(stream, weight, 1e-6), equal_nan=True)
    assert normed.out[[0, 1, 2, 4]].isfinite().all()
    assert normed.out[3].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weights", ["shared", "each"])
def test_layer_norm(device: torch.device, width: int, weights: str) -> None:
    x = drawn(4, 3, width) + 3.0
    weight = drawn(width, seed=1) if weights == "shared" else drawn(3, width, seed=1)
    bias = drawn(width, seed=2)
    found = TritonNorm().plain(x.to(device), RowNorm(weight.to(device), 1e-5, bias.to(device), centered=True))
    expected = reference_norm(x, weight, 1e-5, bias, centered=True)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
@pytest.mark.parametrize("width", [7, *WIDTHS[3:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETED else [HALF])
def test_rounding_in_the_norm_is_rounding_after_it(
    device: torch.device, quantized: Quantized, width: int, dtype: torch.dtype
) -> None:
    if quantized == "fp8":
        needs_float8()
    x, change = (drawn(5, width, seed=seed).to(device, dtype) for seed in range(2))
    x[2], change[2] = 0.0, 0.0
    weight = drawn(width, seed=2).to(device)
    factors = drawn(width, seed=3).abs().to(device) if quantized == "int8" or not INTERPRETED else None
    norm, learned = TritonNorm(), RowNorm(weight, 1e-5)
    for given in (None, change):
        stream, rows = norm.quantized(x, given, learned, quantized, factors)
        expected, normed = (x, norm.plain(x, learned)) if given is None else norm.added(x, given, learned)
        levels, scale = quantize_rows(normed, quantized, factors=factors)
        assert torch.equal(stream, expected)
        assert rows.dtype == dtype
        if INTERPRETED:
            assert torch.equal(rows.levels.view(torch.uint8), levels.view(torch.uint8))
            assert torch.equal(rows.scale, scale)
            continue
        # Two kernels may add up a row's squares in two orders: a number at the edge of two levels can fall to
        # either side.
        torch.testing.assert_close(rows.scale, scale, rtol=1e-2, atol=0.0)
        assert float((rows.levels.float() == levels.float()).float().mean()) > 0.98


@pytest.mark.parametrize("name", sorted(GATES) if INTERPRETED else ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 33, 1100])
def test_gates(device: torch.device, name: str, size: int) -> None:
    x = drawn(3, 2 * size) * 4
    # Where erf or tanh cancels, what is left of magnitudes up to 200 is rounding.
    rtol = 1e-5 if INTERPRETED else 1e-4
    torch.testing.assert_close(gate(name, x.to(device)).cpu(), reference_gate(name, x), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("name", sorted(KINDS) if INTERPRETED else ["relu2", "xielu"])
@pytest.mark.parametrize("size", [1, 33, 1100])
def test_activations_without_a_gate(device: torch.device, name: str, size: int) -> None:
    x, coefficients = drawn(3, size) * 4, torch.tensor([0.8, 1.3, 0.5, -1e-6])
    found = gate(name, x.to(device), plain=True, coefficients=coefficients.to(device))
    expected = reference_gate(name, x, plain=True, coefficients=coefficients)
    rtol = 1e-5 if INTERPRETED else 1e-4
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("interleaved", [False, True] if INTERPRETED else [False])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "rotated"),
    [(64, 64, 64), (20, 12, 8), (128, 128, 64), *([(48, 0, 16)] if INTERPRETED else [])],
)
def test_rope_and_store(
    device: torch.device, dtype: torch.dtype, interleaved: bool, key_dim: int, value_dim: int, rotated: int
) -> None:
    """Rotation, and a write into the cache: the whole cache, what nobody wrote included."""
    expected, found = (
        poisoned_cache(dtype, 2, key_dim, value_dim, num_blocks=4, block_size=8, device=place)
        for place in (CPU, device)
    )
    sizes = [6 * key_dim, 2 * key_dim, 2 * value_dim]
    angles, slots = drawn(5, rotated // 2, seed=3), torch.tensor([3, 9, 17, 25, 31])
    joined = drawn(5, sum(sizes))

    def split(x: torch.Tensor) -> list[torch.Tensor | None]:
        q, k, v = torch.split(x, sizes, dim=-1)
        parts = [part.unflatten(1, (-1, key_dim)) for part in (q, k)]
        return [*parts, v.unflatten(1, (-1, value_dim)) if value_dim else None]

    q, k, v = split(joined)
    assert q is not None
    assert k is not None
    turned = {"interleaved": interleaved}
    expected.write(rotate(k, angles.cos(), angles.sin(), **turned), v, slots)
    there = angles.to(device)
    parts = split(joined.to(device))
    out = rope_and_store(*parts, there.cos(), there.sin(), slots.to(device), found, **turned)  # type: ignore[arg-type]
    torch.testing.assert_close(
        out.cpu(), rotate(q, angles.cos(), angles.sin(), **turned), atol=1e-5, rtol=1e-4
    )
    for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        # A rounding boundary may fall to either side: one level of int8, or of float8's bits.
        tolerance = 1.0 if ours.element_size() == 1 else 1e-5 if INTERPRETED else 5e-2
        compared = {"atol": tolerance, "rtol": 1e-2, "equal_nan": True}
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), **compared)


@pytest.mark.parametrize("dim", [16, 48])
def test_keys_by_channel_are_stored_as_by_torch(device: torch.device, dim: int) -> None:
    """To the bit; in steps that compute many blocks, none and one; what nobody wrote included."""
    caches = [
        poisoned_cache("kivi4", 2, dim, dim, num_blocks=7, block_size=64, device=at) for at in (CPU, device)
    ]
    for cache in caches:
        assert isinstance(cache, ChannelCache)
        cache.keep_newest_keys(2)
        assert cache.recent is not None
        cache.recent.fill_(float("nan"))
    angles, tables = drawn(260, dim // 2, seed=3), np.array([[4, 2, 0, 5, 3], [1, 6, 0, 0, 0]])
    for spans in ([(0, 0, 50), (1, 0, 20)], [(0, 50, 260), (1, 20, 64)], [(1, 64, 65)]):
        which = [row for row, start, end in spans for _ in range(start, end)]
        at = np.concatenate([np.arange(start, end) for _, start, end in spans])
        slots = torch.from_numpy(tables[which, at // 64] * 64 + at % 64)
        batch = batch_of(
            [end for *_, end in spans],
            [end - start for _, start, end in spans],
            tables[[row for row, *_ in spans]],
            64,
        )
        q, k, v = drawn(at.size, 8, dim, seed=int(at.sum())).split([4, 2, 2], 1)
        k[..., ::3] += 3
        cos, sin = angles[at].cos(), angles[at].sin()
        for cache, place, store in zip(
            caches, (CPU, device), (rotate_and_store, rope_and_store), strict=True
        ):
            assert isinstance(cache, ChannelCache)
            there = slots.to(place)
            begin_step([cache], batch, np.array([2 * row for row, *_ in spans]), there)
            store(*(each.to(place) for each in (q, k, v, cos, sin)), there, cache, interleaved=False)  # type: ignore[operator]
    expected, found = caches
    assert isinstance(expected, ChannelCache)
    assert isinstance(found, ChannelCache)
    if INTERPRETED:
        # On a GPU, rotations differ in their last bit.
        for ours, theirs in ((found.keys, expected.keys), (found.channels, expected.channels)):
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    assert_near_codes(found.keys.cpu(), expected.keys)
    assert_near_codes(found.values.cpu(), expected.values)
    torch.testing.assert_close(found.scales.cpu(), expected.scales, equal_nan=True)
    assert found.recent is not None
    torch.testing.assert_close(found.recent.cpu(), expected.recent, equal_nan=True)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 1), (7, 96, 33), (65, 128, 70)])
@pytest.mark.parametrize("group", [32, 0] if INTERPRETED else [32])
@pytest.mark.parametrize("offset", ["none", "zero", "minimum"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_int4(
    device: torch.device, rows: int, inputs: int, outputs: int, group: int, offset: str, dtype: torch.dtype
) -> None:
    """Levels from the middle, from whole zeros, and with minima and an order; numbers of two bytes are other
    code.
    """
    groups = inputs // group if group else 1
    # A scale of few bits, so that products with zeros are exact.
    scale = whole(1, 64, outputs, groups) / 256
    minimum = {
        "none": None,
        "zero": -whole(0, 16, outputs, groups, seed=1) * scale,
        "minimum": drawn(outputs, groups, seed=1),
    }[offset]
    order = (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(2)) if offset == "minimum" else None
    )
    packed = pack_levels(whole(0, 16, outputs, inputs))
    made = Int4Weight(packed=packed, scale=scale, minimum=minimum, order=order)
    x, bias = drawn(rows, inputs, seed=3).to(dtype), drawn(outputs, seed=4).to(dtype)
    expected = x.float() @ made.dequantize().T + bias.float()
    found = TritonLinear().pack(moved(made, device))(x.to(device), bias.to(device))
    assert error(found, expected) < (1e-2 if dtype == HALF else 1e-5 if INTERPRETED else 1e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 48, 1), (66, 144, 65)])
def test_int8(device: torch.device, rows: int, inputs: int, outputs: int) -> None:
    """Weights alone, and levels by levels."""
    values, scale = whole(-127, 128, outputs, inputs).to(torch.int8), drawn(outputs, 1).abs()
    made = Int8Weight(values=values, scale=scale, smoothing=drawn(inputs, seed=1).abs() + 0.5)
    x, bias = drawn(rows, inputs, seed=3), drawn(outputs, seed=6)
    found = TritonLinear().pack(moved(made, device))(x.to(device))
    torch.testing.assert_close(
        found.cpu(), x @ made.dequantize().T, atol=1e-2, rtol=1e-4 if INTERPRETED else 1e-3
    )
    levels, x_scale = whole(-127, 128, rows, inputs, seed=4).to(torch.int8), drawn(rows, seed=5).abs()
    exact = levels.double() @ values.double().T * x_scale.double()[:, None] * scale.double().T + bias
    given = (levels, x_scale, values, scale[:, 0].contiguous(), bias)
    found = scaled_product(*(part.to(device) for part in given), dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), exact.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 48, 16), (5, 304, 208)])
@pytest.mark.parametrize("blocked", [False, True])
def test_float8(device: torch.device, rows: int, inputs: int, outputs: int, blocked: bool) -> None:
    needs_float8()
    x = drawn(rows, inputs).to(torch.float8_e4m3fn)
    made = weight_of("fp8 blocks" if blocked else "fp8", outputs, inputs, seed=1)
    assert isinstance(made, Fp8Weight)
    x_scale = drawn(rows, -(-inputs // 128)).abs() if blocked else drawn(rows).abs()
    wide = x_scale.repeat_interleave(128, 1)[:, :inputs] if blocked else x_scale[:, None]
    given = (x, x_scale, made.values, made.scale)
    found = scaled_product(*(part.to(device) for part in given), dtype=torch.float32)
    # The float8 units of Hopper accumulate in 14 bits or so.
    allowed = 1e-5 if INTERPRETED else 5e-3
    assert error(found, (x.float() * wide) @ made.dequantize().T) < allowed


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 16, 17, 128, 300])
def test_parts_of_a_sum(device: torch.device, kind: str, rows: int) -> None:
    outputs, inputs = (70, 256) if INTERPRETED else (1024, 8192)
    if kind.startswith("fp8"):
        needs_float8()
    made = moved(weight_of(kind, outputs, inputs), device)
    product, x = TritonLinear().pack(made), drawn(rows, inputs, seed=5).to(device, HALF)
    first = product(x)
    assert error(first, x.float() @ made.dequantize().T) < 5e-2
    # Whichever program arrived last.
    assert all(torch.equal(product(x), first) for _ in range(2 if INTERPRETED else 20))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *QUANTIZED])
@pytest.mark.parametrize("dtype", [torch.float32, HALF] if INTERPRETED else [HALF])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Inputs of several parts, rows of every tile."""
    if kind.startswith("fp8"):
        needs_float8()
    if kind in ("float32", "bfloat16") and getattr(torch, kind) != dtype:
        pytest.skip("rows of a dense weight have its type")
    outputs, inputs = (70, 896) if INTERPRETED else (1000, 1024)
    product = InvariantLinear().pack(moved(weight_of(kind, outputs, inputs, 1), device))
    x = drawn(150, inputs).to(device, dtype)
    everything = product(x)
    assert bool(everything.isfinite().all())
    for first, last in ((0, 1), (0, 17), (60, 100), (149, 150), (3, 140)):
        assert torch.equal(product(x[first:last]), everything[first:last])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_experts_equal_their_own_products(device: torch.device, kind: str) -> None:
    if kind.startswith("fp8"):
        needs_float8()
    tokens, active, inputs, outputs = 21, 2, 256, 130
    weights = [moved(weight_of(kind, outputs, inputs, 10 * index), device) for index in range(4)]
    linear = TritonLinear() if INTERPRETED else InvariantLinear()
    grouped = linear.grouped(weights)
    assert grouped is not None
    x = drawn(tokens, inputs).to(device, torch.float32 if INTERPRETED else HALF)
    # The third expert is nobody's.
    choice = whole(0, 3, tokens * active, seed=2).int()
    choice[choice == 2] = 3
    alone = [linear.pack(each)(x) for each in weights]
    allowed = 1e-4 if INTERPRETED else 1e-2
    # On the way out rows are as many as inputs.
    for rows, each in ((choice, active), (choice[:tokens], 1)):
        found = grouped(x, grouped.group(rows.to(device)), rows_per_input=each)
        expected = torch.stack([alone[int(w)][row // each] for row, w in enumerate(rows)])
        torch.testing.assert_close(found, expected, atol=allowed, rtol=1e-5 if INTERPRETED else 1e-2)


def test_experts(device: torch.device) -> None:
    tokens, active, experts, hidden, size = 21, 2, 5, 40, 24
    x, weights = drawn(tokens, hidden), drawn(experts, size, hidden, seed=1)
    choice = whole(0, experts, tokens * active, seed=2).int()
    groups = GroupedRows.of(choice.to(device), experts)
    found = grouped_product(x.to(device), weights.to(device), groups, rows_per_input=active)
    expected = torch.stack([weights[int(w)] @ x[row // active] for row, w in enumerate(choice)])
    allowed = 1e-4 if INTERPRETED else 1e-3
    torch.testing.assert_close(found.cpu(), expected, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("vocab_size", [3, 1000, 5001 if INTERPRETED else 128_256])
def test_draws_are_those_of_the_torch_sampler(device: torch.device, vocab_size: int) -> None:
    chosen = mixed_options()
    there = on(device, chosen)
    differing = 0
    for seed in range(4):
        logits = drawn(len(chosen.top_k), vocab_size, seed=seed) * 3
        tokens, _, allowed = draw(process(logits.to(device), there), there)
        assert bool(allowed.all())
        filtered, expected = filtered_and_drawn(logits, chosen)
        differing += int((tokens.cpu() != expected).sum())
        kept = filtered.gather(1, tokens.cpu()[:, None])[1:]
        assert bool(kept.isfinite().all()), "a filtered token was drawn"
    # Sums over the vocabulary add up in another order: a token at the very edge of top-p may fall either way.
    assert differing <= (0 if INTERPRETED else 1)
