"""Layers with a state: the native ops against their references, over odd sizes; and the same bits wherever a
prompt is cut, and whoever else is in the batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.native.library import NativeLibrary, Op, StepStruct
from kernels.recurrent.backends import RgLruWeights, SelectiveInputs
from kernels.recurrent.native import (
    GATES,
    SCANS,
    GatedRowArgs,
    RgLruArgs,
    ScanArgs,
    ScanInputsArgs,
    SelectiveScanArgs,
    ShortConvolutionArgs,
)
from kernels.recurrent.reference import (
    delta_factors,
    gated_norm,
    mamba2_factors,
    rg_lru,
    selective_scan,
    short_convolution,
    state_scan,
    to_length,
)
from tests.kernels.state_batches import BATCH, NAN, NUM_SLOTS, Batch, states_of

CLOSE = {"atol": 3e-5, "rtol": 3e-5}


def run(library: NativeLibrary, name: str, args: ctypes.Structure) -> None:
    library.run([Op(library, name, args)], num_threads=2)


def convolved(
    library: NativeLibrary, batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor
) -> Tensor:
    """The native convolution of the last third of x [T, 3 C], between gates; moves `states` on."""
    channels = weight.shape[1]
    out, step = torch.full((batch.num_tokens, channels), NAN), batch.native()
    args = ShortConvolutionArgs(
        step=ctypes.addressof(step),
        x=x[:, 2 * channels :].data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        input_gate=x.data_ptr(),
        output_gate=x[:, channels:].data_ptr(),
        out=out.data_ptr(),
        states=states.data_ptr(),
        channels=channels,
        taps=weight.shape[0],
        x_stride=x.stride(0),
        activates=0 if bias is None else 1,
    )
    run(library, "short_convolution", args)
    return out


@pytest.mark.parametrize("channels", [1, 7, 16, 33, 300])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("biased", [False, True])
def test_short_convolution(native: NativeLibrary, channels: int, taps: int, biased: bool) -> None:
    torch.manual_seed(channels + taps)
    x, weight = torch.randn(BATCH.num_tokens, 3 * channels), torch.randn(taps, channels)
    bias = torch.randn(channels) if biased else None
    before = states_of(taps - 1, channels)
    ours, theirs = before.clone(), before.clone()
    out = convolved(native, BATCH, x, weight, bias, ours)
    first, second, inner = x.chunk(3, dim=1)
    expected = short_convolution(first * inner, weight, bias, theirs, BATCH.reference(), activates=biased)
    torch.testing.assert_close(out, second * expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@dataclass
class Scan:
    """Inputs of a scan over a batch."""

    kind: str
    heads: int
    groups: int
    keys: int
    values: int
    num_tokens: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        self.rows = torch.randn(
            self.num_tokens, 2 * self.groups * self.keys + self.heads * self.values
        )  # queries, keys, values
        # Decays, and behind them gains.
        self.by_channel = self.kind == "channels"
        self.num_decays = self.heads * (self.keys if self.by_channel else 1)
        self.steps = 3 * torch.randn(self.num_tokens, self.num_decays + self.heads)
        self.rate, self.bias = -torch.rand(self.heads) - 0.05, torch.randn(self.num_decays)
        self.skip = torch.randn(self.heads)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = self.groups * self.keys
        return rows[:, :size], rows[:, size : 2 * size], rows[:, 2 * size :]

    def native(self, library: NativeLibrary, batch: Batch, states: Tensor, chosen: Tensor | None) -> Tensor:
        """Of the rows chosen from the inputs."""
        rows, steps = self.rows.clone(), self.steps.clone()
        if chosen is not None:
            rows, steps = rows[chosen].contiguous(), steps[chosen].contiguous()
        factors = torch.full((len(rows), self.heads, 2), NAN)
        out = torch.full((len(rows), self.heads, self.values), NAN)
        queries, keys, values = self.parts(rows)
        step = batch.native()
        shape = {
            "step": ctypes.addressof(step),
            "num_heads": self.heads,
            "num_groups": self.groups,
            "key_dim": self.keys,
            "row_stride": rows.stride(0),
            "kind": SCANS[self.kind],
            "queries": queries.data_ptr(),
            "keys": keys.data_ptr(),
            "factors": factors.data_ptr(),
        }
        inputs = ScanInputsArgs(
            decays=steps.data_ptr(),
            gains=None if self.kind == "mamba2" else steps[:, self.num_decays :].data_ptr(),
            rate=self.rate.data_ptr(),
            bias=self.bias.data_ptr(),
            decay_stride=steps.stride(0),
            gain_stride=steps.stride(0),
            floor=self.floor,
            query_scale=self.keys**-0.5,
            gain_scale=2.0,
            least_step=0.1,
            largest_step=float("inf"),
            **shape,
        )
        run(library, "scan_inputs", inputs)
        scan = ScanArgs(
            values=values.data_ptr(),
            skip=self.skip.data_ptr() if self.kind == "mamba2" else None,
            decays=steps.data_ptr() if self.by_channel else None,
            decay_stride=steps.stride(0),
            out=out.data_ptr(),
            states=states.data_ptr(),
            value_dim=self.values,
            **shape,
        )
        run(library, "state_scan", scan)
        return out

    def reference(self, batch: Batch, states: Tensor) -> Tensor:
        flat_queries, flat_keys, flat_values = self.parts(self.rows)
        queries, keys = (part.unflatten(1, (self.groups, -1)) for part in (flat_queries, flat_keys))
        values, decays = flat_values.unflatten(1, (self.heads, -1)), self.steps[:, : self.num_decays]
        is_delta, bias = self.kind != "mamba2", self.bias
        if self.by_channel:
            decays, bias = decays.unflatten(1, (self.heads, -1)), bias.view(self.heads, -1)
        if is_delta:
            queries, keys = to_length(queries, self.keys**-0.5), to_length(keys)
            gains = self.steps[:, self.num_decays :]
            decay, gain = delta_factors(decays, gains, self.rate, bias, 2.0, self.floor)
        else:
            decay, gain = mamba2_factors(decays, self.rate, bias, (0.1, float("inf")))
        out = state_scan(queries, keys, values, decay, gain, states, batch.reference(), delta=is_delta)
        return out if is_delta else out + self.skip[:, None] * values


@pytest.mark.parametrize(
    ("heads", "groups", "keys", "values"),
    [(1, 1, 1, 1), (4, 2, 5, 7), (6, 3, 16, 16), (2, 2, 33, 65), (3, 1, 128, 130), (2, 1, 7, 200)],
)
@pytest.mark.parametrize(("kind", "floor"), [*((kind, 0.0) for kind in SCANS), ("channels", -5.0)])
def test_scan(
    native: NativeLibrary, kind: str, floor: float, heads: int, groups: int, keys: int, values: int
) -> None:
    torch.manual_seed(heads + keys + values)
    scan = Scan(kind, heads, groups, keys, values, BATCH.num_tokens, floor)
    before = states_of(heads, keys, values)
    ours, theirs = before.clone(), before.clone()
    out = scan.native(native, BATCH, ours, None)
    torch.testing.assert_close(out, scan.reference(BATCH, theirs), **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("cut", [1, 6, 16])
def test_a_prompt_in_pieces_and_alone_has_the_bits_of_the_whole(
    native: NativeLibrary, kind: str, cut: int
) -> None:
    torch.manual_seed(cut)
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    scan = Scan(kind, 4, 2, 24, 40, whole.num_tokens)
    states, inputs = torch.full((2, NUM_SLOTS, 4, 24, 40), NAN), torch.full((2, NUM_SLOTS, 3, 48), NAN)
    x, weight = torch.randn(whole.num_tokens, 3 * 48), torch.randn(4, 48)
    together = scan.native(native, whole, states[0], None)[:17]
    convolved_together = convolved(native, whole, x, weight, None, inputs[0])[:17]
    outs, convolutions = [], []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        chosen = torch.arange(begin, end)
        outs.append(scan.native(native, piece, states[1], chosen))
        convolutions.append(convolved(native, piece, x[begin:end].contiguous(), weight, None, inputs[1]))
    assert torch.equal(torch.cat(outs), together)
    assert torch.equal(torch.cat(convolutions), convolved_together)
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])
        assert torch.equal(inputs[0, slot], inputs[1, slot])


@dataclass
class Units:
    """Inputs of recurrent units over a batch."""

    heads: int
    size: int
    num_tokens: int

    def __post_init__(self) -> None:
        self.x = torch.randn(self.num_tokens, self.heads * self.size)
        self.gates = torch.randn(self.num_tokens, self.heads, 2 * self.size)
        rate = -3.0 * torch.rand(self.heads * self.size)
        # Some keep nearly all, and some nearly nothing.
        rate[::3], rate[1::5] = -0.01, -40.0
        self.weights = RgLruWeights(bias=torch.randn(self.heads, 2 * self.size), rate=rate)

    def native(
        self, library: NativeLibrary, batch: Batch, states: Tensor, tokens: slice = slice(None)
    ) -> Tensor:
        x, gates, step = self.x[tokens].contiguous(), self.gates[tokens].contiguous(), batch.native()
        out = torch.full_like(x, NAN)
        args = RgLruArgs(
            step=ctypes.addressof(step),
            x=x.data_ptr(),
            gates=gates.data_ptr(),
            bias=self.weights.bias.data_ptr(),
            rate=self.weights.rate.data_ptr(),
            out=out.data_ptr(),
            states=states.data_ptr(),
            channels=x.shape[1],
            head_dim=self.size,
        )
        run(library, "rg_lru", args)
        return out


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 7), (2, 16), (4, 33), (2, 300)])
def test_rg_lru(native: NativeLibrary, heads: int, size: int) -> None:
    torch.manual_seed(heads + size)
    units = Units(heads, size, BATCH.num_tokens)
    ours = states_of(heads, 1, size)
    theirs = ours.clone()
    out = units.native(native, BATCH, ours)
    expected = rg_lru(units.x, units.gates, units.weights, theirs, BATCH.reference())
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("cut", [1, 6, 16])
def test_units_of_a_prompt_in_pieces_have_the_bits_of_the_whole(native: NativeLibrary, cut: int) -> None:
    torch.manual_seed(cut)
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    units = Units(3, 24, whole.num_tokens)
    states = torch.full((2, NUM_SLOTS, 3, 1, 24), NAN)
    together, outs = units.native(native, whole, states[0])[:17], []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        outs.append(units.native(native, piece, states[1], slice(begin, end)))
    assert torch.equal(torch.cat(outs), together)
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])


@dataclass
class Selection:
    """Inputs of a selective scan over a batch."""

    keys: int
    channels: int
    num_tokens: int

    def __post_init__(self) -> None:
        count, keys, channels = self.num_tokens, self.keys, self.channels
        sizes = {"x": channels, "steps": channels, "keys": keys, "queries": keys}
        self.inputs = SelectiveInputs(**{name: torch.randn(count, size) for name, size in sizes.items()})
        self.rate, self.skip = -torch.rand(keys, channels) - 0.05, torch.randn(channels)

    def native(
        self, library: NativeLibrary, batch: Batch, states: Tensor, tokens: slice = slice(None)
    ) -> Tensor:
        step, parts = batch.native(), [part[tokens].contiguous() for part in self.inputs]
        out = torch.full_like(parts[0], NAN)
        named = zip(SelectiveInputs._fields, parts, strict=True)
        args = SelectiveScanArgs(
            step=ctypes.addressof(step),
            **{name: part.data_ptr() for name, part in named},
            rate=self.rate.data_ptr(),
            skip=self.skip.data_ptr(),
            out=out.data_ptr(),
            states=states.data_ptr(),
            channels=self.channels,
            key_dim=self.keys,
        )
        run(library, "selective_scan", args)
        return out


@pytest.mark.parametrize(("keys", "channels"), [(1, 1), (5, 7), (16, 33), (16, 300)])
def test_selective_scan(native: NativeLibrary, keys: int, channels: int) -> None:
    torch.manual_seed(keys + channels)
    scan = Selection(keys, channels, BATCH.num_tokens)
    ours = states_of(1, keys, channels)
    theirs = ours.clone()
    out = scan.native(native, BATCH, ours)
    expected = selective_scan(scan.inputs, scan.rate, scan.skip, theirs, BATCH.reference())
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("cut", [1, 6, 16])
def test_a_selection_in_pieces_has_the_bits_of_the_whole(native: NativeLibrary, cut: int) -> None:
    torch.manual_seed(cut)
    whole = Batch(rows=[(0, 17), (0, 4)], slots=[2, 5], snapshots=[((8, 1),), ()])
    scan = Selection(6, 40, whole.num_tokens)
    states = torch.full((2, NUM_SLOTS, 1, 6, 40), NAN)
    together, outs = scan.native(native, whole, states[0])[:17], []
    for begin, end in ((0, cut), (cut, 17)):
        copies = (((8, 1),) if begin < 8 <= end else (),)
        piece = Batch(rows=[(begin, end - begin)], slots=[2], snapshots=list(copies))
        outs.append(scan.native(native, piece, states[1], slice(begin, end)))
    assert torch.equal(torch.cat(outs), together)
    for slot in (1, 2):
        assert torch.equal(states[0, slot], states[1, slot])


@pytest.mark.parametrize("size", [1, 7, 100])
def test_rows_without_a_gate_are_normed_alone(native: NativeLibrary, size: int) -> None:
    torch.manual_seed(size)
    x, weight, step = torch.randn(5, 3 * size), torch.randn(size), StepStruct(num_tokens=5)
    out = torch.full((5, size), NAN)
    args = GatedRowArgs(
        step=ctypes.addressof(step),
        x=x[:, size:].data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        width=size,
        size=size,
        x_stride=3 * size,
        eps=1e-5,
    )
    run(native, "gated_norm", args)
    part = x[:, size : 2 * size]
    expected = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("size", [1, 7, 16, 100])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("weights", ["none", "shared", "own"])
def test_gated_norm(native: NativeLibrary, size: int, gate_first: bool, kind: str, weights: str) -> None:
    torch.manual_seed(size)
    width = 3 * size
    x, gate = torch.randn(5, width), torch.randn(5, 2 * width)
    weight = {"none": None, "shared": torch.randn(size), "own": torch.randn(width)}[weights]
    out, step = torch.full_like(x, NAN), StepStruct(num_tokens=5)
    args = GatedRowArgs(
        step=ctypes.addressof(step),
        x=x.data_ptr(),
        gate=gate[:, width:].data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        out=out.data_ptr(),
        width=width,
        size=size,
        x_stride=width,
        gate_stride=2 * width,
        shares_weight=int(weights == "shared"),
        gate_first=int(gate_first),
        gate_kind=GATES[kind],
        eps=1e-5,
    )
    run(native, "gated_norm", args)
    expected = gated_norm(x, gate[:, width:], weight, 1e-5, size=size, gate_first=gate_first, kind=kind)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_group_may_go_beyond_what_is_here(native: NativeLibrary, gate_first: bool) -> None:
    """Both halves have their squares added up before either is normed."""
    torch.manual_seed(0)
    (x, gate), weight, half = torch.randn(2, 5, 74), torch.randn(74), 37
    squares, out, step = torch.full((2, 5), NAN), torch.full((2, 5, half), NAN), StepStruct(num_tokens=5)

    def args(part: int) -> ctypes.Structure:
        begin = part * half
        found: ctypes.Structure = GatedRowArgs(
            step=ctypes.addressof(step),
            x=x[:, begin:].data_ptr(),
            gate=gate[:, begin:].data_ptr(),
            weight=weight[begin:].data_ptr(),
            out=out[part].data_ptr(),
            width=half,
            size=half,
            x_stride=74,
            gate_stride=74,
            gate_first=int(gate_first),
            gate_kind=GATES["silu"],
            eps=1e-5,
            squares=squares[part].data_ptr(),
            whole=74,
        )
        return found

    for part in (0, 1):
        run(native, "gated_squares", args(part))
    squares[:] = squares.sum(0)
    for part in (0, 1):
        run(native, "gated_norm", args(part))
    expected = gated_norm(x, gate, weight, 1e-5, size=74, gate_first=gate_first, kind="silu")
    torch.testing.assert_close(torch.cat(tuple(out), 1), expected, **CLOSE)


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("kind", GATES)
def test_groups_may_have_one_gate_each(native: NativeLibrary, size: int, kind: str) -> None:
    torch.manual_seed(size)
    x, gate = torch.randn(5, 3 * size), 4 * torch.randn(5, 8)
    out, step = torch.full_like(x, NAN), StepStruct(num_tokens=5)
    args = GatedRowArgs(
        step=ctypes.addressof(step),
        x=x.data_ptr(),
        gate=gate[:, 2:].data_ptr(),
        out=out.data_ptr(),
        width=3 * size,
        size=size,
        x_stride=3 * size,
        gate_stride=8,
        gate_kind=GATES[kind],
        shares_gate=1,
    )
    run(native, "gated_norm", args)
    each = gate[:, 2:5].repeat_interleave(size, 1)
    expected = gated_norm(x, each, None, 0.0, size=size, gate_first=False, kind=kind)
    torch.testing.assert_close(out, expected, **CLOSE)
