"""Products in Triton against plain torch, over odd sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels.config import KernelsConfig
from kernels.linear import triton_shapes
from kernels.linear.formats import Fp8Weight, Int4Weight, pack_levels
from kernels.linear.triton_backend import (
    Fp8Product,
    InvariantLinear,
    ScaledMmProduct,
    TritonLinear,
    WeightOnlyProduct,
    scaled_mm_computes,
)
from kernels.linear.triton_dense import dense_batched_product, dense_product
from kernels.linear.triton_linear import code_of, dense_levels
from kernels.linear.triton_packing import pack_levels_for_triton
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_shapes import TileShape, Workspace, launch, num_parts, shape_for
from kernels.selection import choose_kernels
from tests.kernels.drawn import drawn, weight_of, whole


@pytest.mark.parametrize(("rows", "weights"), [(0, 4), (1, 1), (75, 4), (300, 3), (1500, 7)])
def test_grouped_rows_cover_every_row_once(rows: int, weights: int) -> None:
    # The last weight is nobody's, unless it is the only one.
    choice = whole(0, max(1, weights - 1), rows).int()
    groups = GroupedRows.of(choice, weights)
    seen: dict[int, list[int]] = {}
    for tile, weight in enumerate(groups.weight_of_tile.tolist()):
        if weight >= 0:
            part = groups.order[tile * groups.tile : (tile + 1) * groups.tile].tolist()
            seen.setdefault(weight, []).extend(row for row in part if row >= 0)
    assert seen == {
        weight: (choice == weight).nonzero().flatten().tolist()
        for weight in range(weights)
        if bool((choice == weight).any())
    }


def test_experts_of_unlike_formats_are_not_grouped() -> None:
    int8, int4, w8a8 = (weight_of(kind, 64, 64) for kind in ("int8", "int4", "w8a8"))
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


@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "w8a8", "int4", "int8"])
def test_parts_of_a_sum_are_added_by_the_last_that_arrives(kind: str) -> None:
    made = weight_of(kind, 40, 1024, 1)
    product, x = TritonLinear().pack(made), drawn(3, 1024).bfloat16()
    assert num_parts(40, 8, x.device) > 1
    workspace = Workspace.of(x.device)
    workspace.sums.fill_(float("nan"))
    expected = x.float() @ made.dequantize().T
    # Again, with what the first left behind.
    for _ in range(2):
        error = (product(x).float() - expected).norm() / expected.norm()
        assert float(error) < 5e-2
        assert not bool(workspace.arrived.any())


@pytest.mark.parametrize("kind", ["fp8", "w8a8", "int4", "int4 minimum", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_inputs_that_no_step_divides(kind: str, dtype: torch.dtype) -> None:
    """Few rows by programs of their own, many by one: the last part is short, and its last step too."""
    inputs, outputs = 2080, 70
    made = weight_of(kind, outputs, inputs, 1)
    assert num_parts(outputs, 17, torch.device("cpu")) == 9, "eight of two steps, and one"
    x = drawn(140, inputs, seed=2).to(dtype)
    product, exact = TritonLinear().pack(made), x.float() @ made.dequantize().T
    many = product(x)
    assert float((many.float() - exact).norm() / exact.norm()) < 5e-2
    assert torch.equal(product(x[:3]), many[:3])


def test_how_inputs_are_cut_fills_a_device_and_leaves_no_part_empty() -> None:
    device = torch.device("cpu")
    for outputs in (1, 64, 1000, 4096, 6144, 16384, 28672, 128256):
        for steps in (1, 2, 7, 32, 112):
            parts, tiles = num_parts(outputs, steps, device), -(-outputs // 64)
            each = -(-steps // parts)
            assert (parts - 1) * each < steps
            assert tiles >= 247 or tiles * parts <= Workspace.of(device).sums.numel() // (64 * 128)
            assert parts == 1 or tiles < 247
    assert num_parts(4096, 32, device) * 64 >= 247


def test_a_product_that_a_device_has_no_room_for_takes_a_smaller_shape(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_shapes, "_smaller", {})
    tried: list[TileShape] = []

    def start(shape: TileShape) -> None:
        tried.append(shape)
        if shape.num_stages > 1 or shape.outputs > 64:
            raise OutOfResources(300_000, 232_448, "shared memory")

    shape = shape_for(1000)
    launch("levels", shape, start)
    assert tried[0] == shape
    assert tried[-1] == replace(shape, outputs=64, num_warps=4, num_stages=1)
    assert "no room" in caplog.text
    tried.clear()
    # Known by now.
    launch("levels", shape, start)
    assert len(tried) == 1

    def never(shape: TileShape) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    with pytest.raises(OutOfResources):
        launch("others", shape, never)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("half", [False, True])
def test_the_code_of_a_gpu_takes_the_bits_that_the_interpreter_takes(place: int, half: bool) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    register = words | (words[::-1] << 16)
    found = re.fullmatch(
        r"\{ \.reg \.b32 t; shr\.b32 t, \$1, (\d+); lop3\.b32 \$0, t, (\w+), (\w+), 0xEA; \}",
        code_of(place, half),
    )
    assert found is not None
    # 0xEA is (a & b) | c.
    result = (register >> int(found[1])) & int(found[2], 16) | int(found[3], 16)
    ones, kind = (1024, torch.float16) if half else (128, torch.bfloat16)
    for lane, given in ((result & 0xFFFF, words), (result >> 16, words[::-1])):
        numbers = torch.from_numpy(lane.astype(np.int16)).view(kind)
        assert numbers.float().tolist() == (ones + (given >> (4 * place) & 15)).tolist()


def test_zeros_that_are_whole_numbers_stay_so_and_scales_are_as_narrow_as_they_can_be() -> None:
    scale = drawn(8, 2).abs().half().float()
    zeros = whole(0, 16, 8, 2, seed=1).float()
    packed = pack_levels(whole(0, 16, 8, 128))
    kept = pack_levels_for_triton(Int4Weight(packed=packed, scale=scale, minimum=-zeros * scale))
    assert kept.minimum is None
    assert kept.zero is not None
    assert torch.equal(kept.zero.float(), zeros.T)
    assert kept.scale.dtype == torch.float16
    kept = pack_levels_for_triton(Int4Weight(packed=packed, scale=scale, minimum=drawn(8, 2, seed=2)))
    assert kept.zero is None
    assert pack_levels_for_triton(Int4Weight(packed=packed, scale=drawn(8, 2))).scale.dtype == torch.float32


def test_groups_that_no_matrix_unit_takes_are_named() -> None:
    weight = Int4Weight(packed=pack_levels(whole(0, 16, 8, 80)), scale=drawn(8, 10))
    with pytest.raises(ValueError, match=r"groups of 8 inputs.*engine\.kernels\.linear to torch"):
        TritonLinear().pack(weight)


def test_invariant_products_leave_nothing_to_libraries() -> None:
    kernels = choose_kernels(KernelsConfig(linear="invariant"), torch.device("cpu"))
    assert isinstance(kernels.linear, InvariantLinear)
    weight = Fp8Weight(values=drawn(16, 16).to(torch.float8_e4m3fn), scale=drawn(16).abs())
    # The library's fp8 product chooses by the number of rows.
    assert type(kernels.linear.pack(weight)) is Fp8Product


@pytest.mark.parametrize("refused", [(), (81,), (8192,)])
def test_the_librarys_fp8_product_is_tried_with_a_rest_and_many_rows(
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
    assert tried == [rows for rows in (81, 8192) if not refused or rows <= refused[0]]
    assert [f"torch refuses {rows} rows: no kernel" in caplog.text for rows in refused] == [True] * len(
        refused
    )


def test_few_rows_of_fp8_are_not_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Fp8Weight(values=drawn(16, 32).to(torch.float8_e4m3fn), scale=drawn(16, seed=1).abs())
    asked = []
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda levels, *_, **__: asked.append(len(levels)) or torch.zeros(len(levels), 16),
    )
    product = ScaledMmProduct(weight)
    for rows in (1, 64, 65):
        product(drawn(rows, 32).bfloat16())
    assert asked == [65]


@pytest.mark.parametrize("kind", ["int4", "int4 minimum", "int8"])
@pytest.mark.parametrize("inputs", [128, 320, 2080])
def test_weights_of_few_bits_as_numbers(kind: str, inputs: int) -> None:
    made = weight_of(kind, 70, inputs, 1)
    dense = dense_levels(pack_levels_for_triton(made), torch.bfloat16)
    # Rounded once.
    torch.testing.assert_close(dense.float(), made.dequantize().bfloat16().float(), atol=0, rtol=2**-7)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_many_rows_of_few_bits_are_the_librarys(kind: str) -> None:
    made = weight_of(kind, 48, 256, 1)
    if kind == "int8":
        made = replace(made, smoothing=drawn(256, seed=3).abs() + 0.5)
    made = replace(made, order=torch.randperm(256, generator=torch.Generator().manual_seed(0)))
    x, bias = drawn(40, 256, seed=2).bfloat16(), drawn(48, seed=4).bfloat16()
    few, many = WeightOnlyProduct(made), WeightOnlyProduct(made, most_rows=39)
    found, expected = many(x, bias).float(), few(x, bias).float()
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    alike = InvariantLinear().pack(made)
    assert isinstance(alike, WeightOnlyProduct)
    assert alike.most_rows is None
