"""Native sparse layers against torch's, every way of routing, every format of weights."""

from __future__ import annotations

import ctypes
from ctypes import c_int64
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.activation.reference import gate
from kernels.experts.native import ExpertBuffers, SparseLayer, sparse_ops
from kernels.experts.reference import route
from kernels.experts.routing import Routing
from kernels.linear.formats import DenseWeight, rows_of
from kernels.linear.native import NativePacker
from kernels.linear.rows import ROW_MULTIPLE
from kernels.native.library import NativeLibrary
from tests.kernels.drawn import weight_of
from tests.kernels.routings import ROUTINGS

HIDDEN, INTERMEDIATE = 96, 160


# Some experts of int4 have minimums and some have an order of their own.
KINDS = {
    "bfloat16": ("bfloat16",),
    "int8": ("int8",),
    "w8a8": ("smoothed w8a8",),
    "mxfp4": ("mxfp4",),
    "int4": ("int4", "int4 minimum", "int4 order", "int4 minimum order"),
}


@pytest.fixture
def native(product_level: NativeLibrary) -> NativeLibrary:
    """Every level that has products of its own."""
    return product_level


class Layer:
    """A sparse layer of random weights, packed, and its inputs' way through torch."""

    def __init__(
        self,
        native: NativeLibrary,
        routing: Routing,
        kind: str = "bfloat16",
        *,
        max_tokens: int = 100,
        threads: int = 2,
        hidden: int = HIDDEN,
        intermediate: int = INTERMEDIATE,
    ) -> None:
        self.hidden = hidden
        self.native, self.routing, self.threads = native, routing, threads
        self.router = torch.randn(routing.num_experts, hidden) / hidden**0.5
        self.correction = torch.rand(routing.num_experts) if routing.scoring == "sigmoid" else None
        self.scales = torch.rand(routing.num_experts) + 0.5 if routing.scoring == "softmax" else None
        kinds = list(islice(cycle(KINDS[kind]), routing.num_experts))
        self.gate_up, self.down = (
            [weight_of(each, *shape, seed, size=shape[1] ** -0.5) for seed, each in enumerate(kinds, first)]
            for first, shape in ((100, (2 * intermediate, hidden)), (200, (hidden, intermediate)))
        )
        self.biases = [torch.randn(hidden) / 4 for _ in self.down]
        packer = NativePacker(native, num_threads=threads)
        self.layer = SparseLayer(
            routing=routing,
            router=packer.pack(DenseWeight(values=self.router)),
            gate_up=[(packer.pack(weight),) for weight in self.gate_up],
            down=[packer.pack(weight, bias) for weight, bias in zip(self.down, self.biases, strict=True)],
            activation="silu",
            correction=self.correction,
            expert_scales=self.scales,
        )
        self.intermediate = intermediate
        self.buffers = self.new_buffers(max_tokens)

    def new_buffers(self, max_tokens: int) -> ExpertBuffers:
        """Buffers that hold no numbers."""
        buffers = ExpertBuffers(
            self.native,
            self.routing,
            max_tokens=max_tokens,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_threads=self.threads,
        )
        for buffer in (buffers.logits, buffers.shares, buffers.gate_up, buffers.changes):
            buffer.fill(np.nan)
        for workspace in (buffers.workspace, buffers.router_workspace):
            workspace.fill(255)
        return buffers

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The native result, inside a wider tensor of NaN."""
        wide = torch.full((len(x), self.hidden + 5), float("nan"))[:, 2 : self.hidden + 2]
        if out is not None:
            wide.copy_(out)
        count = c_int64(len(x))
        address = ctypes.addressof(count)
        ops = sparse_ops(self.native, self.layer, self.buffers, address, x, wide, accumulate=out is not None)
        self.native.run(ops, num_threads=self.threads)
        return wide

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and shares by the router of the model."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % ROW_MULTIPLE))
        ids, shares = route(padded @ self.router.T, self.routing, self.correction)
        shares = shares if self.scales is None else shares * self.scales[ids]
        return ids[: len(x)], shares[: len(x)]

    def exact(self, x: Tensor) -> Tensor:
        """In float64, by dequantized weights."""
        ids, shares = self.chosen(x)
        out = torch.zeros(len(x), self.hidden, dtype=torch.float64)
        for row in range(len(x)):
            for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
                before, after = (share, 1.0) if self.routing.weighs_inputs else (1.0, share)
                up = (x[row] * before).double() @ self.gate_up[expert].dequantize().double().T
                down = gate("silu", up[None])[0] @ self.down[expert].dequantize().double().T
                out[row] += after * (down + self.biases[expert])
        return out


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(native: NativeLibrary, name: str) -> None:
    torch.manual_seed(len(name))
    layer = Layer(native, ROUTINGS[name])
    x = torch.randn(77, HIDDEN)
    out = layer(x)
    ids, shares = layer.chosen(x)
    assert np.array_equal(layer.buffers.ids[:77], ids.numpy())
    assert np.allclose(layer.buffers.shares[:77], shares.numpy(), rtol=1e-5)
    assert torch.allclose(out.double(), layer.exact(x), atol=0.02)
    again = layer(x, out.clone())
    assert torch.allclose(again, 2 * out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "hidden", "intermediate", "tokens"),
    [
        *((kind, HIDDEN, INTERMEDIATE, 41) for kind in KINDS),
        # Whatever is left of a vector is computed and written, too.
        *((kind, *sizes, 19) for kind in ("bfloat16", "int8", "w8a8") for sizes in ((77, 53), (33, 161))),
    ],
)
def test_formats_and_odd_sizes(
    native: NativeLibrary, kind: str, hidden: int, intermediate: int, tokens: int
) -> None:
    torch.manual_seed(hidden)
    layer = Layer(native, ROUTINGS["softmax"], kind, hidden=hidden, intermediate=intermediate)
    x = torch.randn(tokens, hidden)
    exact = layer.exact(x)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert error < (0.03 if kind == "w8a8" else 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_others(native: NativeLibrary, kind: str) -> None:
    torch.manual_seed(4)
    layer = Layer(native, ROUTINGS["softmax"], kind)
    x = torch.randn(100, HIDDEN)
    whole = layer(x)
    assert whole.isfinite().all()
    for rows in (1, 2, 7, 50):
        assert torch.equal(layer(x[-rows:]), whole[-rows:])
    # All of them with one expert, and others with none.
    crowd = layer(x[3:4].repeat(100, 1))
    assert torch.equal(crowd, whole[3:4].expand(100, -1))
    layer.threads = 1
    assert torch.equal(layer(x), whole)
    assert layer(x[:0]).shape == (0, HIDDEN)


def test_a_broken_token_is_its_own_fault(native: NativeLibrary) -> None:
    torch.manual_seed(5)
    layer = Layer(native, ROUTINGS["groups by their two best"])
    x = torch.randn(20, HIDDEN)
    sound = layer(x)
    x[7, 5], x[11, 0] = float("nan"), float("inf")
    out = layer(x)
    assert not out[[7, 11]].isfinite().any()
    others = [row for row in range(20) if row not in (7, 11)]
    assert torch.equal(out[others], sound[others])


def test_equal_experts_are_taken_in_order(native: NativeLibrary) -> None:
    layer = Layer(native, Routing(num_experts=8, num_active=3))
    layer(torch.zeros(4, HIDDEN))
    assert layer.buffers.ids[:4].tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gates_and_the_rest_may_be_weights_of_their_own(native: NativeLibrary, kind: str) -> None:
    layer = Layer(native, ROUTINGS["softmax"], kind)
    x = torch.randn(9, layer.hidden)
    together, packer = layer(x).clone(), NativePacker(native, num_threads=layer.threads)
    half = layer.gate_up[0].shape[0] // 2
    apart = [
        tuple(packer.pack(rows_of(weight, part)) for part in (slice(half), slice(half, None)))
        for weight in layer.gate_up
    ]
    layer.layer = replace(layer.layer, gate_up=apart)
    assert torch.equal(layer(x), together)
