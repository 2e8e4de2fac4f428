"""bfloat16 weights in 12 bits: when they are kept so, what is lost, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear.formats import DenseWeight
from kernels.linear.native import NativePacker, NativeProduct
from kernels.linear.packed import BFLOAT16, FLOAT12, PackedWeight
from kernels.native.library import NativeLibrary
from tests.kernels.native.test_fp16 import LEVEL as FLOAT16_LEVEL
from tests.kernels.native.test_fp16 import product, stored


@pytest.fixture
def native(product_level: NativeLibrary) -> NativeLibrary:
    """Every level that multiplies weights out of 12 bits."""
    if not NativePacker(product_level).packs_float12:
        pytest.skip(f"{product_level.level} keeps 16 bits")
    return product_level


def pack(library: NativeLibrary, weight: Tensor, *, float12: bool = True) -> PackedWeight:
    """A weight [N, K] as the level keeps it."""
    return NativePacker(library, num_threads=2, float12=float12).pack(DenseWeight(values=weight))


def spread(outputs: int, inputs: int, lowest: int) -> Tensor:
    """Magnitudes evenly from 2^lowest to just below 2, each output's scaled by a power of two."""
    powers = torch.randint(lowest, 1, (outputs, inputs))
    powers[:, 0] = 0
    weight = (torch.rand(outputs, inputs) + 1).bfloat16().clamp(max=1.9921875).float() * 2.0**powers
    signs = torch.randint(0, 2, (outputs, inputs)) * 2.0 - 1.0
    return (weight * signs * 2.0 ** torch.randint(-60, 60, (outputs, 1))).bfloat16()


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (33, 70), (48, 130), (100, 64), (150, 257)])
def test_nothing_is_lost_within_fourteen_powers_of_two(native: NativeLibrary, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    weight = spread(*shape, lowest=-14)
    weight[:, 1:][torch.rand(shape[0], shape[1] - 1) < 0.1] = 0
    assert pack(native, weight).struct.format == FLOAT12
    assert torch.equal(stored(native, weight), weight.float())


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 11, 12, 13, 24, 32, 37, 97, 200])
@pytest.mark.parametrize("shape", [(16, 64), (33, 70), (48, 130), (150, 257), (200, 1024)])
def test_products_are_those_of_16_bits(native: NativeLibrary, shape: tuple[int, int], num_rows: int) -> None:
    """Bit for bit, for any number of rows and any width of the last panel."""
    torch.manual_seed(num_rows)
    weight, x = spread(*shape, lowest=-14), torch.randn(num_rows, shape[1])
    short, plain = pack(native, weight), pack(native, weight, float12=False)
    assert (short.struct.format, plain.struct.format) == (FLOAT12, BFLOAT16)
    found = NativeProduct(short, num_threads=2)(x)
    assert torch.equal(found, NativeProduct(plain, num_threads=2)(x))
    assert torch.equal(found[0], NativeProduct(short, num_threads=1)(x[:1])[0])


def test_a_quarter_less_is_kept(native: NativeLibrary) -> None:
    weight = torch.randn(256, 1024).bfloat16()
    short, plain = pack(native, weight), pack(native, weight, float12=False)
    assert 4 * short.sizes["data"] == 3 * plain.sizes["data"]


def test_few_small_weights_are_rounded(native: NativeLibrary) -> None:
    """Half to even: as float16 to multiples of 2^-21 of an output's largest, as float32 to zero or 2^-14."""
    torch.manual_seed(0)
    weight = torch.randn(64, 2048).bfloat16()
    weight[:, 0] = 1.5
    weight.clamp_(-1.9, 1.9)
    weight[weight.abs() < 2.0**-14] = 0
    small = torch.tensor(
        [
            2.0**-16 * 1.0078125,
            2.0**-22,
            3 * 2.0**-22,
            -(2.0**-20) * 1.75,
            2.0**-30,
            -(2.0**-14),
            2.0**-15 * 1.25,
        ]
    )
    if native.level == FLOAT16_LEVEL:
        expected = [2.0**-16, 0.0, 2.0**-20, -(2.0**-20) * 2, 0.0, -(2.0**-14), 2.0**-15 * 1.25]
    else:
        expected = [0.0, 0.0, 0.0, 0.0, 0.0, -(2.0**-14), 2.0**-14]
    weight[:, 1:8] = small.bfloat16()
    kept = stored(native, weight)
    assert pack(native, weight).struct.format == FLOAT12
    assert torch.equal(kept[:, 1:8], torch.tensor(expected).expand(64, -1))
    others = [0, *range(8, 2048)]
    assert torch.equal(kept[:, others], weight.float()[:, others])


@pytest.mark.parametrize(("loses", "expected"), [(False, FLOAT12), (True, BFLOAT16)])
def test_one_output_that_loses_too_much_keeps_all_in_16_bits(
    native: NativeLibrary, loses: bool, expected: int
) -> None:
    """As float16 where more than a sixteenth is rounded, as float32 where that takes 2^-12 of all."""
    weight = torch.zeros(200, 512).bfloat16()
    weight[:, -1] = 1.0
    if native.level == FLOAT16_LEVEL:
        weight[137, : 32 + loses] = 2.0**-15 * 1.0078125
    else:
        # Each loses 2^-16; together they lose 2^-12 where they are 256.
        weight[137, : 256 + loses] = 2.0**-15 * 1.5
    assert pack(native, weight).struct.format == expected
    if expected == BFLOAT16:
        assert torch.equal(stored(native, weight), weight.float())


@pytest.mark.parametrize("large", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_stay_in_16_bits(native: NativeLibrary, large: float) -> None:
    """What is not finite is seen in its own output alone."""
    if native.level == FLOAT16_LEVEL:
        pytest.skip("scales of float16 weights take these")
    weight = torch.randn(40, 64).bfloat16()
    weight[7, 3] = large
    packed = pack(native, weight)
    assert packed.struct.format == BFLOAT16
    found = NativeProduct(packed, num_threads=2)(torch.ones(3, 64))
    assert torch.isfinite(found[:, :7]).all()
    assert torch.isfinite(found[:, 8:]).all()


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100, 2.0**-30, 1.0, 2.0**30, 2.0**90])
@pytest.mark.parametrize("num_rows", [1, 5, 12])
def test_rows_of_any_size_are_multiplied_alike(native: NativeLibrary, num_rows: int, scale: float) -> None:
    """Powers of two change no other bit, and rows know nothing of each other."""
    if native.level == FLOAT16_LEVEL:
        pytest.skip("rows are rounded to float16")
    torch.manual_seed(num_rows)
    weight, x = spread(40, 130, lowest=-14), torch.randn(num_rows, 130)
    weight *= 2.0 ** -weight.float().abs().amax(1, keepdim=True).log2().floor()
    small = x * scale
    # What is no normal number loses bits.
    whole = torch.where(small.abs() >= 2.0**-126, small, 0.0)
    x = whole / scale
    expected = product(native, weight, x) * scale
    wanted = expected.abs() >= 2.0**-100
    found = product(native, weight, whole)
    assert torch.equal(found[wanted], expected[wanted])


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(native: NativeLibrary, poison: float) -> None:
    weight, x = spread(40, 130, lowest=-14), torch.randn(9, 130)
    clean = product(native, weight, x)
    x[4, 77] = poison
    found = product(native, weight, x)
    assert not torch.isfinite(found[4]).any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], clean[others])


def test_other_levels_keep_bfloat16(product_level: NativeLibrary) -> None:
    packer = NativePacker(product_level)
    if packer.packs_float12:
        pytest.skip("has 12 bits")
    assert packer.pack(DenseWeight(values=torch.randn(64, 64).bfloat16())).struct.format == BFLOAT16
