"""Packed products against torch, over odd sizes, with rows that do not know of each other."""

from __future__ import annotations

import ctypes
from ctypes import c_int64

import pytest
import torch
from torch import Tensor

from kernels.linear import self_check
from kernels.linear.formats import DenseWeight, Int8Weight, WeightFormat
from kernels.linear.native import NativePacker, NativeProduct
from kernels.linear.packed import FLOAT32, HALF_PAIRS, PackedWeight, gemm_args, make_workspace, product_ops
from kernels.native import library
from kernels.native.build import machine_levels
from kernels.native.library import NativeLibrary, NativeUnavailableError
from tests.kernels.drawn import CODED_KINDS, float_coded_weight, weight_of


@pytest.fixture
def native(product_level: NativeLibrary) -> NativeLibrary:
    """Every level that has products of its own."""
    return product_level


SHAPES = [(1, 1), (7, 5), (16, 64), (63, 130), (64, 4200), (65, 33), (200, 96), (257, 515), (1000, 64)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 32, 97, 200)


def run(
    native: NativeLibrary,
    weight: PackedWeight,
    x: Tensor,
    out: Tensor,
    *,
    threads: int,
    accumulate: bool = False,
) -> Tensor:
    """One product, rows of x and out inside wider ones."""
    count = c_int64(x.shape[0])
    workspace = make_workspace(native, x.shape[0], weight.inputs, threads)
    workspace.fill(255)
    args = gemm_args(
        weight,
        ctypes.addressof(count),
        x.data_ptr(),
        out.data_ptr(),
        workspace.ctypes.data,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        accumulate=accumulate,
    )
    native.run(product_ops(native, args), num_threads=threads)
    return out


def inside(rows: int, columns: int) -> Tensor:
    """[rows, columns] within a wider tensor of NaN."""
    return torch.full((rows, columns + 3), float("nan"))[:, 1 : columns + 1]


def weights_of(shape: tuple[int, int]) -> dict[str, WeightFormat]:
    """A weight of every format that the shape allows."""
    kinds = [(kind, 0) for kind in ("float32", "bfloat16", "int8", "smoothed w8a8", "fp8 kept")]
    for group in (8, 32, 64, 256):
        if shape[1] % group == 0:
            kinds += [(kind, group) for kind in ("int8", "int4 order", "int4 minimum")]
    for group in (16, 32):
        if shape[1] % group == 0:
            kinds += [(kind, group) for kind in CODED_KINDS]
    if shape[1] % 128 == 0:
        kinds.append(("fp8 kept blocks", 0))
    found: dict[str, WeightFormat] = {
        f"{kind} by {group}": weight_of(kind, *shape, group=group) for kind, group in kinds
    }
    found |= {
        f"float codes by {group}": float_coded_weight(*shape, group=group)
        for group in (2, 64)
        if shape[1] % group == 0
    }
    return found


@pytest.mark.parametrize("shape", [*SHAPES, (48, 256), (130, 768)])
def test_every_format_against_its_meaning(native: NativeLibrary, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    packer = NativePacker(native, num_threads=2)
    bias = torch.randn(shape[0])
    for name, weight in weights_of(shape).items():
        packed = packer.pack(weight, bias)
        exact = weight.dequantize().double()
        for rows in (1, 3, 13, 97):
            x = inside(rows, shape[1])
            x.copy_(torch.randn(rows, shape[1]))
            out = run(native, packed, x, inside(rows, shape[0]), threads=2)
            expected = x.double() @ exact.T + bias
            # What rounding the inputs may cost: 2^-8 for bfloat16, 1/254 of the largest for int8.
            size = x.double().abs() @ exact.abs().T + 1
            if name.startswith(("float32", "float codes", "fp8 kept")):
                allowed = 1e-5 * size
            elif name.startswith("coded"):
                allowed = 2.0**-14 * size
            elif name.startswith("smoothed w8a8"):
                assert isinstance(weight, Int8Weight)
                assert weight.smoothing is not None
                smoothed = x * weight.smoothing
                allowed = smoothed.abs().amax(1, keepdim=True) / 250 * weight.stored().abs().sum(1) + 1e-4
            else:
                allowed = 2.0**-8 * size
            assert ((out - expected).abs() <= allowed).all(), (name, rows)
            again = run(native, packed, x, out.clone(), threads=2, accumulate=True)
            assert torch.allclose(again, 2 * (out - bias) + 2 * bias, rtol=1e-5, atol=1e-4), name


@pytest.mark.parametrize("shape", [(65, 33), (257, 515), (130, 768)])
def test_rows_are_the_same_bits_alone_among_others_and_on_any_threads(
    native: NativeLibrary, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    packer = NativePacker(native, num_threads=1)
    for name, weight in weights_of(shape).items():
        packed = packer.pack(weight)
        x = torch.randn(max(ROWS), shape[1])
        whole = run(native, packed, x, inside(len(x), shape[0]), threads=1)
        assert whole.isfinite().all()
        for rows in ROWS:
            for threads in (1, 3):
                part = run(native, packed, x[-rows:], inside(rows, shape[0]), threads=threads)
                assert torch.equal(part, whole[-rows:]), (name, rows, threads)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("inputs", [160, 1024])
def test_results_that_no_cache_holds_are_those_of_fewer_rows(
    native: NativeLibrary, inputs: int, kind: str
) -> None:
    """Of so many results some levels write past the caches, and multiply in other blocks; float32 as pairs
    of bfloat16, where the level has them.
    """
    rows, outputs = 648, 1712
    packed = NativePacker(native, half_pairs=True).pack(weight_of(kind, outputs, inputs, group=0))
    x = torch.randn(rows, inputs)
    together = run(native, packed, x, torch.full((rows, outputs), float("nan")), threads=2)
    for begin in range(0, rows, 81):
        some = x[begin : begin + 81]
        alone = run(native, packed, some, torch.empty(len(some), outputs), threads=1)
        assert torch.equal(together[begin : begin + 81], alone)


@pytest.mark.parametrize("shape", [(7, 5), (64, 4200), (65, 33), (257, 515), (130, 768)])
def test_float32_as_pairs_of_bfloat16(native: NativeLibrary, shape: tuple[int, int]) -> None:
    """Where the level has them; else the same bits as without."""
    torch.manual_seed(shape[1])
    weight, bias = weight_of("float32", *shape, group=0), torch.randn(shape[0])
    packed = NativePacker(native, num_threads=2, half_pairs=True).pack(weight, bias)
    plain = NativePacker(native, num_threads=2).pack(weight, bias)
    has_pairs = native.function("millrace_has_half_pairs", c_int64)()
    assert packed.struct.format == (HALF_PAIRS if has_pairs else FLOAT32)
    x = inside(max(ROWS), shape[1])
    x.copy_(torch.randn(max(ROWS), shape[1]))
    whole = run(native, packed, x, inside(len(x), shape[0]), threads=2)
    exact = weight.dequantize().double()
    # Of 24 bits 16 are kept on each side, and the product of both rests is left out.
    size = x.double().abs() @ exact.abs().T + 1
    assert ((whole - (x.double() @ exact.T + bias)).abs() <= 2.0**-15 * size).all()
    assert has_pairs or torch.equal(whole, run(native, plain, x, inside(len(x), shape[0]), threads=2))
    for rows in ROWS:
        part = run(native, packed, x[-rows:], inside(rows, shape[0]), threads=3)
        assert torch.equal(part, whole[-rows:]), rows


def test_a_broken_row_is_its_own_fault(native: NativeLibrary) -> None:
    packer = NativePacker(native, num_threads=1)
    for name, weight in weights_of((80, 96)).items():
        packed = packer.pack(weight)
        x = torch.randn(9, 96)
        sound = run(native, packed, x, inside(9, 80), threads=1).clone()
        x[4, 7], x[6, 3] = float("nan"), float("inf")
        out = run(native, packed, x, inside(9, 80), threads=1)
        broken = torch.tensor([4, 6])
        assert not out[broken].isfinite().any(), name
        others = [row for row in range(9) if row not in (4, 6)]
        assert torch.equal(out[others], sound[others]), name


def test_a_product_in_torch(native: NativeLibrary) -> None:
    weight = torch.randn(40, 72)
    product = NativeProduct(
        NativePacker(native, num_threads=1).pack(DenseWeight(values=weight)), num_threads=1
    )
    x = torch.randn(5, 72)
    assert torch.allclose(product(x), x @ weight.T, atol=1e-4)
    assert product(x.bfloat16()).dtype == torch.bfloat16


def test_the_self_check_tells_sound_from_wrong(
    native: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "SHAPES", ((130, 320),))
    assert self_check.largest_error(native.level) <= 1
    original = NativeProduct.__call__
    monkeypatch.setattr(NativeProduct, "__call__", lambda product, x: original(product, x) * 1.5)
    assert self_check.largest_error(native.level) > 1


def test_a_level_that_fails_its_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine_levels():
        pytest.skip("no native library")
    level = machine_levels()[-1]
    monkeypatch.setattr(library, "processor", lambda: "one that was not checked yet")
    monkeypatch.setattr(library, "CHECKED_LEVELS", frozenset({level}))
    monkeypatch.setattr(library, "SELF_CHECK", "no_such_module")
    with pytest.raises(
        NativeUnavailableError, match=rf"self-check of {level} failed \(1\): .*no_such_module"
    ):
        library.load_level.__wrapped__(level)


def test_the_next_level_serves_where_the_best_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = machine_levels()
    if len(levels) < 2:
        pytest.skip("a single level")
    monkeypatch.delenv("NATIVE_KERNELS_LEVEL", raising=False)
    monkeypatch.setattr(library, "load_level", library.load_level.__wrapped__)
    monkeypatch.setattr(library, "processor", lambda: "one that was not checked yet")
    monkeypatch.setattr(library, "CHECKED_LEVELS", frozenset({levels[-1]}))
    monkeypatch.setattr(library, "SELF_CHECK", "no_such_module")
    assert library.best_library().level == levels[-2]
