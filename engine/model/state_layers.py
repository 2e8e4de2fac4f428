"""Layers that carry a state from token to token: how their records are read, and how torch computes from
them.

Families rename what they store to `state.in_proj`, `state.conv1d`, `state.out_proj` and so on.

Shape letters: T tokens, E hidden size, C channels, W taps, H heads of values, G heads of keys, K key dim, V
value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.model.layers import StepContext, multiply, read_floats, read_linear
from engine.model.records import (
    Linear,
    Recurrence,
    RecurrentUnit,
    SelectiveUnit,
    ShortConvolution,
    StateMixer,
    StatePlaces,
)
from engine.model.spec import ModelSpec, StateSpec
from engine.model.weights import WeightReader
from kernels.norm.backends import RowNorm
from kernels.recurrent.backends import RgLruWeights, ScanInputs, ScanWeights, SelectiveInputs
from kernels.recurrent.store import StateCache
from kernels.rows import QuantizedRows


def read_state(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> StateMixer:
    """The mixer of layer `index`, which has a state; names of its tensors begin with `prefix`."""
    state, hidden = spec.state, spec.hidden_size
    assert state is not None, "called for such layers only"
    taps = _read_taps(weights, prefix, state)
    bias = None
    if state.convolution_bias:
        bias = read_floats(weights, f"{prefix}.conv1d.bias", state.channels)
    common: dict[str, Any] = {"weight": taps.squeeze(1).T.contiguous(), "bias": bias}
    inputs = state.channels if state.kind == "convolution" else state.num_heads * state.value_dim
    common["output"] = read_linear(weights, [f"{prefix}.out_proj"], [hidden], inputs, state.bias)
    if state.kind == "convolution":
        inner = read_linear(weights, [f"{prefix}.in_proj"], [3 * state.channels], hidden, state.bias)
        return ShortConvolution(inner=inner, **common)
    if state.kind == "rg_lru":
        names = [f"{prefix}.x_proj", f"{prefix}.y_proj"]
        inner = read_linear(weights, names, [state.channels] * 2, hidden, state.bias)
        return RecurrentUnit(inner=inner, **_read_gates(weights, f"{prefix}.rg_lru", state), **common)
    if state.kind == "selective":
        inner = read_linear(weights, [f"{prefix}.in_proj"], [2 * state.channels], hidden, state.bias)
        return SelectiveUnit(spec=state, inner=inner, **_read_selection(weights, prefix, state), **common)
    read_inner = {"mamba2": _read_mamba2_inner, "delta": _read_delta_inner, "linear": _read_linear_inner}
    inner, places = read_inner[state.kind](weights, prefix, state, hidden)
    if state.low_rank:
        for name, part, size in (("gate_up", "g_up", inputs), ("decay_up", "a_up", state.num_decays)):
            common[name] = read_linear(weights, [f"{prefix}.{part}_proj"], [size], state.low_rank, False)
    decays = (state.num_heads, state.key_dim) if state.channel_decays else (state.num_heads,)
    return Recurrence(
        spec=state,
        inner=inner,
        places=places,
        rate=_read_rate(weights, f"{prefix}.A_log", state, index),
        step_bias=torch.zeros(state.num_heads, device=weights.device)
        if state.rates
        else read_floats(weights, f"{prefix}.dt_bias", state.num_decays).view(decays),
        skip=read_floats(weights, f"{prefix}.D", state.num_heads) if state.kind == "mamba2" else None,
        norm=_read_state_norm(weights, f"{prefix}.norm.weight", state) if state.norm_size else None,
        **common,
    )


def _read_selection(weights: WeightReader, prefix: str, state: StateSpec) -> dict[str, Any]:
    """What of a selective scan lies between its convolution and its output."""
    channels, keys, rank = state.channels, state.key_dim, state.low_rank
    sizes = {"dt": rank, "b": keys, "c": keys}
    norms: list[Tensor] = []
    if state.selection_norm == "learned":
        norms = [read_floats(weights, f"{prefix}.{part}_layernorm.weight", sizes[part]) for part in sizes]
    elif state.selection_norm == "plain":
        norms = [torch.ones(size, device=weights.device) for size in sizes.values()]
    return {
        "selection": read_linear(weights, [f"{prefix}.x_proj"], [rank + 2 * keys], channels, False),
        "norms": norms,
        "steps": read_linear(weights, [f"{prefix}.dt_proj"], [channels], rank, True),
        "rate": -torch.exp(read_floats(weights, f"{prefix}.A_log", channels, keys)).T.contiguous(),
        "skip": read_floats(weights, f"{prefix}.D", channels),
    }


def _read_rate(weights: WeightReader, name: str, state: StateSpec, index: int) -> Tensor:
    """Of each head [H], for which axes of one element may be around it."""
    if state.rates:
        return -torch.tensor(state.rates[state.layers.index(index)], device=weights.device)
    shape = weights.shape(name) or ()
    kept = shape if math.prod(shape) == state.num_heads else (state.num_heads,)
    return -torch.exp(read_floats(weights, name, *kept).flatten())


def _read_gates(weights: WeightReader, prefix: str, state: StateSpec) -> dict[str, Any]:
    """Products of each head's channels that open a recurrent unit, and its rate, in which eight is fixed."""
    heads, size, parts = state.num_heads, state.value_dim, ("input", "recurrent")
    products = [read_floats(weights, f"{prefix}.{part}_gate_weight", heads, size, size) for part in parts]
    biases = [read_floats(weights, f"{prefix}.{part}_gate_bias", heads, size) for part in parts]
    return {
        "gates": torch.cat(products, dim=2).contiguous(),
        "gate_bias": torch.cat(biases, dim=1).contiguous(),
        "rate": -8.0 * softplus(read_floats(weights, f"{prefix}.recurrent_param", state.channels)),
    }


def _read_taps(weights: WeightReader, prefix: str, state: StateSpec) -> Tensor:
    """Weights of the convolution [C, 1, W]; those of queries, keys and values may lie apart."""
    if state.kind == "linear":
        return torch.ones(state.channels, 1, state.taps, device=weights.device)
    names = [f"{prefix}.conv1d.weight"]
    if state.layout == "apart":
        names = [f"{prefix}.{part}_conv1d.weight" for part in "qkv"]
    shapes = [weights.shape(name) or () for name in names]
    sizes = [shape[0] if len(shape) == 3 else 0 for shape in shapes]
    if sum(sizes) != state.channels:
        # Only together have they a size that config.json implies: some were saved in equal parts.
        sizes = [state.channels] * len(names)
    parts = zip(names, sizes, strict=True)
    return torch.cat([weights.take(name, (size, 1, state.taps), dtype=torch.float32) for name, size in parts])


def _read_state_norm(weights: WeightReader, name: str, state: StateSpec) -> Tensor:
    """Weights of each element, or, with the delta rule, those that all heads share."""
    is_shared = state.kind == "delta"
    return read_floats(weights, name, state.norm_size if is_shared else state.num_heads * state.value_dim)


def _read_mamba2_inner(
    weights: WeightReader, prefix: str, state: StateSpec, hidden: int
) -> tuple[Linear, StatePlaces]:
    """Gate, values, keys, queries, time steps."""
    values, keys = state.num_heads * state.value_dim, state.num_groups * state.key_dim
    outputs = values + state.channels + state.num_heads
    places = StatePlaces(
        gate=0, channels=values, decays=values + state.channels, values=0, keys=values, queries=values + keys
    )
    return read_linear(weights, [f"{prefix}.in_proj"], [outputs], hidden, state.bias), places


def _read_delta_inner(
    weights: WeightReader, prefix: str, state: StateSpec, hidden: int
) -> tuple[Linear, StatePlaces]:
    """Queries, keys, values, gate, gains, decays."""
    values, keys, heads = state.num_heads * state.value_dim, state.num_groups * state.key_dim, state.num_heads
    order, gates = None, values
    if state.layout == "by_group":
        names, outputs = ["in_proj_qkvz", "in_proj_ba"], [2 * keys + 2 * values, 2 * heads]
        order = _from_groups(state).to(weights.device)
    elif state.layout == "apart":
        names = [f"{part}_proj" for part in "qkvgba"]
        gates, decays = state.low_rank or values, state.low_rank or state.num_decays
        outputs = [keys, keys, values, gates, heads, decays]
    else:
        names = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        outputs = [state.channels, values, heads, heads]
    gate, gains = state.channels, state.channels + gates
    places = StatePlaces(
        channels=0,
        gate=gate,
        gains=gains,
        decays=gains + heads,
        queries=0,
        keys=keys,
        values=2 * keys,
    )
    names = [f"{prefix}.{name}" for name in names]
    return read_linear(weights, names, outputs, hidden, state.bias, order), places


def _read_linear_inner(
    weights: WeightReader, prefix: str, state: StateSpec, hidden: int
) -> tuple[Linear, StatePlaces]:
    """Queries, keys and values, which are stored head by head, and gate; anything does for a time step."""
    size = state.channels // 3
    order = torch.arange(state.channels).view(state.num_heads, 3, -1).transpose(0, 1).flatten()
    order = torch.cat((order, torch.arange(state.channels, state.channels + size))).to(weights.device)
    names = [f"{prefix}.qkv_proj", f"{prefix}.output_gate"]
    places = StatePlaces(channels=0, gate=3 * size, decays=0, keys=size, values=2 * size)
    return read_linear(weights, names, [state.channels, size], hidden, state.bias, order), places


def _from_groups(state: StateSpec) -> Tensor:
    """Rows that are stored group by group: all queries, then all keys and so on."""
    groups, each = state.num_groups, state.num_heads // state.num_groups
    values = each * state.value_dim
    first = torch.arange(groups * (2 * state.key_dim + 2 * values))
    second = torch.arange(groups * 2 * each) + first.numel()
    parts = [
        *torch.split(first.view(groups, -1), [state.key_dim, state.key_dim, values, values], dim=1),
        *torch.split(second.view(groups, -1), [each, each], dim=1),
    ]
    return torch.cat([part.flatten() for part in parts])


def convolve(
    mixer: ShortConvolution, x: Tensor | QuantizedRows, cache: StateCache, step: StepContext
) -> Tensor:
    """x [T, E] -> [T, E]; moves the states of this step's sequences on."""
    assert step.states is not None, "the model has states"
    first, second, inner = multiply(mixer.inner, x, step.adapters).float().chunk(3, dim=-1)
    weight, bias = cast("Tensor", mixer.weight), cast("Tensor | None", mixer.bias)
    convolved = step.kernels.recurrent.short_convolution
    mixed = convolved(first * inner, weight, bias, cache.inputs, step.states, activates=False)
    return multiply(mixer.output, (second * mixed).to(step.dtype), step.adapters)


def _convolved(
    mixer: Recurrence | RecurrentUnit | SelectiveUnit,
    x: Tensor,
    cache: StateCache,
    step: StepContext,
    *,
    activates: bool,
) -> Tensor:
    """x [T, C] -> [T, C]."""
    weight, bias = cast("Tensor", mixer.weight), cast("Tensor | None", mixer.bias)
    convolution = step.kernels.recurrent.short_convolution
    return convolution(x, weight, bias, cache.inputs, step.states, activates=activates)


def recur_units(
    mixer: RecurrentUnit, x: Tensor | QuantizedRows, cache: StateCache, step: StepContext
) -> Tensor:
    """x [T, E] -> [T, E]; moves the states of this step's sequences on."""
    assert step.states is not None, "the model has states"
    kernels, gates = step.kernels.recurrent, cast("Tensor", mixer.gates)
    (heads, size), channels = gates.shape[:2], mixer.weight.shape[1]
    projected = multiply(mixer.inner, x, step.adapters).float()
    mixed = _convolved(mixer, projected[:, :channels], cache, step, activates=False)
    by_head = mixed.view(-1, heads, size).transpose(0, 1).contiguous()
    opened = step.kernels.linear.batched(by_head, gates).transpose(0, 1).contiguous()
    weights = RgLruWeights(bias=cast("Tensor", mixer.gate_bias), rate=cast("Tensor", mixer.rate))
    taken = kernels.rg_lru(mixed, opened, weights, cache.matrix, step.states)
    gate = projected[:, channels:]
    gated = kernels.gated_norm(taken, gate, None, 0.0, size=channels, gate_first=False, kind="gelu_tanh")
    return multiply(mixer.output, gated.to(step.dtype), step.adapters)


def select(mixer: SelectiveUnit, x: Tensor | QuantizedRows, cache: StateCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; moves the states of this step's sequences on."""
    assert step.states is not None, "the model has states"
    spec, kernels, channels = mixer.spec, step.kernels.recurrent, mixer.spec.channels
    projected = multiply(mixer.inner, x, step.adapters).float()
    mixed = _convolved(mixer, projected[:, :channels], cache, step, activates=True)
    chosen = multiply(mixer.selection, mixed.to(step.dtype), step.adapters).float()
    parts = torch.split(chosen, [spec.low_rank, spec.key_dim, spec.key_dim], dim=1)
    ranks, keys, queries = (part.contiguous() for part in parts)
    if mixer.norms:
        ranks, keys, queries = (
            step.kernels.norm.plain(part, RowNorm(cast("Tensor", weight), spec.norm_eps))
            for part, weight in zip((ranks, keys, queries), mixer.norms, strict=True)
        )
    steps = multiply(mixer.steps, ranks.to(step.dtype), step.adapters).float()
    taken = kernels.selective_scan(
        SelectiveInputs(mixed, steps, keys, queries),
        cast("Tensor", mixer.rate),
        cast("Tensor", mixer.skip),
        cache.matrix,
        step.states,
    )
    gate = projected[:, channels:]
    gated = kernels.gated_norm(taken, gate, None, 0.0, size=channels, gate_first=False, kind="silu")
    return multiply(mixer.output, gated.to(step.dtype), step.adapters)


def recur(mixer: Recurrence, x: Tensor | QuantizedRows, cache: StateCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; moves the states of this step's sequences on."""
    assert step.states is not None, "the model has states"
    spec, places = mixer.spec, mixer.places
    size = spec.num_heads * spec.value_dim
    projected = multiply(mixer.inner, x, step.adapters).float()

    kernels, channels = step.kernels.recurrent, projected[:, places.channels :][:, : spec.channels]
    mixed = _convolved(mixer, channels, cache, step, activates=True)
    weights = ScanWeights(
        rate=cast("Tensor", mixer.rate),
        bias=cast("Tensor", mixer.step_bias),
        skip=cast("Tensor | None", mixer.skip),
        gain_scale=spec.gain_scale,
        limits=spec.step_limits,
        floor=spec.decay_floor,
    )
    inputs = _scan_inputs(mixer, mixed, projected, step)
    normed = kernels.gated_norm(
        kernels.scan(inputs, weights, cache.matrix, step.states).flatten(1),
        _raised(mixer.gate_up, projected, places.gate, size, step),
        cast("Tensor | None", mixer.norm),
        spec.norm_eps,
        size=spec.norm_size or size,
        gate_first=spec.gate_first,
        kind=spec.gate_kind,
    )
    return multiply(mixer.output, normed.to(step.dtype), step.adapters)


def _raised(linear: Linear | None, projected: Tensor, first: int, count: int, step: StepContext) -> Tensor:
    """A part [T, count] of the projection that begins at `first`; or what `linear` makes of that."""
    if linear is None:
        return projected[:, first : first + count]
    taken = projected[:, first : first + linear.inputs].to(step.dtype)
    return multiply(linear, taken, step.adapters).float()


def _scan_inputs(mixer: Recurrence, mixed: Tensor, projected: Tensor, step: StepContext) -> ScanInputs:
    """From convolved channels [T, C] and the projection [T, X]."""
    spec, places, heads = mixer.spec, mixer.places, mixer.spec.num_heads
    keys, size = spec.num_groups * spec.key_dim, heads * spec.value_dim
    decays = _raised(mixer.decay_up, projected, places.decays, spec.num_decays, step)
    return ScanInputs(
        queries=mixed[:, places.queries : places.queries + keys].view(-1, spec.num_groups, spec.key_dim),
        keys=mixed[:, places.keys : places.keys + keys].view(-1, spec.num_groups, spec.key_dim),
        values=mixed[:, places.values : places.values + size].view(-1, heads, spec.value_dim),
        decays=decays.view(-1, heads, spec.key_dim) if spec.channel_decays else decays,
        gains=projected[:, places.gains : places.gains + heads] if spec.kind == "delta" else None,
    )


STATE_MIXES: Mapping[type, Callable[..., Tensor]] = {
    ShortConvolution: convolve,
    Recurrence: recur,
    RecurrentUnit: recur_units,
    SelectiveUnit: select,
}
"""What computes a layer with a state."""
