"""What a rank of several has of layers that carry a state: some of the heads with their parts of the state,
or some of the channels; and which degrees divide them.

A rank's layer is that of a smaller model. Heads of values are divided evenly. Queries and keys belong to
groups of heads: where there are fewer groups than ranks, several ranks have the same one, as they have heads
of keys and values of attention. A projection gives several things one behind another, of each of which the
rank has a run. No torch.

Shape letters: H heads of values, G groups, K key dim, V value dim, C channels.
"""

from __future__ import annotations

import msgspec

from engine.model.spec import StateSpec, WeightFactors
from kernels.ranks.shares import share_of

Runs = tuple[tuple[int, int], ...]

# Ends of names of what is cut by its inputs, and of what the first rank alone adds.
_OUT = ".state.out_proj.weight"
ADDED_ONCE = ".state.out_proj.bias"


class _Segment(msgspec.Struct, frozen=True):
    """Elements one behind another, of heads or channels, or of groups."""

    size: int
    by_group: bool = False


def of_rank(state: StateSpec, parts: int) -> StateSpec:
    """The layers of one of so many ranks. A norm keeps its size: where that is more than the rank's heads
    have, it is over those of several ranks.
    """
    if parts == 1:
        return state
    replace = msgspec.structs.replace
    if state.kind == "convolution":
        return replace(state, channels=state.channels // parts)
    heads = state.num_heads // parts
    if state.kind == "rg_lru":
        return replace(state, channels=state.channels // parts, num_heads=heads, num_groups=heads)
    groups = max(1, state.num_groups // parts)
    channels = heads * state.value_dim + 2 * groups * state.key_dim
    return replace(state, num_heads=heads, num_groups=groups, channels=channels)


def factors_of_rank(
    factors: tuple[WeightFactors, ...], state: StateSpec | None, parts: int
) -> tuple[WeightFactors, ...]:
    """What a rank multiplies its rows by: those of a state's projection have several factors."""
    if state is None or parts == 1:
        return factors
    segments = _segments(state, "in_proj")
    own = [sum(end - begin for begin, end in _runs(state, [segment], 0, parts)) for segment in segments]

    def cut_rows(each: WeightFactors) -> WeightFactors:
        if not each.name.endswith("state.in_proj"):
            return each
        values = (factor for _, factor in each.parts)
        return msgspec.structs.replace(each, parts=tuple(zip(own, values, strict=True)))

    return tuple(map(cut_rows, factors))


def cut(
    state: StateSpec, name: str, shape: tuple[int, ...], part: int, parts: int
) -> tuple[int, Runs] | None:
    """Axis and runs of what one of `parts` ranks reads of a tensor of a layer with a state; None where that
    is all.
    """
    size = shape[0]
    if name.endswith(_OUT):
        own = share_of(shape[1], part, parts)
        return 1, ((own.start, own.stop),)
    stem = name.rpartition(".state.")[2].removesuffix(".weight").removesuffix(".bias")
    if stem in ("out_proj", "norm") and (stem == "out_proj" or state.kind == "delta"):
        return None
    if state.layout == "by_group" and stem in ("in_proj_qkvz", "in_proj_ba"):
        return 0, _grouped(state, stem, size, part, parts)
    return 0, _runs(state, _segments(state, stem) or [_Segment(size)], part, parts)


def _segments(state: StateSpec, stem: str) -> list[_Segment]:
    """What the rows of a tensor are; empty for heads or channels alone."""
    values = _Segment(state.num_heads * state.value_dim)
    keys = _Segment(state.num_groups * state.key_dim, by_group=True)
    if state.kind == "convolution" and stem == "in_proj":
        return [_Segment(state.channels)] * 3
    if state.kind == "mamba2":
        projected = [values, values, keys, keys, _Segment(state.num_heads)]
        return {"in_proj": projected, "conv1d": [values, keys, keys]}.get(stem, [])
    if state.kind != "delta":
        return []
    if stem in ("in_proj_qkv", "conv1d"):
        return [keys, keys, values]
    return [keys] if stem in ("q_proj", "k_proj", "q_conv1d", "k_conv1d") else []


def _runs(state: StateSpec, segments: list[_Segment], part: int, parts: int) -> Runs:
    """A rank's part of each of these."""
    found, begin = [], 0
    for segment in segments:
        own = share_of(segment.size, part, parts)
        if segment.by_group and parts > state.num_groups:
            own = share_of(segment.size, part * state.num_groups // parts, state.num_groups)
        found.append((begin + own.start, begin + own.stop))
        begin += segment.size
    return tuple(found)


def _grouped(state: StateSpec, stem: str, size: int, part: int, parts: int) -> Runs:
    """The same where all that belongs to a group lies together: query, key, values and gates; or gains and
    decays.
    """
    if parts <= state.num_groups:
        own = share_of(size, part, parts)
        return ((own.start, own.stop),)
    width, ranks = size // state.num_groups, parts // state.num_groups
    begin = part * state.num_groups // parts * width
    shared = 2 * state.key_dim if stem == "in_proj_qkvz" else 0
    each = (width - shared) // 2
    own = share_of(each, part % ranks, ranks)
    halves = tuple(
        (begin + shared + half + own.start, begin + shared + half + own.stop) for half in (0, each)
    )
    return ((begin, begin + shared), *halves) if shared else halves


def is_cut(state: StateSpec) -> bool:
    """Whether a kind of layers is cut at all: not those whose decays or time steps come from a product that
    all heads share, nor linear attention, whose rates are by the whole model's heads.
    """
    return not (state.channel_decays or state.kind in ("linear", "selective"))


def why_not_cut(state: StateSpec, parts: int, architecture: str) -> str:
    """Why layers with a state are not cut into so many parts; empty when they are."""
    counts = {"heads of states": state.num_heads} if state.num_heads else {"channels": state.channels}
    for what, count in counts.items():
        if count % parts:
            return f"it does not divide the {count} {what} of {architecture}"
    groups = state.num_groups
    if groups and groups % parts and parts % groups:
        return f"it neither divides nor is a multiple of the {groups} groups of states of {architecture}"
    return ""
