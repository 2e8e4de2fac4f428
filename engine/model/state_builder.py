"""Layers with a state as native ops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.model.records import Floats, Linear, Recurrence, RecurrentUnit, SelectiveUnit, ShortConvolution
from kernels.host import Values, address_of, row_stride
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
from kernels.recurrent.store import StateCache


class OpBuilder(Protocol):
    """What of a ProgramBuilder is asked for here."""

    step: int

    def buffer(self, name: str, width: int) -> Floats:
        """[max_tokens, width] float32, the same for all layers."""

    def add(self, name: str, args: ctypes.Structure, *keep: object) -> None:
        """Appends an op; `keep` is what its args point to."""

    def product(self, linear: Linear, x: Floats, out: Floats, join: bool) -> None:
        """out (+)= x W^T + b."""

    def product_of_parts(self, linear: Linear, x: Floats, out: Floats, join: bool) -> None:
        """The same where each of several ranks has some of the inputs."""

    def head_product(self, x: Floats, weight: Values, out: Floats) -> None:
        """out[t, h, :M] = x[t, h, :I] weight[h]; weight [H, I, M]."""

    def squares_of_parts(self, args: ctypes.Structure, among: int, *keep: object) -> Floats:
        """[T, 1]: sums of the squares that `args` (GatedRowArgs) say of as many ranks as `among`."""


def add_convolution(
    builder: OpBuilder, mixer: ShortConvolution, cache: StateCache, x: Floats, out: Floats, join: bool
) -> None:
    """Projection, gated convolution, output."""
    channels = mixer.weight.shape[1]
    inner = builder.buffer("state_inner", 3 * channels)
    mixed = builder.buffer("state_mixed", channels)
    builder.product(mixer.inner, x, inner, False)
    args = ShortConvolutionArgs(
        step=builder.step,
        x=address_of(inner[:, 2 * channels :]),
        input_gate=address_of(inner),
        output_gate=address_of(inner[:, channels:]),
        out=address_of(mixed),
        states=address_of(cache.inputs),
        weight=address_of(mixer.weight),
        bias=None if mixer.bias is None else address_of(mixer.bias),
        channels=channels,
        taps=mixer.weight.shape[0],
        x_stride=row_stride(inner),
        activates=0,
    )
    builder.add("short_convolution", args, mixer, cache, inner, mixed)
    builder.product_of_parts(mixer.output, mixed, out, join)


def _convolve(
    builder: OpBuilder,
    mixer: Recurrence | RecurrentUnit | SelectiveUnit,
    cache: StateCache,
    x: Floats,
    channels: Floats,
    *,
    activates: bool,
) -> None:
    """channels [T, C] of those that begin rows of x."""
    taps, width = mixer.weight.shape
    args = ShortConvolutionArgs(
        step=builder.step,
        x=address_of(x),
        weight=address_of(mixer.weight),
        bias=None if mixer.bias is None else address_of(mixer.bias),
        out=address_of(channels),
        states=address_of(cache.inputs),
        channels=width,
        taps=taps,
        x_stride=row_stride(x),
        activates=int(activates),
    )
    builder.add("short_convolution", args, mixer, cache, x, channels)


def add_recurrence(
    builder: OpBuilder, mixer: Recurrence, cache: StateCache, x: Floats, out: Floats, join: bool
) -> None:
    """Projection, convolution, scan, gated norm, output."""
    spec, places = mixer.spec, mixer.places
    size = spec.num_heads * spec.value_dim
    inner = builder.buffer("state_inner", sum(part.outputs for part in mixer.inner.packed_parts))
    channels = builder.buffer("state_channels", spec.channels)
    mixed = builder.buffer("state_mixed", size)
    builder.product(mixer.inner, x, inner, False)
    _convolve(builder, mixer, cache, inner[:, places.channels :], channels, activates=True)
    gate, decays = inner[:, places.gate :], inner[:, places.decays :]
    if mixer.gate_up is not None:
        gate, taken = builder.buffer("state_gate", size), gate
        builder.product(mixer.gate_up, taken, gate, False)
    if mixer.decay_up is not None:
        decays, taken = builder.buffer("state_decays", spec.num_decays), decays
        builder.product(mixer.decay_up, taken, decays, False)
    _add_scan(builder, mixer, cache, (inner, channels, decays), mixed)
    _add_norm(builder, mixer, gate, mixed)
    builder.product_of_parts(mixer.output, mixed, out, join)


def add_unit(
    builder: OpBuilder, mixer: RecurrentUnit, cache: StateCache, x: Floats, out: Floats, join: bool
) -> None:
    """Projection, convolution, gates, recurrent unit, activated gate, output."""
    width = mixer.weight.shape[1]
    size = mixer.gates.shape[1]
    inner = builder.buffer("state_inner", 2 * width)
    channels = builder.buffer("state_channels", width)
    gates = builder.buffer("state_gates", 2 * width)
    builder.product(mixer.inner, x, inner, False)
    _convolve(builder, mixer, cache, inner, channels, activates=False)
    builder.head_product(channels, mixer.gates, gates)
    unit = RgLruArgs(
        step=builder.step,
        x=address_of(channels),
        gates=address_of(gates),
        bias=address_of(mixer.gate_bias),
        rate=address_of(mixer.rate),
        out=address_of(channels),
        states=address_of(cache.matrix),
        channels=width,
        head_dim=size,
    )
    builder.add("rg_lru", unit, mixer, cache, channels, gates)
    add_gate(builder, channels, inner[:, width:], kind="gelu_tanh")
    builder.product_of_parts(mixer.output, channels, out, join)


def add_selection(
    builder: OpBuilder, mixer: SelectiveUnit, cache: StateCache, x: Floats, out: Floats, join: bool
) -> None:
    """Projection, convolution, time steps, keys and queries of it, selective scan, activated gate, output."""
    width, spec = mixer.weight.shape[1], mixer.spec
    inner = builder.buffer("state_inner", 2 * width)
    channels = builder.buffer("state_channels", width)
    builder.product(mixer.inner, x, inner, False)
    _convolve(builder, mixer, cache, inner, channels, activates=True)
    ranks, keys, queries = _add_selected(builder, mixer, channels)
    steps = builder.buffer("state_steps", width)
    builder.product(mixer.steps, ranks, steps, False)
    scan = SelectiveScanArgs(
        step=builder.step,
        x=address_of(channels),
        steps=address_of(steps),
        keys=address_of(keys),
        queries=address_of(queries),
        rate=address_of(mixer.rate),
        skip=address_of(mixer.skip),
        out=address_of(channels),
        states=address_of(cache.matrix),
        channels=width,
        key_dim=spec.key_dim,
    )
    builder.add("selective_scan", scan, mixer, cache, channels, steps, keys, queries)
    add_gate(builder, channels, inner[:, width:], kind="silu")
    builder.product_of_parts(mixer.output, channels, out, join)


def _add_selected(builder: OpBuilder, mixer: SelectiveUnit, channels: Floats) -> list[Floats]:
    """What time steps are made of, keys and queries, each normed where there are norms."""
    sizes, parts, begin = (mixer.spec.low_rank, mixer.spec.key_dim, mixer.spec.key_dim), [], 0
    chosen = builder.buffer("state_selection", sum(sizes))
    builder.product(mixer.selection, channels, chosen, False)
    norms = mixer.norms or (None, None, None)
    for name, size, weight in zip(("ranks", "keys", "queries"), sizes, norms, strict=True):
        part = builder.buffer(f"state_{name}", size)
        args = GatedRowArgs(
            step=builder.step,
            x=address_of(chosen[:, begin:]),
            weight=None if weight is None else address_of(weight),
            out=address_of(part),
            width=size,
            size=size,
            x_stride=row_stride(chosen),
            eps=mixer.spec.norm_eps,
        )
        builder.add("gated_norm", args, mixer, chosen, part)
        parts.append(part)
        begin += size
    return parts


def _add_norm(builder: OpBuilder, mixer: Recurrence, gate: Floats, mixed: Floats) -> None:
    """The norm of what was scanned, under a gate, in place. It may be over the heads of several ranks, which
    have as many each.
    """
    spec, width = mixer.spec, mixed.shape[1]
    among = max(1, spec.norm_size // width)
    args = GatedRowArgs(
        step=builder.step,
        x=address_of(mixed),
        gate=address_of(gate),
        weight=None if mixer.norm is None else address_of(mixer.norm),
        out=address_of(mixed),
        width=width,
        size=min(spec.norm_size or width, width),
        x_stride=row_stride(mixed),
        gate_stride=row_stride(gate),
        shares_weight=int(spec.kind == "delta"),
        gate_first=int(spec.gate_first),
        gate_kind=GATES[spec.gate_kind],
        eps=spec.norm_eps,
        whole=spec.norm_size,
    )
    squares = builder.squares_of_parts(args, among, mixer, gate, mixed) if among > 1 else None
    args.squares = None if squares is None else address_of(squares)
    builder.add("gated_norm", args, mixer, gate, mixed, squares)


def _add_scan(
    builder: OpBuilder,
    mixer: Recurrence,
    cache: StateCache,
    taken: tuple[Floats, Floats, Floats],
    mixed: Floats,
) -> None:
    """What the scan takes in, from the projection, its convolved channels and decays, and the scan."""
    (inner, channels, decays), spec, places = taken, mixer.spec, mixer.places
    factors = builder.buffer("state_factors", 2 * spec.num_heads)
    common = {
        "step": builder.step,
        "queries": address_of(channels[:, places.queries :]),
        "keys": address_of(channels[:, places.keys :]),
        "factors": address_of(factors),
        "num_heads": spec.num_heads,
        "num_groups": spec.num_groups,
        "key_dim": spec.key_dim,
        "row_stride": row_stride(channels),
        "decays": address_of(decays),
        "decay_stride": row_stride(decays),
        "kind": SCANS["channels" if spec.channel_decays else "delta" if spec.kind == "delta" else "mamba2"],
    }
    inputs = ScanInputsArgs(
        gains=address_of(inner[:, places.gains :]) if spec.kind == "delta" else None,
        rate=address_of(mixer.rate),
        bias=address_of(mixer.step_bias),
        gain_stride=row_stride(inner),
        floor=spec.decay_floor,
        query_scale=spec.key_dim**-0.5,
        gain_scale=spec.gain_scale,
        least_step=spec.step_limits[0],
        largest_step=spec.step_limits[1],
        **common,
    )
    builder.add("scan_inputs", inputs, mixer, inner, channels, decays, factors)
    scan = ScanArgs(
        values=address_of(channels[:, places.values :]),
        skip=None if mixer.skip is None else address_of(mixer.skip),
        out=address_of(mixed),
        states=address_of(cache.matrix),
        value_dim=spec.value_dim,
        **common,
    )
    builder.add("state_scan", scan, mixer, cache, channels, decays, factors, mixed)


def add_head_gates(builder: OpBuilder, gate: Linear | None, x: Floats, values: Floats) -> None:
    """values [T, X] of heads times the sigmoids of what a gate, if there is one, makes of x for each head."""
    if gate is not None:
        num_heads = sum(part.outputs for part in gate.packed_parts)
        gates = builder.buffer("head_gates", num_heads)
        builder.product(gate, x, gates, False)
        add_gate(builder, values, gates, num_gates=num_heads)


def add_gate(
    builder: OpBuilder, mixed: Floats, gates: Floats, kind: str = "sigmoid", num_gates: int = 0
) -> None:
    """mixed [T, X] times the activation of gates, in place: of X, or of `num_gates`, each for a run of X."""
    width = mixed.shape[1]
    num_gates = num_gates or width
    args = GatedRowArgs(
        step=builder.step,
        x=address_of(mixed),
        gate=address_of(gates),
        out=address_of(mixed),
        width=width,
        size=width if num_gates == width else width // num_gates,
        x_stride=row_stride(mixed),
        gate_stride=row_stride(gates),
        gate_kind=GATES[kind],
        shares_gate=int(num_gates < width),
    )
    builder.add("gated_norm", args, mixed, gates)


STATE_OPS: Mapping[type, Callable[..., None]] = {
    ShortConvolution: add_convolution,
    Recurrence: add_recurrence,
    RecurrentUnit: add_unit,
    SelectiveUnit: add_selection,
}
"""What appends the ops of a layer with a state."""
