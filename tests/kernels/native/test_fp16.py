"""bfloat16 weights in float16: what is lost and what is not, at the ends of the ranges, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear import native as linear_native
from kernels.linear.formats import DenseWeight
from kernels.linear.native import NativePacker, NativeProduct
from kernels.linear.packed import BFLOAT16
from kernels.native.build import machine_levels
from kernels.native.library import NativeLibrary, NativeUnavailableError, load_level

LEVEL = "avx512_fp16"
LARGEST = torch.finfo(torch.bfloat16).max


@pytest.fixture(scope="module")
def native() -> NativeLibrary:
    """The level that multiplies float16; skipped where the processor or the compiler has none."""
    if LEVEL not in machine_levels():
        pytest.skip("the processor does not multiply float16")
    try:
        return load_level(LEVEL)
    except NativeUnavailableError as error:
        pytest.skip(f"no native library: {error}")


def product(native: NativeLibrary, weight: Tensor, x: Tensor) -> Tensor:
    """x W^T by the packed weight."""
    packed = NativePacker(native, num_threads=2).pack(DenseWeight(values=weight))
    return NativeProduct(packed, num_threads=2)(x)


def stored(native: NativeLibrary, weight: Tensor) -> Tensor:
    """[N, K] what the packed weight stands for: rows with a single one show it."""
    return product(native, weight, torch.eye(weight.shape[1])).T


def near(found: Tensor, exact: Tensor, tolerance: float) -> bool:
    """Whether the root of the mean square of the error is within so much of that of the exact values."""
    error = found.double() - exact
    return bool(error.pow(2).mean().sqrt() <= tolerance * exact.pow(2).mean().sqrt())


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (100, 130), (64, 128)])
def test_weights_are_kept(native: NativeLibrary, shape: tuple[int, int]) -> None:
    """All bits down to 2^-17 of an output's largest weight; below that, to 2^-25 of it."""
    torch.manual_seed(shape[0])
    weight = (torch.randn(shape) * 2.0 ** torch.randint(-30, 2, shape)).bfloat16()
    weight *= 2.0 ** torch.randint(-60, 60, (shape[0], 1))
    kept, most = stored(native, weight), weight.float().abs().amax(1, keepdim=True)
    large = weight.float().abs() >= most * 2.0**-16
    assert torch.equal(kept[large], weight.float()[large])
    assert ((kept - weight).abs() <= most * 2.0**-24).all()
    assert shape[1] == 1 or not torch.equal(kept, weight.float())


def test_float32_sources_keep_eleven_bits(native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 70)
    monkeypatch.setattr(
        linear_native, "_plain", lambda each: (each.values.contiguous(), None, None, BFLOAT16)
    )
    kept = stored(native, weight)
    assert ((kept - weight).abs() <= weight.abs() * 2.0**-11 + 2.0**-22).all()


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_sums_stay_in_range(native: NativeLibrary, rows: int) -> None:
    """Rows and weights all of their largest magnitude, of one sign, at every size. (Equal terms are rounded
    in the same way each time.)
    """
    ones, most = torch.full((rows, 320), 1.999), torch.full((40, 320), 1.9921875)
    for row_power, power in ((0, 0), (120, -100), (-120, 120), (-20, -100), (-60, 127), (-126, 60)):
        x, weight = ones * 2.0**row_power, (most.double() * 2.0**power).bfloat16()
        exact = x.double() @ weight.double().T
        assert near(product(native, weight, x), exact, 1e-2), (row_power, power)
    largest = product(native, torch.full((40, 320), LARGEST).bfloat16(), torch.full((rows, 320), 2.0**-20))
    assert torch.allclose(largest, torch.tensor(LARGEST * 320 * 2.0**-20), rtol=1e-2)


def test_zeros_stay_zero(native: NativeLibrary) -> None:
    weight, x = torch.randn(40, 96).bfloat16(), torch.randn(5, 96)
    weight[3], x[2] = 0, 0
    out = product(native, weight, x)
    assert (out[2] == 0).all()
    assert (out[:, 3] == 0).all()
    assert (out[[0, 1, 3, 4]][:, [0, 2, 39]] != 0).all()


def test_what_is_broken_shows_as_nan_in_its_row_or_output(native: NativeLibrary) -> None:
    weight = torch.randn(70, 96).bfloat16()
    x = torch.randn(5, 96)
    sound = product(native, weight, x)
    weight[9, 4], weight[66, 95] = float("nan"), float("inf")
    out = product(native, weight, x)
    others = [output for output in range(70) if output not in (9, 66)]
    assert out[:, [9, 66]].isnan().all()
    assert torch.equal(out[:, others], sound[:, others])
    x[1, 3], x[3, 95] = float("-inf"), float("nan")
    out = product(native, weight, x)
    assert out[[1, 3]].isnan().all()
    assert torch.equal(out[[0, 2, 4]][:, others], sound[[0, 2, 4]][:, others])


@pytest.mark.parametrize("kind", ["random", "one input a thousand times the others", "of one sign"])
@pytest.mark.parametrize("inputs", [96, 1024, 4160])
def test_less_is_lost_than_by_bfloat16(native: NativeLibrary, kind: str, inputs: int) -> None:
    """No more than by a product of bfloat16 that rounds its rows and its results."""
    torch.manual_seed(inputs)
    x, weight = torch.randn(40, inputs), torch.randn(150, inputs)
    if kind.startswith("one"):
        x[torch.arange(40), torch.randint(0, inputs, (40,))] *= 1000
    if kind == "of one sign":
        x, weight = x.abs(), weight.abs()
    weight = weight.bfloat16()
    exact = x.double() @ weight.double().T
    rounded = (x.bfloat16().double() @ weight.double().T).bfloat16().double()
    allowed = float((rounded - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
    assert near(product(native, weight, x), exact, allowed)


@pytest.mark.parametrize("num_outputs", [1, 64, 150])
def test_float16_weights_are_exact(
    native: NativeLibrary, num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of float16 in float16, subnormal ones included, by pieces of two panels, each with its bias."""
    monkeypatch.setattr(linear_native, "PIECE_OUTPUTS", 128)
    torch.manual_seed(num_outputs)
    weight = (torch.randn(num_outputs, 70) * 2.0 ** torch.randint(-24, 0, (num_outputs, 70))).half()
    weight[:, 0] = 0.75
    bias = torch.randn(num_outputs).half()
    packed = NativePacker(native, num_threads=2).pack(DenseWeight(values=weight), bias)
    assert torch.equal(NativeProduct(packed)(torch.zeros(3, 70)), bias.float().expand(3, -1))
    unbiased = NativePacker(native, num_threads=2).pack(DenseWeight(values=weight))
    assert torch.equal(NativeProduct(unbiased)(torch.eye(70)).T, weight.float())
