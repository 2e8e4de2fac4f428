"""Layers with a state as Triton kernels against their references, interpreted here and on a GPU (tests/gpu);
and the same bits wherever a prompt is cut, and whoever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.recurrent.backends import (
    RecurrentBackend,
    RgLruWeights,
    ScanInputs,
    ScanWeights,
    SelectiveInputs,
)
from kernels.recurrent.reference import TorchRecurrent
from kernels.recurrent.triton_recurrent import TritonRecurrent
from tests.kernels.drawn import drawn
from tests.kernels.state_batches import BATCH, NAN, NUM_SLOTS, Batch, states_of

CLOSE: dict[str, Any] = {"atol": 3e-5, "rtol": 3e-5}
PADDING = 3


def placed(backend: RecurrentBackend, batch: Batch, device: torch.device) -> Any:
    rows = batch.num_tokens + PADDING
    return backend.place(batch.states, batch.query_starts, batch.context_lens, rows, device)


def padded(x: Tensor) -> Tensor:
    """Rows that belong to nobody, and hold anything."""
    return torch.cat((x, torch.full((PADDING, *x.shape[1:]), NAN)))


def convolved(
    backend: RecurrentBackend, device: torch.device, batch: Batch, x: Tensor, weights: Any, states: Tensor
) -> tuple[Tensor, Tensor]:
    """What comes out of rows of x, which lie apart, padding included, and the states."""
    weight, bias = weights
    moved = states.clone().to(device)
    out = backend.short_convolution(
        padded(torch.cat((x, x), 1)).to(device)[:, x.shape[1] :],
        weight.to(device),
        None if bias is None else bias.to(device),
        moved,
        placed(backend, batch, device),
        activates=bias is not None,
    )
    return out.cpu(), moved.cpu()


@pytest.mark.parametrize("channels", [1, 33, 300])
@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("biased", [False, True])
def test_short_convolution(device: torch.device, channels: int, taps: int, biased: bool) -> None:
    torch.manual_seed(channels + taps)
    x = drawn(BATCH.num_tokens, channels)
    weights = drawn(taps, channels, seed=1), drawn(channels, seed=2) if biased else None
    states = states_of(taps - 1, channels)
    found, moved = convolved(TritonRecurrent(), device, BATCH, x, weights, states)
    expected, kept = convolved(TorchRecurrent(), torch.device("cpu"), BATCH, x, weights, states)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not found[-PADDING:].any()
    torch.testing.assert_close(moved, kept, equal_nan=True, **CLOSE)


SIZES = [(1, 1, 1, 1), (4, 2, 5, 7), (6, 3, 16, 16), (2, 2, 33, 65), (2, 1, 128, 24)]


class Layer:
    """Random weights, and inputs of so many tokens."""

    def __init__(
        self, kind: str, sizes: tuple[int, int, int, int], num_tokens: int, floor: float = 0.0
    ) -> None:
        heads, groups, keys, values = sizes
        self.shape = heads, keys, values
        self.by_channel = kind == "channels"
        self.num_decays = heads * (keys if self.by_channel else 1)
        bias = drawn(self.num_decays, seed=1)
        self.weights = ScanWeights(
            rate=-drawn(heads).abs() - 0.05,
            bias=bias.view(heads, keys) if self.by_channel else bias,
            skip=drawn(heads, seed=2) if kind == "mamba2" else None,
            gain_scale=2.0,
            limits=(0.1, float("inf")),
            floor=floor,
        )
        self.rows = drawn(num_tokens, 2 * groups * keys + heads * values, seed=3)
        self.steps = 3 * drawn(num_tokens, self.num_decays + heads, seed=4)
        self.groups = groups

    def inputs(self, tokens: slice, device: torch.device) -> ScanInputs:
        """Of some of the tokens, with padding."""
        rows, steps = (padded(part[tokens]).to(device) for part in (self.rows, self.steps))
        heads, keys, values = self.shape
        size, decays = self.groups * keys, steps[:, : self.num_decays]
        return ScanInputs(
            queries=rows[:, :size].view(-1, self.groups, keys),
            keys=rows[:, size : 2 * size].view(-1, self.groups, keys),
            values=rows[:, 2 * size :].view(-1, heads, values),
            decays=decays.view(-1, heads, keys) if self.by_channel else decays,
            gains=steps[:, self.num_decays :] if self.weights.skip is None else None,
        )

    def scanned(
        self,
        backend: RecurrentBackend,
        device: torch.device,
        batch: Batch,
        states: Tensor,
        tokens: slice = slice(None),
    ) -> Tensor:
        """Of some of the tokens; moves `states` on."""
        moved = states.to(device)
        known: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in self.weights]
        out = backend.scan(
            self.inputs(tokens, device), ScanWeights(*known), moved, placed(backend, batch, device)
        )
        states.copy_(moved)
        return out.cpu()[:-PADDING]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("kind", "floor"), [("mamba2", 0.0), ("delta", 0.0), ("channels", 0.0), ("channels", -5.0)]
)
def test_scan(device: torch.device, kind: str, floor: float, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(sum(sizes))
    layer = Layer(kind, sizes, BATCH.num_tokens, floor)
    ours = states_of(*layer.shape)
    theirs = ours.clone()
    out = layer.scanned(TritonRecurrent(), device, BATCH, ours)
    expected = layer.scanned(TorchRecurrent(), torch.device("cpu"), BATCH, theirs)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("kind", ["mamba2", "delta", "channels"])
@pytest.mark.parametrize("cut", [1, 6, 16])
def test_a_prompt_in_pieces_and_alone_has_the_bits_of_the_whole(
    device: torch.device, kind: str, cut: int
) -> None:
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    layer = Layer(kind, (4, 2, 24, 20), whole.num_tokens)
    states, inputs = torch.full((2, NUM_SLOTS, *layer.shape), NAN), torch.full((2, NUM_SLOTS, 3, 48), NAN)
    x, weights = drawn(whole.num_tokens, 48), (drawn(4, 48, seed=1), None)
    backend = TritonRecurrent()
    together = layer.scanned(backend, device, whole, states[0])[:17]
    all_convolved, inputs[0] = convolved(backend, device, whole, x, weights, inputs[0])
    outs, convolutions = [], []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        outs.append(layer.scanned(backend, device, piece, states[1], slice(begin, end)))
        found, inputs[1] = convolved(backend, device, piece, x[begin:end], weights, inputs[1])
        convolutions.append(found[: end - begin])
    assert torch.equal(torch.cat(outs), together)
    assert torch.equal(torch.cat(convolutions), all_convolved[:17])
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])
        assert torch.equal(inputs[0, slot], inputs[1, slot])


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("kind", ["silu", "sigmoid", "gelu_tanh", "softplus"])
@pytest.mark.parametrize("weights", ["none", "shared", "own"])
def test_gated_norm(device: torch.device, size: int, gate_first: bool, kind: str, weights: str) -> None:
    width = 3 * size
    x, gate = drawn(5, width), drawn(5, 2 * width, seed=1)[:, width:]
    weight = {"none": None, "shared": drawn(size, seed=2), "own": drawn(width, seed=2)}[weights]
    options: dict[str, Any] = {"size": size, "gate_first": gate_first, "kind": kind}
    moved = None if weight is None else weight.to(device)
    found = TritonRecurrent().gated_norm(x.to(device), gate.to(device), moved, 1e-5, **options)
    expected = TorchRecurrent().gated_norm(x, gate, weight, 1e-5, **options)
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)


def advanced(
    backend: RecurrentBackend,
    device: torch.device,
    batch: Batch,
    inputs: tuple[Tensor, Tensor],
    weights: RgLruWeights,
    states: Tensor,
) -> Tensor:
    """What recurrent units give; moves `states` on."""
    x, gates = (padded(part).to(device) for part in inputs)
    moved = states.to(device)
    known = RgLruWeights(*(part.to(device) for part in weights))
    out = backend.rg_lru(x, gates, known, moved, placed(backend, batch, device))
    states.copy_(moved)
    return out.cpu()[:-PADDING]


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 7), (4, 33), (2, 100)])
def test_rg_lru(device: torch.device, heads: int, size: int) -> None:
    torch.manual_seed(heads + size)
    inputs = drawn(BATCH.num_tokens, heads * size), drawn(BATCH.num_tokens, heads, 2 * size, seed=1)
    weights = RgLruWeights(bias=drawn(heads, 2 * size, seed=2), rate=-3.0 * drawn(heads * size, seed=3).abs())
    ours = states_of(heads, 1, size)
    theirs = ours.clone()
    found = advanced(TritonRecurrent(), device, BATCH, inputs, weights, ours)
    expected = advanced(TorchRecurrent(), torch.device("cpu"), BATCH, inputs, weights, theirs)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("cut", [1, 6, 16])
def test_units_of_a_prompt_in_pieces_have_the_bits_of_the_whole(device: torch.device, cut: int) -> None:
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    inputs = drawn(whole.num_tokens, 72), drawn(whole.num_tokens, 3, 48, seed=1)
    weights = RgLruWeights(bias=drawn(3, 48, seed=2), rate=-drawn(72, seed=3).abs())
    states, backend = torch.full((2, NUM_SLOTS, 3, 1, 24), NAN), TritonRecurrent()
    together = advanced(backend, device, whole, inputs, weights, states[0])[:17]
    outs = []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        taken = inputs[0][begin:end], inputs[1][begin:end]
        outs.append(advanced(backend, device, piece, taken, weights, states[1]))
    assert torch.equal(torch.cat(outs), together)
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])


def selected(
    backend: RecurrentBackend, device: torch.device, batch: Batch, inputs: SelectiveInputs, states: Tensor
) -> Tensor:
    """What a selective scan gives; moves `states` on."""
    keys, channels = states.shape[2:]
    rate, skip = -drawn(keys, channels, seed=5).abs() - 0.05, drawn(channels, seed=6)
    moved = states.to(device)
    taken = SelectiveInputs(*(padded(part).to(device) for part in inputs))
    step = placed(backend, batch, device)
    out = backend.selective_scan(taken, rate.to(device), skip.to(device), moved, step)
    states.copy_(moved)
    return out.cpu()[:-PADDING]


def selective_inputs(num_tokens: int, keys: int, channels: int) -> SelectiveInputs:
    sizes = (channels, channels, keys, keys)
    return SelectiveInputs(*(drawn(num_tokens, size, seed=seed) for seed, size in enumerate(sizes)))


@pytest.mark.parametrize(("keys", "channels"), [(1, 1), (5, 7), (16, 100)])
def test_selective_scan(device: torch.device, keys: int, channels: int) -> None:
    torch.manual_seed(keys + channels)
    inputs, ours = selective_inputs(BATCH.num_tokens, keys, channels), states_of(1, keys, channels)
    theirs = ours.clone()
    found = selected(TritonRecurrent(), device, BATCH, inputs, ours)
    expected = selected(TorchRecurrent(), torch.device("cpu"), BATCH, inputs, theirs)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("cut", [1, 6, 16])
def test_a_selection_in_pieces_has_the_bits_of_the_whole(device: torch.device, cut: int) -> None:
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    inputs = selective_inputs(whole.num_tokens, 6, 40)
    states, backend = torch.full((2, NUM_SLOTS, 1, 6, 40), NAN), TritonRecurrent()
    together = selected(backend, device, whole, inputs, states[0])[:17]
    outs = []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        taken = SelectiveInputs(*(part[begin:end] for part in inputs))
        outs.append(selected(backend, device, piece, taken, states[1]))
    assert torch.equal(torch.cat(outs), together)
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])
