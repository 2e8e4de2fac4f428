"""Norms, gates, rotation with cache write: against their references, with poisoned outputs; and the same bits
for a row alone and among others.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from kernels.activation.native import KINDS, ActivationArgs, SoftCapArgs
from kernels.activation.reference import GATES, gate
from kernels.native.library import NativeLibrary, Op, StepStruct
from kernels.norm.native import NormArgs, norm_op
from kernels.norm.reference import rms_norm
from kernels.paged_cache.native import describe
from kernels.paged_cache.store import LayerCache
from kernels.rope.native import QK_NORMS, HeadProductArgs, LatentCacheArgs, RopeCacheArgs
from kernels.rope.reference import rotate
from tests.kernels.attention import poisoned_cache

EPS = 1e-6
NAN = float("nan")
TYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
WIDTHS = [1, 7, 16, 63, 64, 100, 129, 1000]


def run(library: NativeLibrary, name: str, args: ctypes.Structure, num_threads: int = 2) -> None:
    library.run([Op(library, name, args)], num_threads=num_threads)


def step_of(num_tokens: int, **pointers: Tensor) -> ctypes.Structure:
    return StepStruct(num_tokens=num_tokens, **{name: part.data_ptr() for name, part in pointers.items()})


def normed(
    library: NativeLibrary,
    x: Tensor,
    change: Tensor | None,
    change_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream and its norm; a layer norm with that bias, if there is one."""
    more = None if bias is None else bias.data_ptr()
    residual, out = torch.full_like(x, NAN), torch.full_like(x, NAN)
    step = step_of(len(x))
    args = NormArgs(
        step=ctypes.addressof(step),
        x=x.data_ptr(),
        change=None if change is None else change.data_ptr(),
        change_weight=None if change_weight is None else change_weight.data_ptr(),
        residual=residual.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        width=x.shape[1],
        eps=EPS,
        centered=bias is not None,
        bias=more,
        change_bias=more if change_weight is not None else None,
    )
    library.run([norm_op(library, args)], num_threads=2)
    return residual, out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("placement", ["plain", "added", "normed"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_norm(native: NativeLibrary, width: int, placement: str, layer_norm: bool) -> None:
    torch.manual_seed(width)
    x, change = torch.randn(2, 9, width) + 3.0
    inner, weight, bias = torch.randn(3, width)
    given = bias if layer_norm else None
    added = None if placement == "plain" else change
    inner_weight = inner if placement == "normed" else None
    stream, out = normed(native, x, added, inner_weight, weight, given)
    joined = x + rms_norm(change, inner, EPS, given, centered=layer_norm)
    expected = {"plain": x, "added": x + change, "normed": joined}[placement]
    torch.testing.assert_close(stream, expected, atol=2e-6, rtol=2e-6)
    again = rms_norm(expected, weight, EPS, given, centered=layer_norm)
    # Of one element nothing is left once its mean is gone, but what rounding leaves of it.
    torch.testing.assert_close(out, again, atol=4e-6, rtol=4e-6)
    some = slice(4, 5)
    part = None if added is None else change[some].clone()
    parts = normed(native, x[some].clone(), part, inner_weight, weight, given)
    assert torch.equal(parts[0], stream[some])
    assert torch.equal(parts[1], out[some])


def test_norm_of_logit_rows(native: NativeLibrary) -> None:
    x, weight, wanted = torch.randn(7, 33), torch.randn(33), torch.tensor([6, 0, 3])
    out = torch.full((3, 33), NAN)
    step = step_of(7, logit_rows=wanted)
    step.num_logit_rows = 3
    args = NormArgs(
        step=ctypes.addressof(step),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        width=33,
        logit_rows=1,
        eps=EPS,
    )
    native.run([norm_op(native, args)], num_threads=2)
    torch.testing.assert_close(out, rms_norm(x[wanted], weight, EPS), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [*WIDTHS, 1537])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("plain", [False, True])
def test_activations_with_factors_before_and_gates_after(
    native: NativeLibrary, width: int, kind: str, plain: bool
) -> None:
    torch.manual_seed(width)
    coefficients = torch.tensor([0.8, 1.3, 0.5, -1e-6])
    rows, gates = 3 * torch.randn(5, width if plain else 2 * width), torch.randn(5)
    factors, places = torch.rand(9), torch.tensor([8, 0, 3, 3, 7])

    def activated(some: slice) -> Tensor:
        given, place, gate_of = rows[some].clone(), places[some].clone(), gates[some].clone()
        out = torch.full((len(given), width), NAN)
        step = step_of(len(given))
        args = ActivationArgs(
            step=ctypes.addressof(step),
            gate_up=given.data_ptr(),
            out=out.data_ptr(),
            width=width,
            out_stride=width,
            kind=KINDS[kind],
            plain=plain,
            coefficients=coefficients.data_ptr(),
            factors=factors.data_ptr(),
            places=place.data_ptr(),
            gates=gate_of.data_ptr(),
        )
        run(native, "activation", args)
        return out

    found = activated(slice(None))
    expected = gate(kind, rows * factors[places, None], plain=plain, coefficients=coefficients)
    torch.testing.assert_close(found, expected * torch.sigmoid(gates)[:, None], atol=1e-5, rtol=3e-6)
    assert torch.equal(activated(slice(3, 4)), found[3:4])


@pytest.mark.parametrize("width", [*WIDTHS, 1537])
@pytest.mark.parametrize("kind", GATES)
def test_gates(native: NativeLibrary, width: int, kind: str) -> None:
    torch.manual_seed(width)
    rows = 8 * torch.randn(5, 2 * width)
    rows[1] *= 40.0
    rows[2] *= 0.01

    def gated(some: Tensor) -> Tensor:
        out = torch.full((len(some), width), NAN)
        step = step_of(len(some))
        args = ActivationArgs(
            step=ctypes.addressof(step),
            gate_up=some.data_ptr(),
            out=out.data_ptr(),
            width=width,
            out_stride=width,
            kind=KINDS[kind],
        )
        run(native, "activation", args)
        return out

    found = gated(rows)
    torch.testing.assert_close(found, gate(kind, rows), atol=1e-4, rtol=3e-6)
    assert torch.equal(gated(rows[3:4].clone()), found[3:4])
    rows[0, 0] = NAN
    assert gated(rows)[0, 0].isnan()


def test_logit_cap(native: NativeLibrary) -> None:
    logits = 40 * torch.randn(3, 77)
    expected = 30 * torch.tanh(logits / 30)
    step = StepStruct(num_logit_rows=3)
    run(native, "soft_cap", SoftCapArgs(ctypes.addressof(step), logits.data_ptr(), 77, 30.0))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)


def assert_same_cache(found: LayerCache, expected: LayerCache) -> None:
    for left, right in zip(found.tensors(), expected.tensors(), strict=True):
        if left.element_size() == 1:
            # A level may round the other way when the rotation differs in its last bit. Neighbours in float8
            # are so in their bytes.
            assert (left.int() - right.int()).abs().max() <= 1
        else:
            exact = left.dtype == torch.float32
            atol, rtol = (1e-6, 1e-5) if exact else (1e-6, 8e-3)
            torch.testing.assert_close(left, right, atol=atol, rtol=rtol, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (64, 64), (20, 12), (33, 8), (128, 128), (80, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [*QK_NORMS, "each, centered", "last"])
def test_rotation_and_cache_write(
    native: NativeLibrary, dtype: torch.dtype, dim: int, rotary: int, interleaved: bool, norm: str
) -> None:
    torch.manual_seed(dim)
    heads, kv_heads, tokens = 6, 2, 7
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    qkv[3, heads * dim : (heads + 1) * dim] = 0.0
    sizes = {
        "none": (1, 1),
        "full": (heads * dim, kv_heads * dim),
        "each, centered": ((heads, dim), (kv_heads, dim)),
    }
    q_weight, k_weight = (torch.randn(size) for size in sizes.get(norm, (dim, dim)))
    q_scales = torch.rand(40) if norm == "last" else None
    angles = torch.randn(40, rotary // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([3, 0, 39, 5, 5, 8, 9])
    slots = torch.tensor([0, 17, 3, 8, 11, 23, 19])

    def written(some: list[int]) -> tuple[Tensor, LayerCache]:
        rows, cache = qkv[some].clone(), poisoned_cache(dtype, kv_heads, dim, dim)
        at, to = positions[some].clone(), slots[some].clone()
        step = step_of(len(some), positions=at, slots=to)
        args = RopeCacheArgs(
            step=ctypes.addressof(step),
            qkv=rows.data_ptr(),
            q_norm=q_weight.data_ptr(),
            k_norm=k_weight.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            cache=describe(cache),
            num_heads=heads,
            rotary_dim=rotary,
            interleaved=interleaved,
            norm=QK_NORMS.get(norm, QK_NORMS["head"]),
            eps=EPS,
            norm_stride=dim if norm == "each, centered" else 0,
            norm_centered=norm == "each, centered",
            norm_last=norm == "last",
            q_scales=None if q_scales is None else q_scales.data_ptr(),
            qkv_stride=rows.shape[1],
            stores=1,
        )
        run(native, "rope_cache", args)
        return rows[:, : heads * dim], cache

    everyone = list(range(tokens))
    found, cache = written(everyone)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    if norm == "full":
        q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
    q, k, v = (part.reshape(tokens, -1, dim) for part in (q, k, v))
    centered = norm == "each, centered"
    if centered or norm == "head":
        q, k = (rms_norm(part, w, EPS, centered=centered) for part, w in ((q, q_weight), (k, k_weight)))
    q, k = (rotate(part, cos[positions], sin[positions], interleaved=interleaved) for part in (q, k))
    if norm == "last":
        q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
    if q_scales is not None:
        q = q * q_scales[positions, None, None]
    torch.testing.assert_close(found, q.flatten(1), atol=3e-6, rtol=1e-5)
    expected = poisoned_cache(dtype, kv_heads, dim, dim)
    expected.write(k, v, slots)
    assert_same_cache(cache, expected)
    # Token 4's row and its places in the cache have the same bits when it comes alone.
    alone, only = written([4])
    assert torch.equal(alone[0], found[4])
    for left, right in zip(only.tensors(), cache.tensors(), strict=True):
        assert torch.equal(left[2, :, 3], right[2, :, 3])


@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_are_not_finite_stay_so(native: NativeLibrary, dtype: torch.dtype) -> None:
    for bad in (NAN, float("inf")):
        qkv = torch.randn(1, 3 * 8)
        qkv[0, 17] = bad
        cache = poisoned_cache(dtype, 1, 8, 8)
        position, slot, table = torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 1)
        step = step_of(1, positions=position, slots=slot)
        args = RopeCacheArgs(
            step=ctypes.addressof(step),
            qkv=qkv.data_ptr(),
            cos=table.data_ptr(),
            sin=table.data_ptr(),
            cache=describe(cache),
            num_heads=1,
            qkv_stride=24,
            stores=1,
        )
        run(native, "rope_cache", args)
        keys, values = cache.gather(torch.tensor([[0]]))
        assert keys[0, 0, 0].isfinite().all()
        assert not values[0, 0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_latent_queries_and_cache(native: NativeLibrary, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(1)
    heads, nope, rotary, rank, tokens = 3, 10, 8, 40, 5
    down, q = torch.randn(tokens, rank + rotary), torch.randn(tokens, heads, nope + rotary)
    weight, up = torch.randn(rank), torch.randn(heads, nope, rank)
    angles = torch.randn(9, rotary // 2)
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.tensor([8, 1, 2, 0, 4]), torch.tensor([9, 0, 4, 5, 16])
    queries, cache = (
        torch.full((tokens, heads, rank + rotary), NAN),
        poisoned_cache(dtype, 1, rank + rotary, 0),
    )
    step = step_of(tokens, positions=positions, slots=slots)
    latent = LatentCacheArgs(
        step=ctypes.addressof(step),
        down=down.data_ptr(),
        latent_norm=weight.data_ptr(),
        q=q.data_ptr(),
        queries=queries.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        cache=describe(cache),
        num_heads=heads,
        nope_dim=nope,
        rotary_dim=rotary,
        interleaved=interleaved,
        eps=EPS,
    )
    absorb = HeadProductArgs(
        step=ctypes.addressof(step),
        x=q.data_ptr(),
        weight=up.data_ptr(),
        out=queries.data_ptr(),
        num_heads=heads,
        inputs=nope,
        outputs=rank,
        x_stride=nope + rotary,
        out_stride=rank + rotary,
    )
    native.run([Op(native, "latent_cache", latent), Op(native, "head_product", absorb)], num_threads=2)
    turned = rotate(q[..., nope:], cos[positions], sin[positions], interleaved=interleaved)
    absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], up)
    torch.testing.assert_close(queries, torch.cat((absorbed, turned), -1), atol=1e-5, rtol=1e-5)
    key_part = rotate(down[:, None, rank:], cos[positions], sin[positions], interleaved=interleaved)
    expected = poisoned_cache(dtype, 1, rank + rotary, 0)
    stored = rms_norm(down[:, :rank], weight, EPS)
    expected.write(torch.cat((stored[:, None], key_part), -1), None, slots)
    assert_same_cache(cache, expected)
