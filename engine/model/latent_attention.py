"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with only the latent in the cache.

A token stores one vector: the normed latent of R dimensions and the rotated key part of P dimensions, shared
by all heads. Instead of expanding it into keys and values, the up-projections move to the query's and the
output's side: q W_k^T scores against the latent itself, and the weighted latent passes W_v. So attention is
multi-query with keys of R + P dimensions whose first R are the values.

Shape letters: T tokens, E hidden size, H heads, R latent rank, P rotated dimensions, N other dimensions, V
value dimensions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from engine.model.indexer import ask, read_indexer
from engine.model.layers import StepContext, multiply, read_floats, read_linear
from engine.model.records import LatentAttention
from engine.model.spec import INNER_NORM_EPS, ModelSpec
from engine.model.weights import WeightReader
from kernels.attention.ragged import AttentionOptions
from kernels.norm.backends import RowNorm
from kernels.paged_cache.store import LayerCache
from kernels.rope.reference import rotate


def read_latents(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> LatentAttention:
    """The attention of layer `index`; its up-projections are dense, whatever they are stored in."""
    latent, hidden, bias = spec.latent, spec.hidden_size, spec.qkv_bias
    assert latent is not None, "called for latent attention only"
    query_down = query_norm = None
    query_name, query_inputs = "q_proj", hidden
    if latent.query_rank:
        query_down = read_linear(weights, [f"{prefix}.q_a_proj"], [latent.query_rank], hidden, bias)
        query_norm = read_floats(weights, f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        query_name, query_inputs = "q_b_proj", latent.query_rank
    query_size = spec.num_heads * (latent.nope_dim + latent.rope_dim)
    up_shape = (spec.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    # On a GPU the model's: in float32 matrix units are idle, and 576 numbers to a key have no registers.
    dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
    up = weights.dense(f"{prefix}.kv_b_proj", up_shape, dtype=dtype).view(spec.num_heads, -1, latent.kv_rank)
    rope = spec.rope_of_layer[index]
    down_name, down_size = f"{prefix}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim
    values = spec.num_heads * latent.value_dim
    return LatentAttention(
        query_down=query_down,
        query_norm=query_norm,
        query_up=read_linear(weights, [f"{prefix}.{query_name}"], [query_size], query_inputs, False),
        down=read_linear(weights, [down_name], [down_size], hidden, bias),
        latent_norm=read_floats(weights, f"{prefix}.kv_a_layernorm.weight", latent.kv_rank),
        key_up=up[:, : latent.nope_dim].contiguous(),
        value_up=up[:, latent.nope_dim :].transpose(1, 2).contiguous(),
        output=read_linear(weights, [f"{prefix}.o_proj"], [hidden], values, spec.output_bias),
        num_heads=spec.num_heads,
        latent=latent,
        options=AttentionOptions(scale=spec.attention_scale, window=spec.windows[index]),
        rope=rope,
        interleaved=spec.ropes[rope].interleaved,
        indexer=None
        if latent.indexer_of(index) is None
        else read_indexer(weights, f"{prefix}.indexer", spec),
        gate=None
        if spec.attention_gate == "none"
        else read_linear(weights, [f"{prefix}.gate_proj"], [spec.num_heads], hidden, False),
    )


def attend_latents(attention: LatentAttention, x: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; writes this step's latents."""
    latent, key_up = attention.latent, cast("Tensor", attention.key_up)
    norm, batched = step.kernels.norm.plain, step.kernels.linear.batched
    inner = x
    if attention.query_down is not None:
        inner = norm(
            multiply(attention.query_down, x, step.adapters),
            RowNorm(cast("Tensor", attention.query_norm), INNER_NORM_EPS),
        )
    q = multiply(attention.query_up, inner, step.adapters).view(x.shape[0], attention.num_heads, -1)
    scales = step.query_scales[attention.rope]
    if scales is not None:
        q = q * scales[:, None, None].to(q.dtype)
    down = multiply(attention.down, x, step.adapters)
    cos, sin = step.rotations[attention.rope]
    q_turned = rotate(q[..., latent.nope_dim :], cos, sin, interleaved=attention.interleaved)
    k_turned = rotate(down[:, None, latent.kv_rank :], cos, sin, interleaved=attention.interleaved)
    stored = norm(down[:, : latent.kv_rank], RowNorm(cast("Tensor", attention.latent_norm), INNER_NORM_EPS))
    index_keys = None
    if attention.indexer is not None:
        step.asked, index_keys = ask(attention.indexer, x, inner, (cos, sin), step)
    asked = step.asked
    cache.write(torch.cat((stored[:, None], k_turned), dim=-1), index_keys, step.slots_in(cache))
    plain = q[..., : latent.nope_dim].to(key_up.dtype).transpose(0, 1)  # [H, T, N]
    q_latent = batched(plain, key_up).transpose(0, 1)  # [T, H, R]
    queries = torch.cat((q_latent, q_turned.to(key_up.dtype)), dim=-1)  # [T, H, R + P]
    backend: Any = step.attention
    mixed = (
        backend.run(step.plan_of(cache), queries, cache, attention.options)
        if asked is None
        else backend.run_indexed(step.plan_of(cache), queries, asked, cache, attention.options)
    )  # [T, H, R]
    values = batched(mixed.transpose(0, 1), cast("Tensor", attention.value_up)).transpose(0, 1)  # [T, H, V]
    if attention.gate is not None:
        values = values * torch.sigmoid(multiply(attention.gate, x, step.adapters))[..., None]
    return multiply(attention.output, values.flatten(1).to(x.dtype), step.adapters)
