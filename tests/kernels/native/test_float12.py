"""bfloat16 weights in 12 bits: when they are kept so, what is lost, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.linear.formats import DenseWeight
from engine.kernels.linear.native import NativePacker, NativeProduct
from engine.kernels.linear.packed import BFLOAT16, FLOAT12, PackedWeight
from engine.kernels.native import NativeLibrary
from engine.kernels.native.build import machine_levels
from engine.kernels.native.library import load_level
from tests.kernels.native.test_fp16 import LEVEL, native, stored

__all__ = ("native",)


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
    scales = 256 * 4
    assert 4 * (short.arena.num_bytes() - scales) == 3 * (plain.arena.num_bytes() - scales)


def test_few_small_weights_are_rounded(native: NativeLibrary) -> None:
    """To multiples of 2^-21 of the power of two of their output's largest, half to even."""
    torch.manual_seed(0)
    weight = torch.randn(64, 512).bfloat16()
    weight[:, 0] = 1.5
    weight.clamp_(-1.9, 1.9)
    weight[weight.abs() < 2.0**-14] = 0
    small = torch.tensor(
        [2.0**-16 * 1.0078125, 2.0**-22, 3 * 2.0**-22, -(2.0**-20) * 1.75, 2.0**-30, -(2.0**-14)]
    )
    expected = torch.tensor([2.0**-16, 0.0, 2.0**-20, -(2.0**-20) * 2, 0.0, -(2.0**-14)])
    weight[:, 1:7] = small.bfloat16()
    kept = stored(native, weight)
    assert pack(native, weight).struct.format == FLOAT12
    assert torch.equal(kept[:, 1:7], expected.expand(64, -1))
    others = [0, *range(7, 512)]
    assert torch.equal(kept[:, others], weight.float()[:, others])


@pytest.mark.parametrize(("share", "expected"), [(1 / 16, FLOAT12), (1 / 16 + 1 / 512, BFLOAT16)])
def test_one_output_with_many_small_weights_keeps_all_in_16_bits(
    native: NativeLibrary, share: float, expected: int
) -> None:
    """More than a sixteenth of any output's."""
    weight = torch.ones(200, 512).bfloat16()
    weight[137, : int(share * 512)] = 2.0**-15 * 1.0078125
    assert pack(native, weight).struct.format == expected
    if expected == BFLOAT16:
        assert torch.equal(stored(native, weight), weight.float())


def test_other_levels_keep_bfloat16() -> None:
    others = [level for level in machine_levels() if level != LEVEL]
    for level in others:
        assert pack(load_level(level), torch.randn(64, 64).bfloat16()).struct.format == BFLOAT16
