"""Products with quantized weights: equal to a product with the dequantized weight, rows independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.linear.formats import (
    DenseWeight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
    pack_levels,
    parts_of,
    picked_rows,
    stack,
)
from kernels.linear.parts import pack_any
from kernels.linear.quantized import quantize_rows
from kernels.linear.reference import TorchLinear, pack_linear

SHAPES = [(7, 64), (33, 96), (199, 1024)]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int8_weight(outputs: int, inputs: int, groups: int = 1, **fields: object) -> Int8Weight:
    values = (draw(1, outputs, inputs) * 50).clamp(-127, 127).to(torch.int8)
    return Int8Weight(values=values, scale=draw(2, outputs, groups).abs() / 50 + 0.001, **fields)


def int4_weight(outputs: int, inputs: int, groups: int, **fields: object) -> Int4Weight:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (outputs, inputs), generator=generator)
    return Int4Weight(packed=pack_levels(levels), scale=draw(4, outputs, groups).abs() / 8, **fields)


def weights(outputs: int, inputs: int) -> dict[str, WeightFormat]:
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5))
    groups = inputs // 32
    minimum = draw(6, outputs, groups)
    return {
        "int8": int8_weight(outputs, inputs),
        "int8 groups": int8_weight(outputs, inputs, groups),
        "int8 order": int8_weight(outputs, inputs, groups, order=order),
        "int8 smoothing": int8_weight(outputs, inputs, smoothing=draw(7, inputs).abs() + 0.1),
        "int4": int4_weight(outputs, inputs, groups),
        "int4 minimum": int4_weight(outputs, inputs, groups, minimum=minimum),
        "int4 order": int4_weight(outputs, inputs, groups, minimum=minimum, order=order),
    }


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("name", weights(2, 64))
def test_equals_the_dequantized_weight(name: str, outputs: int, inputs: int) -> None:
    weight = weights(outputs, inputs)[name]
    x, bias = draw(8, 32, inputs), draw(9, outputs)
    expected = x.double() @ weight.dequantize().double().T + bias
    torch.testing.assert_close(pack_linear(weight)(x, bias).double(), expected, atol=1e-3, rtol=1e-5)


def test_levels_lie_in_a_byte_as_documented() -> None:
    levels = torch.tensor([[1, 2, 15, 0]])
    weight = Int4Weight(packed=pack_levels(levels), scale=torch.tensor([[1.0, 10.0]]))
    assert weight.packed.tolist() == [[0x21, 0x0F]]
    assert weight.dequantize().tolist() == [[-7.0, -6.0, 70.0, -80.0]]
    lowest = replace(weight, minimum=torch.tensor([[0.5, -1.0]]))
    assert lowest.dequantize().tolist() == [[1.5, 2.5, 149.0, -1.0]]


def test_order_says_where_a_stored_column_comes_from() -> None:
    values = torch.tensor([[1, 2, 3]], dtype=torch.int8)
    weight = Int8Weight(values=values, scale=torch.ones(1, 1), order=torch.tensor([2, 0, 1]))
    assert weight.dequantize().tolist() == [[2.0, 3.0, 1.0]]


@pytest.mark.parametrize("smooth", [False, True])
def test_int8_activations_are_rounded_per_row(smooth: bool) -> None:
    weight = int8_weight(40, 96, activations="int8", smoothing=draw(1, 96).abs() + 0.5 if smooth else None)
    x = draw(2, 16, 96) * torch.logspace(-3, 3, 16)[:, None]
    smoothed = x if weight.smoothing is None else x * weight.smoothing
    scale = smoothed.abs().amax(1, keepdim=True) / 127
    expected = (torch.round(smoothed / scale) * scale) @ weight.stored().T
    torch.testing.assert_close(pack_linear(weight)(x), expected, rtol=1e-4, atol=1e-4)
    exact = x @ weight.dequantize().T
    error = (pack_linear(weight)(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 0.03


def test_a_poisoned_row_stays_alone() -> None:
    weight = int8_weight(40, 96, activations="int8")
    x = draw(2, 16, 96)
    expected = pack_linear(weight)(x)
    x[3, 7], x[5, 1] = float("nan"), float("inf")
    found = pack_linear(weight)(x)
    assert not found[[3, 5]].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    levels, scale = quantize_rows(torch.zeros(1, 8))
    assert levels.tolist() == [[0] * 8]
    assert scale.tolist() == [0.0]


@pytest.mark.parametrize("activations", ["float", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(activations: str, dtype: torch.dtype) -> None:
    weight: WeightFormat = int4_weight(199, 256, 4)
    if activations != "int4":
        weight = int8_weight(199, 256, activations=activations)
    product = pack_linear(weight)
    x = draw(3, 528, 256).to(dtype)
    whole = product(x)
    assert whole.dtype == dtype
    for rows in (16, 48, 112, 400):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


def test_stacking_keeps_every_form() -> None:
    pairs = [*weights(6, 64).values(), DenseWeight(values=draw(1, 6, 64))]
    for upper in pairs:
        for lower in pairs:
            both = stack([upper, lower], torch.float32)
            expected = torch.cat((upper.dequantize(), lower.dequantize()))
            torch.testing.assert_close(both.dequantize(), expected, rtol=0, atol=1e-6)
            if upper is lower:
                assert type(both) is type(upper)
            picked = picked_rows(parts_of(both), torch.arange(6, 12), torch.float32)
            torch.testing.assert_close(picked.dequantize(), expected[6:], rtol=0, atol=1e-6)
            product = pack_any(TorchLinear(), both)
            x = draw(3, 16, 64)
            bias = draw(4, 1, 12)[0]
            plain = torch.cat([pack_linear(each)(x) for each in (upper, lower)], dim=1) + bias
            # Both sums hold the same addends in an order of their own: each differs from
            # the true sum by at most K eps times the sum of absolute addends.
            sizes = x.abs() @ expected.abs().T + bias.abs()
            bound = 2 * (x.shape[1] + 1) * torch.finfo(torch.float32).eps * sizes
            assert ((product(x, bias) - plain).abs() <= bound).all()
