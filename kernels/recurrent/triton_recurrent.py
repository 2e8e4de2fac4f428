"""Layers with a state on a GPU. Each token is taken in as it comes, by one program for a few values of a head
whose part of the state stays in its registers (as flash-linear-attention's fused_recurrent_gated_delta_rule),
so that neither the batch nor a cut of the prompt changes a bit.

Shape letters: S sequences, T tokens of all of them, C channels, W taps, H heads of values, G heads of keys,
K key dim, V value dim, N slots, P snapshots, X elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.host import on_device
from kernels.recurrent.backends import RgLruWeights, ScanInputs, ScanWeights, SelectiveInputs
from kernels.recurrent.rows import StateRows

_CHANNELS = 256
# Elements of a state that a program of one warp holds, and values at most.
_STATE_ELEMENTS, _VALUES = 1024, 16
# Channels of a program that carries one number for each.
_UNITS = 64
_GATES = {"silu": 0, "sigmoid": 1, "gelu_tanh": 2, "softplus": 3}


@dataclass(frozen=True, kw_only=True)
class StateTable:
    """Where the states of a step lie, on the device, int64."""

    # Of each sequence: slot, first token on the token axis and the end, whether it begins with zeros, first
    # snapshot and the end.
    rows: Tensor  # [S, 6]
    snapshots: Tensor  # [P, 2] index of the last token that it holds, slot
    owners: Tensor  # [T] the sequence of each row; -1 is padding


@triton.jit
def _softplus(x):
    """log(1 + e^x) without loss where that is small: it is u log(w) / (w - 1), w being 1 + u rounded."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    beyond = tl.where(rounded == 1.0, small, tl.log(rounded) * small / tl.maximum(rounded - 1.0, 1e-30))
    return tl.maximum(x, 0.0) + beyond


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _next_part(snapshots, each, last, row_end, own):
    """End of a part of a row, up to a snapshot or the row's end, and the slot that its state goes to."""
    is_copy = each < last
    end = tl.load(snapshots + 2 * each, mask=is_copy, other=0) + 1
    slot = tl.load(snapshots + 2 * each + 1, mask=is_copy, other=0)
    return tl.where(is_copy, end, row_end), tl.where(is_copy, slot, own)


@triton.jit
def short_convolution_kernel(
    x,
    weight,
    bias,
    states,
    out,
    rows,
    owners,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):
    """One program for some channels of a token; reads states as they were before the step."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.load(owners + token)
    # Channels that are read: of padding none, of its state none where it begins with zeros.
    num_live = tl.where(owner >= 0, channels, 0)
    row = rows + 6 * tl.maximum(owner, 0)
    begin, num_kept = tl.load(row + 1), tl.where(tl.load(row + 3) == 0, num_live, 0)
    state = states + tl.load(row) * (TAPS - 1) * channels
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < num_live, other=0.0)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1) + tap
        num_new, num_old = tl.where(source >= begin, num_live, 0), tl.where(source >= begin, 0, num_kept)
        new = tl.load(x + source * x_stride + channel, mask=channel < num_new, other=0.0).to(tl.float32)
        old_at = state + (TAPS - 1 + source - begin) * channels + channel
        old = tl.load(old_at, mask=channel < num_old, other=0.0)
        factor = tl.load(weight + tap * channels + channel, mask=channel < num_live, other=0.0)
        total += factor * tl.where(source >= begin, new, old)
    if ACTIVATES:
        total = total * _sigmoid(total)
    tl.store(out + token * channels + channel, total, mask=channel < channels)


@triton.jit
def keep_inputs_kernel(
    x,
    states,
    rows,
    snapshots,
    x_stride,
    channels,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some channels of a sequence: leaves the last inputs in its slot, and in those of
    snapshots. A row shorter than the state moves it up, so all is read before anything of it is written.
    """
    row = rows + 6 * tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    index = tl.arange(0, ROWS)[:, None]
    inside = (channel < channels) & (index < KEPT)
    own, begin, row_end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    num_kept = tl.where(tl.load(row + 3) == 0, channels, 0)
    last = tl.load(row + 5)
    for each in range(tl.load(row + 4), last + 1):
        end, slot = _next_part(snapshots, each, last, row_end, own)
        source = end - KEPT + index
        in_step = source >= begin
        new = tl.load(x + source * x_stride + channel, mask=inside & in_step, other=0.0).to(tl.float32)
        old_at = states + (own * KEPT + KEPT + source - begin) * channels + channel
        old = tl.load(old_at, mask=inside & (channel < num_kept) & (source < begin), other=0.0)
        tl.debug_barrier()
        to = states + (slot * KEPT + index) * channels + channel
        tl.store(to, tl.where(in_step, new, old), mask=inside)


@triton.jit
def state_scan_kernel(
    queries,
    keys,
    values,
    decays,
    gains,
    rate,
    bias,
    skip,
    states,
    out,
    rows,
    snapshots,
    row_stride,
    decay_stride,
    gain_stride,
    num_heads,
    heads_per_group,
    key_dim,
    value_dim,
    gain_scale,
    least,
    largest,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FLOOR: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program for some values of a head of a sequence, token by token."""
    row, head = rows + 6 * (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    k, v = tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = k < key_dim, v < value_dim
    place = head * key_dim * value_dim + k[:, None] * value_dim + v[None, :]
    matrix = num_heads * key_dim * value_dim
    own, begin, row_end, last = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 5)
    # A sequence that begins reads no keys of its state.
    kept = (k < tl.where(tl.load(row + 3) == 0, key_dim, 0))[:, None] & has_value[None, :]
    state = tl.load(states + own * matrix + place, mask=kept, other=0.0)
    speed, passed, of_head = tl.load(rate + head), 0.0, head
    if BY_CHANNEL:
        # Channels beyond a key's have one like its first.
        of_head = head * key_dim + tl.where(has_key, k, 0)
    shift = tl.load(bias + of_head)
    if HAS_SKIP:
        passed = tl.load(skip + head)
    of_group = (head // heads_per_group) * key_dim + k
    for each in range(tl.load(row + 4), last + 1):
        end, slot = _next_part(snapshots, each, last, row_end, own)
        for token in range(begin, end):
            query = tl.load(queries + token * row_stride + of_group, mask=has_key, other=0.0)
            key = tl.load(keys + token * row_stride + of_group, mask=has_key, other=0.0)
            value = tl.load(values + token * row_stride + head * value_dim + v, mask=has_value, other=0.0)
            shifted = tl.load(decays + token * decay_stride + of_head) + shift
            step = _softplus(shifted)
            if DELTA:
                query = query * (1.0 / tl.sqrt((tl.sum(query * query, axis=0) + 1e-6) * key_dim))
                key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6))
            else:
                step = tl.minimum(tl.maximum(step, least), largest)
            exponent = speed * step
            if FLOOR < 0.0:
                exponent = FLOOR * _sigmoid(-speed * shifted)
            if BY_CHANNEL:
                state = tl.exp(exponent)[:, None] * state
            else:
                state = tl.exp(exponent) * state
            if DELTA:
                known = tl.sum(key[:, None] * state, axis=0)
                change = gain_scale * _sigmoid(tl.load(gains + token * gain_stride + head)) * (value - known)
            else:
                change = step * value
            state += key[:, None] * change[None, :]
            result = tl.sum(query[:, None] * state, axis=0)
            if HAS_SKIP:
                result += passed * value
            tl.store(out + (token * num_heads + head) * value_dim + v, result, mask=has_value)
        tl.store(states + slot * matrix + place, state, mask=has_key[:, None] & has_value[None, :])
        begin = end


@triton.jit
def rg_lru_kernel(
    x,
    gates,
    bias,
    rate,
    states,
    out,
    rows,
    snapshots,
    channels,
    head_dim,
    BLOCK: tl.constexpr,
):
    """One program for some channels of a sequence, token by token."""
    row = rows + 6 * tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    # Of a channel its first gate; the second lies a head further.
    opening = channel // head_dim * 2 * head_dim + channel % head_dim
    own, begin, row_end, last = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 5)
    num_kept = tl.where(tl.load(row + 3) == 0, channels, 0)
    state = tl.load(states + own * channels + channel, mask=channel < num_kept, other=0.0)
    # The token that a sequence begins with; it has none before where it goes on.
    beginning = tl.where(num_kept == 0, begin, -1)
    speed = tl.load(rate + channel, mask=inside, other=0.0)
    first_bias = tl.load(bias + opening, mask=inside, other=0.0)
    second_bias = tl.load(bias + opening + head_dim, mask=inside, other=0.0)
    for each in range(tl.load(row + 4), last + 1):
        end, slot = _next_part(snapshots, each, last, row_end, own)
        for token in range(begin, end):
            opened = gates + token * 2 * channels + opening
            first = tl.load(opened, mask=inside, other=0.0) + first_bias
            second = tl.load(opened + head_dim, mask=inside, other=0.0) + second_bias
            taken = tl.load(x + token * channels + channel, mask=inside, other=0.0) * _sigmoid(first)
            exponent = speed * _sigmoid(second)
            rest = tl.sqrt(tl.maximum(1.0 - tl.exp(2.0 * exponent), 0.0))
            state = tl.where(token == beginning, taken, tl.exp(exponent) * state + rest * taken)
            tl.store(out + token * channels + channel, state, mask=inside)
        tl.store(states + slot * channels + channel, state, mask=inside)
        begin = end


@triton.jit
def selective_scan_kernel(
    x,
    steps,
    keys,
    queries,
    rate,
    skip,
    states,
    out,
    rows,
    snapshots,
    channels,
    key_dim,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some channels of a sequence, token by token."""
    row = rows + 6 * tl.program_id(0).to(tl.int64)
    channel, k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, KEYS)
    inside, has_key = channel < channels, k < key_dim
    place = k[:, None] * channels + channel[None, :]
    own, begin, row_end, last = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 5)
    # A sequence that begins reads no keys of its state.
    kept = (k < tl.where(tl.load(row + 3) == 0, key_dim, 0))[:, None] & inside[None, :]
    state = tl.load(states + own * key_dim * channels + place, mask=kept, other=0.0)
    speed = tl.load(rate + place, mask=has_key[:, None] & inside[None, :], other=0.0)
    passed = tl.load(skip + channel, mask=inside, other=0.0)
    for each in range(tl.load(row + 4), last + 1):
        end, slot = _next_part(snapshots, each, last, row_end, own)
        for token in range(begin, end):
            taken = tl.load(x + token * channels + channel, mask=inside, other=0.0)
            dt = _softplus(tl.load(steps + token * channels + channel, mask=inside, other=0.0))
            key = tl.load(keys + token * key_dim + k, mask=has_key, other=0.0)
            query = tl.load(queries + token * key_dim + k, mask=has_key, other=0.0)
            state = tl.exp(speed * dt[None, :]) * state + key[:, None] * (dt * taken)[None, :]
            result = tl.sum(query[:, None] * state, axis=0) + passed * taken
            tl.store(out + token * channels + channel, result, mask=inside)
        to = states + slot * key_dim * channels + place
        tl.store(to, state, mask=has_key[:, None] & inside[None, :])
        begin = end


@triton.jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    x_stride,
    gate_stride,
    size,
    num_groups,
    weight_stride,
    eps,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program for a group of a token."""
    token = (tl.program_id(0) // num_groups).to(tl.int64)
    group = tl.program_id(0) % num_groups
    offset = tl.arange(0, BLOCK)
    inside = offset < size
    column = group * size + offset
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = _sigmoid(opened)
    if KIND == 0:
        factor = opened * factor
    if KIND == 2:  # tanh(x) = 2 sigmoid(2x) - 1
        inner = 0.7978845608028654 * (opened + 0.044715 * opened * opened * opened)
        factor = opened * _sigmoid(2.0 * inner)
    if KIND == 3:
        factor = tl.maximum(opened, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(opened)))
    if GATE_FIRST:
        value = value * factor
    if NORMS:
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / size + eps))
        value = value * tl.load(weight + group * weight_stride + offset, mask=inside, other=0.0)
    if not GATE_FIRST:
        value = value * factor
    tl.store(out + token * size * num_groups + column, value, mask=inside)


def _keep_inputs(x: Tensor, states: Tensor, step: StateTable) -> None:
    """Leaves the last inputs [T, C] in the states [N, W - 1, C] of sequences and of snapshots."""
    kept, channels = states.shape[1:]
    keep_inputs_kernel[(step.rows.shape[0], triton.cdiv(channels, _CHANNELS))](
        x,
        states,
        step.rows,
        step.snapshots,
        x.stride(0),
        channels,
        KEPT=kept,
        ROWS=triton.next_power_of_2(kept),
        BLOCK=_CHANNELS,
    )


def _check_strides(inputs: ScanInputs) -> None:
    """Axes of one element have any stride."""
    queries, keys, values, decays, _ = inputs
    for part in (queries, keys, values, *((decays,) if decays.ndim == 3 else ())):
        assert part.shape[1] == 1 or part.stride(1) == part.shape[2], "heads of a row lie side by side"
    if values.shape[0] > 1:
        assert queries.stride(0) == keys.stride(0) == values.stride(0), "they are parts of the same rows"


class TritonRecurrent:
    """See RecurrentBackend. Nothing waits for the host, which says once a step where states lie."""

    def place(
        self,
        states: StateRows,
        query_starts: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        num_rows: int,
        device: torch.device,
    ) -> StateTable:
        """One copy to the device."""
        lengths = np.diff(query_starts)
        owners = np.full(num_rows, -1, np.int64)
        owners[: query_starts[-1]] = np.repeat(np.arange(lengths.size), lengths)
        first, last = states.snapshot_starts[:-1], states.snapshot_starts[1:]
        fresh = context_lens == lengths
        rows = np.stack((states.slots, query_starts[:-1], query_starts[1:], fresh, first, last), axis=1)
        snapshots = np.stack((states.snapshot_rows, states.snapshot_slots), axis=1)
        there = on_device(np.concatenate((rows.ravel(), snapshots.ravel(), owners)), device)
        parts = torch.split(there, [rows.size, snapshots.size, owners.size])
        return StateTable(rows=parts[0].view(-1, 6), snapshots=parts[1].view(-1, 2), owners=parts[2])

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        step: StateTable,
        *,
        activates: bool,
    ) -> Tensor:
        """See RecurrentBackend."""
        assert x.stride(1) == 1, "channels of a row lie side by side"
        rows, channels = x.shape
        out = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
        short_convolution_kernel[(rows, triton.cdiv(channels, _CHANNELS))](
            x,
            weight,
            weight if bias is None else bias,
            states,
            out,
            step.rows,
            step.owners,
            x.stride(0),
            channels,
            TAPS=weight.shape[0],
            BLOCK=_CHANNELS,
            HAS_BIAS=bias is not None,
            ACTIVATES=activates,
        )
        if weight.shape[0] > 1:
            _keep_inputs(x, states, step)
        return out

    def scan(self, inputs: ScanInputs, weights: ScanWeights, states: Tensor, step: StateTable) -> Tensor:
        """See RecurrentBackend. Queries, keys and values lie in the same rows."""
        queries, keys, values, decays, gains = inputs
        _check_strides(inputs)
        (num_heads, value_dim), key_dim = values.shape[1:], keys.shape[2]
        block = triton.next_power_of_2(key_dim)
        width = min(triton.next_power_of_2(value_dim), max(1, min(_VALUES, _STATE_ELEMENTS // block)))
        out = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
        state_scan_kernel[(step.rows.shape[0] * num_heads, triton.cdiv(value_dim, width))](
            queries,
            keys,
            values,
            decays,
            decays if gains is None else gains,
            weights.rate,
            weights.bias,
            weights.rate if weights.skip is None else weights.skip,
            states,
            out,
            step.rows,
            step.snapshots,
            values.stride(0),
            decays.stride(0),
            0 if gains is None else gains.stride(0),
            num_heads,
            num_heads // keys.shape[1],
            key_dim,
            value_dim,
            weights.gain_scale,
            *weights.limits,
            DELTA=gains is not None,
            BY_CHANNEL=decays.ndim == 3,
            FLOOR=weights.floor,
            HAS_SKIP=weights.skip is not None,
            KEYS=block,
            VALUES=width,
            num_warps=1,
        )
        return out

    def rg_lru(
        self, x: Tensor, gates: Tensor, weights: RgLruWeights, states: Tensor, step: StateTable
    ) -> Tensor:
        """See RecurrentBackend."""
        assert x.is_contiguous(), "rows lie side by side"
        assert gates.is_contiguous(), "as above"
        channels = x.shape[1]
        out = torch.zeros_like(x)
        rg_lru_kernel[(step.rows.shape[0], triton.cdiv(channels, _UNITS))](
            x,
            gates,
            weights.bias,
            weights.rate,
            states,
            out,
            step.rows,
            step.snapshots,
            channels,
            channels // gates.shape[1],
            BLOCK=_UNITS,
            num_warps=1,
        )
        return out

    def selective_scan(
        self, inputs: SelectiveInputs, rate: Tensor, skip: Tensor, states: Tensor, step: StateTable
    ) -> Tensor:
        """See RecurrentBackend."""
        assert all(part.is_contiguous() for part in inputs), "rows lie side by side"
        (key_dim, channels), out = rate.shape, torch.zeros_like(inputs.x)
        block = triton.next_power_of_2(key_dim)
        width = min(_UNITS, max(1, _STATE_ELEMENTS // block))
        selective_scan_kernel[(step.rows.shape[0], triton.cdiv(channels, width))](
            *inputs,
            rate,
            skip,
            states,
            out,
            step.rows,
            step.snapshots,
            channels,
            key_dim,
            KEYS=block,
            BLOCK=width,
            num_warps=1,
        )
        return out

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        size: int,
        gate_first: bool,
        kind: str,
    ) -> Tensor:
        """See RecurrentBackend."""
        rows, width = x.shape
        assert x.stride(1) == gate.stride(1) == 1, "elements of a row lie side by side"
        out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
        shared = weight is None or weight.numel() == size
        block = triton.next_power_of_2(size)
        if rows:
            gated_norm_kernel[(rows * (width // size),)](
                x,
                gate,
                x if weight is None else weight,
                out,
                x.stride(0),
                gate.stride(0),
                size,
                width // size,
                0 if shared else size,
                eps,
                BLOCK=block,
                NORMS=weight is not None,
                GATE_FIRST=gate_first,
                KIND=_GATES[kind],
                num_warps=max(1, min(16, block // 512)),
            )
        return out
