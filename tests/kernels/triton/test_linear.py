"""Products in Triton against plain torch, over odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import KernelsConfig
from engine.kernels.linear.formats import Fp8Weight, Int4Weight, Int8Weight, WeightFormat, pack_levels
from engine.kernels.linear.triton_backend import (
    Fp8Product,
    InvariantLinear,
    TritonLinear,
    scaled_mm_computes,
)
from engine.kernels.linear.triton_dense import dense_batched_product, dense_product
from engine.kernels.linear.triton_grouped import grouped_product
from engine.kernels.linear.triton_linear import scaled_product, weight_only_product
from engine.kernels.linear.triton_rows import TILE_M, GroupedRows
from engine.kernels.selection import choose_kernels


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 1), (7, 96, 33), (65, 128, 70)])
@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4(rows: int, inputs: int, outputs: int, group: int, asymmetric: bool) -> None:
    groups = inputs // group if group else 1
    weight = Int4Weight(
        packed=pack_levels(whole(0, 16, outputs, inputs)),
        scale=drawn(outputs, groups).abs(),
        minimum=drawn(outputs, groups, seed=1) if asymmetric else None,
        order=torch.randperm(inputs, generator=torch.Generator().manual_seed(2)) if asymmetric else None,
    )
    x, bias = drawn(rows, inputs, seed=3), drawn(outputs, seed=4)
    expected = x @ weight.dequantize().T + bias
    torch.testing.assert_close(weight_only_product(x, weight, bias), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 1), (33, 100, 65)])
def test_int8_weight_only(rows: int, inputs: int, outputs: int) -> None:
    weight = Int8Weight(
        values=whole(-127, 128, outputs, inputs).to(torch.int8),
        scale=drawn(outputs, 1).abs(),
        smoothing=drawn(inputs, seed=1).abs() + 0.5,
    )
    x = drawn(rows, inputs, seed=3)
    torch.testing.assert_close(
        weight_only_product(x, weight), x @ weight.dequantize().T, atol=1e-2, rtol=1e-4
    )


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 1), (66, 130, 65)])
def test_int8_with_int8(rows: int, inputs: int, outputs: int) -> None:
    x = whole(-127, 128, rows, inputs).to(torch.int8)
    weight = whole(-127, 128, outputs, inputs, seed=1).to(torch.int8)
    x_scale, weight_scale, bias = drawn(rows).abs(), drawn(outputs, seed=2).abs(), drawn(outputs, seed=5)
    exact = x.double() @ weight.double().T * x_scale.double()[:, None] * weight_scale.double() + bias
    found = scaled_product(x, x_scale, weight, weight_scale, bias, dtype=torch.float32)
    torch.testing.assert_close(found, exact.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 1), (5, 300, 200)])
@pytest.mark.parametrize("blocked", [False, True])
def test_float8_with_float8(rows: int, inputs: int, outputs: int, blocked: bool) -> None:
    x = drawn(rows, inputs).to(torch.float8_e4m3fn)
    weight = drawn(outputs, inputs, seed=1).to(torch.float8_e4m3fn)
    if blocked:
        column, block = -(-inputs // 128), -(-outputs // 128)
        x_scale, weight_scale = drawn(rows, column).abs(), drawn(block, column, seed=2).abs()
        left = x.float() * x_scale.repeat_interleave(128, 1)[:, :inputs]
        wide = weight_scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        expected = left @ (weight.float() * wide).T
    else:
        x_scale, weight_scale = drawn(rows).abs(), drawn(outputs, seed=2).abs()
        expected = (x.float() * x_scale[:, None]) @ (weight.float() * weight_scale[:, None]).T
    found = scaled_product(x, x_scale, weight, weight_scale, dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_grouped_rows_cover_every_row_once() -> None:
    choice = torch.tensor([2, 0, 2, 2, 0] + [1] * 70, dtype=torch.int32)
    groups = GroupedRows.of(choice, 4)
    seen = []
    for tile, weight in enumerate(groups.weight_of_tile.tolist()):
        rows = [row for row in groups.order[tile * TILE_M : (tile + 1) * TILE_M].tolist() if row >= 0]
        if weight >= 0:
            assert {int(choice[row]) for row in rows} == {weight}
            seen += rows
    assert sorted(seen) == list(range(len(choice)))


def test_experts() -> None:
    tokens, active, experts, hidden, size = 21, 2, 5, 40, 24
    x, weights = drawn(tokens, hidden), drawn(experts, size, hidden, seed=1)
    choice = whole(0, experts, tokens * active, seed=2).int()
    groups = GroupedRows.of(choice, experts)
    found = grouped_product(x, weights, groups, rows_per_input=active)
    expected = torch.stack([weights[int(w)] @ x[row // active] for row, w in enumerate(choice)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def expert(kind: str, outputs: int, inputs: int, seed: int) -> WeightFormat:
    """A random weight of one format."""
    if kind.startswith("int4"):
        minimum = drawn(outputs, inputs // 32, seed=seed + 1) if kind == "int4 minimum" else None
        return Int4Weight(
            packed=pack_levels(whole(0, 16, outputs, inputs, seed=seed)),
            scale=drawn(outputs, inputs // 32, seed=seed).abs(),
            minimum=minimum,
        )
    if kind.startswith("fp8"):
        shape = (-(-outputs // 128), inputs // 128) if kind == "fp8 blocks" else (outputs,)
        values = drawn(outputs, inputs, seed=seed).to(torch.float8_e4m3fn)
        return Fp8Weight(values=values, scale=drawn(*shape, seed=seed + 1).abs())
    return Int8Weight(
        values=whole(-127, 128, outputs, inputs, seed=seed).to(torch.int8),
        scale=drawn(outputs, 1, seed=seed).abs(),
        activations="int8" if kind == "w8a8" else "float",
    )


@pytest.mark.parametrize("kind", ["int4", "int4 minimum", "int8", "w8a8", "fp8", "fp8 blocks"])
def test_quantized_experts_equal_their_own_products(kind: str) -> None:
    tokens, active, inputs, outputs = 11, 2, 128, 130
    weights = [expert(kind, outputs, inputs, seed=10 * index) for index in range(4)]
    linear = TritonLinear()
    grouped = linear.grouped(weights)
    assert grouped is not None
    x = drawn(tokens, inputs)
    # The third expert is nobody's.
    choice = whole(0, 3, tokens * active, seed=2).int()
    choice[choice == 2] = 3
    found = grouped(x, grouped.group(choice), rows_per_input=active)
    alone = [linear.pack(weight)(x) for weight in weights]
    expected = torch.stack([alone[int(w)][row // active] for row, w in enumerate(choice)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    # On the way out rows are as many as inputs.
    out = grouped(x, grouped.group(choice[:tokens]), rows_per_input=1)
    expected = torch.stack([alone[int(w)][row] for row, w in enumerate(choice[:tokens])])
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


def test_experts_of_unlike_formats_are_not_grouped() -> None:
    int8, int4, w8a8 = (expert(kind, 64, 64, 0) for kind in ("int8", "int4", "w8a8"))
    assert TritonLinear().grouped([int8, int4]) is None
    assert TritonLinear().grouped([int8, w8a8]) is None
    ordered = replace(int4, order=torch.arange(64))
    assert TritonLinear().grouped([ordered, ordered]) is None


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 5, 1), (70, 100, 130), (600, 40, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_invariant_products_equal_the_formula(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, weight = drawn(rows, inputs).to(dtype), drawn(outputs, inputs, seed=1).to(dtype)
    bias = drawn(outputs, seed=2).to(dtype)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(dense_product(x, weight, bias), expected, atol=tolerance, rtol=tolerance)


def test_invariant_batched_products_take_any_strides() -> None:
    left = drawn(5, 3, 20).transpose(0, 1)
    right = drawn(3, 20, 70, seed=1)
    expected = torch.bmm(left, right)
    torch.testing.assert_close(dense_batched_product(left, right), expected, atol=1e-4, rtol=1e-4)
    turned = drawn(3, 70, 20, seed=1).transpose(1, 2)
    expected = torch.bmm(left, turned)
    torch.testing.assert_close(dense_batched_product(left, turned), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "fp8", "w8a8", "int4"])
def test_a_row_has_the_same_bits_in_any_batch(kind: str) -> None:
    weight = drawn(70, 128, seed=1) if kind == "dense" else expert(kind, 70, 128, 1)
    product = InvariantLinear().pack(weight)
    x = drawn(150, 128)
    whole_batch = product(x)
    for first, last in ((0, 1), (0, 17), (60, 70), (149, 150), (3, 140)):
        assert torch.equal(product(x[first:last]), whole_batch[first:last])


def test_invariant_products_leave_nothing_to_libraries() -> None:
    kernels = choose_kernels(KernelsConfig(linear="invariant"), torch.device("cpu"))
    assert isinstance(kernels.linear, InvariantLinear)
    weight = Fp8Weight(values=drawn(16, 16).to(torch.float8_e4m3fn), scale=drawn(16).abs())
    # The library's fp8 product chooses by the number of rows.
    assert type(kernels.linear.pack(weight)) is Fp8Product


@pytest.mark.parametrize("refused", [(), (1,), (17,), (8192,)])
def test_the_librarys_fp8_product_is_tried_with_few_and_many_rows(
    refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def scaled_mm(levels: torch.Tensor, columns: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        assert options["scale_a"].shape == (len(levels), 1)
        tried.append(len(levels))
        if len(levels) in refused:
            raise RuntimeError("no kernel")
        return torch.zeros(len(levels), columns.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight = Fp8Weight(values=drawn(16, 32).to(torch.float8_e4m3fn), scale=drawn(16).abs())
    assert scaled_mm_computes(weight) == (not refused)
    assert tried == [rows for rows in (1, 17, 8192) if not refused or rows <= refused[0]]
    assert [f"torch refuses {rows} rows: no kernel" in caplog.text for rows in refused] == [True] * len(
        refused
    )
