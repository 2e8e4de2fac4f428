"""Layers with a state in plain torch, token by token: the oracle.

A state lies in a slot of the cache. Sequences are computed one after another, and their tokens as well, so
that a result depends neither on the batch nor on where a prompt was cut.

Shape letters: T tokens, C channels, W taps, H heads of values, G heads of keys, K key dim, V value dim,
D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from kernels.recurrent.backends import RgLruWeights, ScanInputs, ScanWeights, SelectiveInputs
from kernels.recurrent.rows import StateRows

LENGTH_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class SequenceRow:
    """The tokens of one sequence in this step, on the token axis."""

    begin: int
    end: int
    slot: int
    is_fresh: bool
    # (token behind the last one that it holds, slot).
    snapshots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class StateStep:
    """All sequences of a step, for torch."""

    rows: tuple[SequenceRow, ...]

    @classmethod
    def of(
        cls, states: StateRows, query_starts: NDArray[np.int64], context_lens: NDArray[np.int64]
    ) -> StateStep:
        """From what the native ops are given, too."""
        return cls(rows=tuple(_rows(states, query_starts, context_lens)))


def _rows(
    states: StateRows, query_starts: NDArray[np.int64], context_lens: NDArray[np.int64]
) -> Iterator[SequenceRow]:
    for index, slot in enumerate(states.slots.tolist()):
        begin, end = query_starts[index : index + 2].tolist()
        first, last = states.snapshot_starts[index : index + 2].tolist()
        yield SequenceRow(
            begin=begin,
            end=end,
            slot=slot,
            is_fresh=int(context_lens[index]) == end - begin,
            snapshots=tuple(
                zip(
                    (states.snapshot_rows[first:last] + 1).tolist(),
                    states.snapshot_slots[first:last].tolist(),
                    strict=True,
                )
            ),
        )


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StateStep, *, activates: bool
) -> Tensor:
    """x [T, C] -> [T, C] in float32; weight [W, C] over the last W inputs, bias [C]. `states` [N, W - 1, C]
    hold those before the step, and then those of its end. Padding rows stay zero.
    """
    x, kept = x.float(), weight.shape[0] - 1
    out = torch.zeros_like(x)
    for row in step.rows:
        before = torch.zeros_like(states[row.slot]) if row.is_fresh else states[row.slot]
        inputs = torch.cat((before, x[row.begin : row.end]))
        count = row.end - row.begin
        total = torch.zeros_like(x[row.begin : row.end]) if bias is None else bias.expand(count, -1)
        for tap in range(kept + 1):
            total = total + weight[tap] * inputs[tap : tap + count]
        out[row.begin : row.end] = total * _sigmoid(total) if activates else total
        for end, slot in (*row.snapshots, (row.end, row.slot)):
            states[slot] = inputs[end - row.begin : end - row.begin + kept]
    return out


def _sigmoid(x: Tensor) -> Tensor:
    # Fused operations round differently in the tail of a row (kernels/activation/reference.py).
    return 1.0 / (1.0 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + torch.tanh(inner))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


_GATES = {
    "silu": lambda gate: gate * _sigmoid(gate),
    "sigmoid": _sigmoid,
    "gelu_tanh": _gelu_tanh,
    "softplus": _softplus,
}


def mamba2_factors(
    decays: Tensor, rate: Tensor, bias: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Decay and gain [T, H] of Mamba 2 (arXiv 2405.21060) from its time steps [T, H]."""
    dt = softplus(decays.float() + bias).clamp(*limits)
    return torch.exp(rate * dt), dt


def delta_factors(
    decays: Tensor, gains: Tensor, rate: Tensor, bias: Tensor, gain_scale: float, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Decay and gain [T, H] of the gated delta rule (arXiv 2412.06464); or decays [T, H, K] of channels,
    whose exponents may have a floor (arXiv 2510.26692).
    """
    rate, shifted = rate.view(-1, *[1] * (decays.ndim - 2)), decays.float() + bias
    exponent = floor * _sigmoid(-rate * shifted) if floor else rate * softplus(shifted)
    return torch.exp(exponent), gain_scale * _sigmoid(gains.float())


def to_length(x: Tensor, scale: float = 1.0) -> Tensor:
    """x [..., K] brought to the length `scale`."""
    return x * (scale * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS))


def state_scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    gain: Tensor,
    states: Tensor,
    step: StateStep,
    *,
    delta: bool,
) -> Tensor:
    """queries, keys [T, G, K] and values [T, H, V] -> [T, H, V], all in float32; decay [T, H] or [T, H, K],
    gain [T, H].

    state = decay state + key (x) change, out = query . state; the change is gain value, or with the `delta`
    rule gain (value - key . decay state). `states` [N, H, K, V] as in `short_convolution`.
    """
    num_heads = values.shape[1]
    queries, keys = (part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (queries, keys))
    out, decay = torch.zeros_like(values), decay.reshape(*decay.shape[:2], -1, 1)
    for row in step.rows:
        state = torch.zeros_like(states[row.slot]) if row.is_fresh else states[row.slot].clone()
        left = dict(row.snapshots)
        for token in range(row.begin, row.end):
            key, change = keys[token, :, :, None], values[token, :, None]
            state = decay[token] * state
            if delta:
                change = change - (key * state).sum(1, keepdim=True)
            state = state + key * (gain[token, :, None, None] * change)
            out[token] = (queries[token, :, :, None] * state).sum(1)
            if token + 1 in left:
                states[left[token + 1]] = state
        states[row.slot] = state
    return out


def rg_lru(x: Tensor, gates: Tensor, weights: RgLruWeights, states: Tensor, step: StateStep) -> Tensor:
    """x [T, C], gates [T, H, 2 D] -> [T, C]; see RecurrentBackend. Padding rows stay zero."""
    out, shape = torch.zeros_like(x), states.shape[1:]
    first, second = (gates + weights.bias).chunk(2, dim=-1)
    taken = x * _sigmoid(first).flatten(1)
    exponent = weights.rate * _sigmoid(second).flatten(1)
    decay, rest = torch.exp(exponent), torch.sqrt((1.0 - torch.exp(2.0 * exponent)).clamp(min=0.0))
    for row in step.rows:
        state = states[row.slot].flatten()
        left = dict(row.snapshots)
        for token in range(row.begin, row.end):
            begins = row.is_fresh and token == row.begin
            state = taken[token] if begins else decay[token] * state + rest[token] * taken[token]
            out[token] = state
            if token + 1 in left:
                states[left[token + 1]] = state.view(shape)
        states[row.slot] = state.view(shape)
    return out


def selective_scan(
    inputs: SelectiveInputs, rate: Tensor, skip: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    """-> [T, C]; see RecurrentBackend. Padding rows stay zero."""
    x, keys, queries = inputs.x, inputs.keys, inputs.queries
    out, dt = torch.zeros_like(x), softplus(inputs.steps)
    for row in step.rows:
        state = torch.zeros_like(rate) if row.is_fresh else states[row.slot, 0].clone()
        left = dict(row.snapshots)
        for token in range(row.begin, row.end):
            taken = keys[token, :, None] * (dt[token] * x[token])
            state = torch.exp(rate * dt[token]) * state + taken
            out[token] = (queries[token, :, None] * state).sum(0) + skip * x[token]
            if token + 1 in left:
                states[left[token + 1]] = state
        states[row.slot] = state
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, size: int, gate_first: bool, kind: str
) -> Tensor:
    """norm(x) weight act(gate), or norm(x act(gate)) weight with `gate_first`, per group of `size` elements
    of x, gate [T, X], in float32; weight [X], or [size] for all groups; without one, x act(gate).
    """
    gate = gate.float()
    factor = _GATES[kind](gate)
    x = x.float() * factor if gate_first else x.float()
    if weight is not None:
        groups = x.view(x.shape[0], -1, size)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
        x = (groups * weight.view(-1, size)).flatten(1)
    return x if gate_first else x * factor


class TorchRecurrent:
    """See RecurrentBackend: sequence by sequence, as the host knows where they are."""

    short_convolution = staticmethod(short_convolution)
    rg_lru = staticmethod(rg_lru)
    selective_scan = staticmethod(selective_scan)
    gated_norm = staticmethod(gated_norm)

    def place(
        self,
        states: StateRows,
        query_starts: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        num_rows: int,
        device: torch.device,
    ) -> StateStep:
        """See RecurrentBackend."""
        return StateStep.of(states, query_starts, context_lens)

    def scan(self, inputs: ScanInputs, weights: ScanWeights, states: Tensor, step: StateStep) -> Tensor:
        """See RecurrentBackend."""
        queries, keys, values, decays, gains = inputs
        if gains is None:
            decay, gain = mamba2_factors(decays, weights.rate, weights.bias, weights.limits)
        else:
            queries, keys = to_length(queries, keys.shape[2] ** -0.5), to_length(keys)
            decay, gain = delta_factors(
                decays, gains, weights.rate, weights.bias, weights.gain_scale, weights.floor
            )
        out = state_scan(queries, keys, values, decay, gain, states, step, delta=gains is not None)
        return out if weights.skip is None else out + weights.skip[:, None] * values
