"""Bytes that slots for adapters take: for each linear layer of the decoder that all tokens pass, both ways of
the largest rank. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import AdaptersConfig
from engine.model.spec import ModelSpec, StateSpec

# Ranks are rounded up to a multiple of this (kernels/adapters).
WIDTH_MULTIPLE = 16


def adapter_bytes(spec: ModelSpec, config: AdaptersConfig, element_bytes: int) -> int:
    """All slots, of elements of so many bytes."""
    width = -(-config.max_rank // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    elements = sum(
        width * (inputs * len(outputs) + sum(outputs))
        for index in range(spec.num_layers)
        for inputs, outputs in _linears(spec, index)
    )
    return config.num_slots * elements * element_bytes


def _linears(spec: ModelSpec, index: int) -> Iterator[tuple[int, list[int]]]:
    """Inputs, and outputs of the parts, of the linear layers of a layer that take adapters."""
    hidden = spec.hidden_size
    if spec.state is not None and index in spec.state.layers:
        yield from _of_state(spec.state, hidden)
    if index in spec.attending and spec.shared_block is None:
        yield from _of_attention(spec, index)
    if spec.feed_forward_layers is not None and index not in spec.feed_forward_layers:
        return
    experts, size = spec.experts, spec.intermediate_size_of(index)
    if experts is not None and index in experts.layers and not experts.joins_dense:
        size = experts.shared_intermediate_size
        if experts.latent_size:
            yield hidden, [experts.latent_size]
            yield experts.latent_size, [hidden]
    if size:
        gate_up = [2 * size] if spec.fused_gate_up else [size, size]
        yield hidden, gate_up if spec.gated else [size]
        yield size, [hidden]
    if spec.per_layer is not None:
        yield hidden, [spec.per_layer.width]
        yield spec.per_layer.width, [hidden]
    if spec.altup is not None:
        yield hidden, [spec.altup.laurel_rank]
        yield spec.altup.laurel_rank, [hidden]


def _of_attention(spec: ModelSpec, index: int) -> Iterator[tuple[int, list[int]]]:
    """The same of attention."""
    hidden = spec.hidden_size
    if spec.latent is not None:
        latent, inputs = spec.latent, hidden
        if latent.query_rank:
            yield hidden, [latent.query_rank]
            inputs = latent.query_rank
        yield inputs, [spec.num_heads * (latent.nope_dim + latent.rope_dim)]
        yield hidden, [latent.kv_rank + latent.rope_dim]
        yield spec.num_heads * latent.value_dim, [hidden]
        if spec.attention_gate == "one_per_head":
            yield hidden, [spec.num_heads]
        indexer = latent.indexer_of(index)
        if indexer is not None:
            yield latent.query_rank, [indexer.num_heads * indexer.head_dim]
            yield hidden, [indexer.head_dim]
            yield hidden, [indexer.num_heads]
        return
    heads = spec.heads_of(index)
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    values, mixed = heads.num_kv_heads * heads.value_dim, heads.num_heads * heads.value_dim
    sizes = [queries] if heads.cache_of is not None else [queries, keys]
    sizes += [values] * (len(sizes) > 1 and not heads.values_of_keys)
    if spec.attention_gate in ("apart", "one_per_head"):
        sizes.append(mixed if spec.attention_gate == "apart" else heads.num_heads)
    if spec.fused_qkv != "by_head" and spec.attention_gate != "by_head":
        yield hidden, sizes if spec.fused_qkv == "none" else [sum(sizes)]
    yield mixed, [hidden]


def _of_state(state: StateSpec, hidden: int) -> Iterator[tuple[int, list[int]]]:
    """The same of what carries a state; parts that are put in another order take none."""
    if state.kind == "convolution":
        yield hidden, [3 * state.channels]
        yield state.channels, [hidden]
        return
    values, heads = state.num_heads * state.value_dim, state.num_heads
    if state.kind == "selective":
        yield hidden, [2 * values]
        yield values, [state.low_rank + 2 * state.key_dim]
        yield state.low_rank, [values]
    elif state.kind == "rg_lru":
        yield hidden, [values, values]
    elif state.kind == "mamba2":
        yield hidden, [values + state.channels + heads]
    elif state.layout != "by_group":
        rank, keys = state.low_rank, state.num_groups * state.key_dim
        channels = [keys, keys, values] if state.layout == "apart" else [state.channels]
        yield hidden, [*channels, rank or values, heads, rank or state.num_decays]
        if rank:
            yield rank, [values]
            yield rank, [state.num_decays]
    yield values, [hidden]
