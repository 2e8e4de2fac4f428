"""Products, norms, gates and rotations give each row the same bits, whatever other rows there are."""

from __future__ import annotations

import pytest
import torch

from kernels.activation.reference import GATES, gate
from kernels.linear.batched import batched_product
from kernels.linear.reference import PackedProduct, PlainProduct, Product, TiledProduct, pack_linear
from kernels.norm.reference import rms_norm
from kernels.rope.reference import rotate

TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (96, 100), (640, 256), (48, 2048), (33, 7)])
def test_chosen_linear_is_invariant_over_rows(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    product = pack_linear(weight)
    x = torch.randn(704, inputs, generator=generator).to(dtype)
    whole = product(x, bias)
    for rows in (*range(16, 65, 16), 80, 208, 400, 512, 704):
        for start in (0, 16, 704 - rows):
            assert torch.equal(product(x[start : start + rows], bias), whole[start : start + rows])
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(
        whole.double(), expected, atol=1e-3 if dtype == torch.float32 else 1.0, rtol=2e-2
    )


@pytest.mark.parametrize("kind", [PackedProduct, PlainProduct, TiledProduct])
@pytest.mark.parametrize("dtype", TYPES)
def test_position_inside_the_batch_does_not_matter(kind: type[Product], dtype: torch.dtype) -> None:
    if kind is PackedProduct and dtype != torch.float32:
        pytest.skip("packed products are for float32")
    product = kind(torch.randn(128, 64).to(dtype))
    x = torch.randn(48, 64).to(dtype)
    whole = product(x)
    for shift in (1, 5, 16, 31):
        assert torch.equal(product(x.roll(shift, 0)).roll(-shift, 0), whole)


def test_a_library_that_varies_with_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When products of different heights differ, tiles of one height take over."""
    exact = PlainProduct.__call__

    def varying(self: PlainProduct, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return exact(self, x, bias) * (1 + 1e-6 * (x.shape[0] > 32))

    monkeypatch.setattr(PlainProduct, "__call__", varying)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight = torch.randn(37, 41)
    assert isinstance(pack_linear(weight), TiledProduct)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(("inner", "columns"), [(64, 256), (256, 64), (20, 64), (64, 10)])
def test_batched_products_are_invariant(
    inner: int, columns: int, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece where the library allows it, and in tiles of 16 rows where it does not."""
    if splits:
        monkeypatch.setattr("kernels.linear.batched._proven", {})
        monkeypatch.setattr("kernels.linear.batched._rows_are_invariant", lambda *_: False)
    left, right = torch.randn(9, 320, inner), torch.randn(9, inner, columns)
    whole = batched_product(left, right)
    torch.testing.assert_close(whole, torch.bmm(left, right), atol=1e-4, rtol=1e-5)
    for batch, start, rows in ((1, 0, 16), (9, 304, 16), (4, 16, 64), (7, 0, 304), (2, 160, 160)):
        part = batched_product(left[:batch, start : start + rows], right[:batch])
        assert torch.equal(part, whole[:batch, start : start + rows])


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [7, 63, 88, 640])
def test_gates_are_invariant_and_right(name: str, dtype: torch.dtype, size: int) -> None:
    x = (3 * torch.randn(160, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    whole = gate(name, x)
    for rows in (1, 3, 16, 33, 160):
        assert torch.equal(gate(name, x[:rows]), whole[:rows])
        assert torch.equal(gate(name, x[-rows:]), whole[-rows:])
    first, second = x.float().chunk(2, -1)
    known = {
        "silu": torch.nn.functional.silu(first) * second,
        "gelu": torch.nn.functional.gelu(first) * second,
        "gelu_tanh": torch.nn.functional.gelu(first, approximate="tanh") * second,
    }
    known["relu"] = torch.nn.functional.relu(first) * second
    known["relu2"] = torch.nn.functional.relu(first).square() * second
    if name in known:
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(whole.float(), known[name], atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [20, 48, 100, 1000])
def test_norm_is_invariant_and_right(dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(300, size).to(dtype), torch.randn(size)
    whole = rms_norm(x, weight, 1e-6)
    for rows in (1, 2, 16, 77):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6), whole[:rows])
        assert torch.equal(rms_norm(x[-rows:], weight, 1e-6), whole[-rows:])
    atol = 1e-5 if dtype == torch.float32 else 0.1
    expected = torch.nn.functional.rms_norm(x.float(), (size,), weight, 1e-6)
    torch.testing.assert_close(whole.float(), expected, atol=atol, rtol=1e-2)
    bias = torch.randn(size)
    centered = rms_norm(x, weight, 1e-6, bias, centered=True)
    assert torch.equal(rms_norm(x[:7], weight, 1e-6, bias, centered=True), centered[:7])
    expected = torch.nn.functional.layer_norm(x.float(), (size,), weight, bias, 1e-6)
    torch.testing.assert_close(centered.float(), expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 12])
def test_rotation_keeps_lengths_and_depends_on_distance(interleaved: bool, rotated: int) -> None:
    """Products of rotated queries and keys depend on the distance of their positions alone."""
    q, k = torch.randn(1, 2, 12), torch.randn(1, 2, 12)
    angles = torch.arange(64.0)[:, None] * (0.3 ** torch.arange(rotated // 2))
    cos, sin = angles.cos(), angles.sin()

    def product(query_at: int, key_at: int) -> torch.Tensor:
        a = rotate(q, cos[query_at, None], sin[query_at, None], interleaved=interleaved)
        b = rotate(k, cos[key_at, None], sin[key_at, None], interleaved=interleaved)
        torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1))
        return (a * b).sum(-1)

    torch.testing.assert_close(product(7, 3), product(47, 43), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product(0, 0), (q * k).sum(-1), atol=1e-5, rtol=1e-5)
