"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with only the latent in the cache.

A token stores one vector: the normed latent of R dimensions and the rotated key part of P dimensions, shared
by all heads. Instead of expanding it into keys and values, the up-projections move to the query's and the
output's side: q W_k^T scores against the latent itself, and the weighted latent passes W_v. So attention is
multi-query with keys of R + P dimensions whose first R are the values.

Shape letters: T tokens, E hidden size, H heads, R latent rank, P rotated dimensions, N other dimensions, V
value dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.attention import AttentionOptions
from engine.kernels.paged_cache import LayerCache
from engine.kernels.rope import rotate
from engine.model.layers import Linear, StepContext
from engine.model.spec import INNER_NORM_EPS, ModelSpec
from engine.model.weights import WeightReader


class LatentAttention:
    """Attention whose keys and values are projections of one cached latent."""

    def __init__(self, weights: WeightReader, prefix: str, spec: ModelSpec, layer: int) -> None:
        latent = spec.latent
        assert latent is not None, "called for latent attention only"
        self._norm, self._linear = weights.kernels.norm, weights.kernels.linear
        self.latent, self.num_heads = latent, spec.num_heads
        query_size = spec.num_heads * (latent.nope_dim + latent.rope_dim)
        bias = spec.qkv_bias
        self.query_down: Linear | None = None
        query_name, query_inputs = "q_proj", spec.hidden_size
        if latent.query_rank:
            names, sizes = [f"{prefix}.q_a_proj"], [latent.query_rank]
            self.query_down = Linear(weights, names, sizes, spec.hidden_size, bias)
            self.query_norm = weights.keep(
                f"{prefix}.q_a_layernorm.weight", (latent.query_rank,), dtype=torch.float32
            )
            query_name, query_inputs = "q_b_proj", latent.query_rank
        self.query_up = Linear(weights, [f"{prefix}.{query_name}"], [query_size], query_inputs, False)
        down_size = latent.kv_rank + latent.rope_dim
        self.down = Linear(weights, [f"{prefix}.kv_a_proj_with_mqa"], [down_size], spec.hidden_size, bias)
        self.latent_norm = weights.keep(
            f"{prefix}.kv_a_layernorm.weight", (latent.kv_rank,), dtype=torch.float32
        )
        up_shape = (spec.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
        # On a GPU the model's: in float32 matrix units are idle, and 576 numbers to a key have no registers.
        self.dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
        up = weights.dense(f"{prefix}.kv_b_proj", up_shape, dtype=self.dtype)
        up = up.view(spec.num_heads, -1, latent.kv_rank)
        self.key_up = up[:, : latent.nope_dim].contiguous()  # [H, N, R]
        self.value_up = up[:, latent.nope_dim :].transpose(1, 2).contiguous()  # [H, R, V]
        output_size = spec.num_heads * latent.value_dim
        self.output = Linear(weights, [f"{prefix}.o_proj"], [spec.hidden_size], output_size, spec.output_bias)
        self.options = AttentionOptions(scale=spec.attention_scale, window=spec.windows[layer])
        self.rope = spec.rope_of_layer[layer]
        self.interleaved = spec.ropes[self.rope].interleaved

    # Its input goes to two products.
    entry = None

    def __call__(self, x: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
        """x [T, E] -> [T, E]; writes this step's latents."""
        latent, num_tokens = self.latent, x.shape[0]
        norm, batched = self._norm.plain, self._linear.batched
        inner = x
        if self.query_down is not None:
            inner = norm(self.query_down(x), self.query_norm, INNER_NORM_EPS)
        q = self.query_up(inner).view(num_tokens, self.num_heads, -1)
        down = self.down(x)
        cos, sin = step.rotations[self.rope]
        q_turned = rotate(q[..., latent.nope_dim :], cos, sin, interleaved=self.interleaved)
        k_turned = rotate(down[:, None, latent.kv_rank :], cos, sin, interleaved=self.interleaved)
        stored = norm(down[:, : latent.kv_rank], self.latent_norm, INNER_NORM_EPS)
        cache.write(torch.cat((stored[:, None], k_turned), dim=-1), None, step.slots)
        plain = q[..., : latent.nope_dim].to(self.dtype).transpose(0, 1)  # [H, T, N]
        q_latent = batched(plain, self.key_up).transpose(0, 1)  # [T, H, R]
        queries = torch.cat((q_latent, q_turned.to(self.dtype)), dim=-1)  # [T, H, R + P]
        mixed = step.attention.run(step.attention_plan, queries, cache, self.options)  # [T, H, R]
        values = batched(mixed.transpose(0, 1), self.value_up).transpose(0, 1)  # [T, H, V]
        return self.output(values.flatten(1).to(x.dtype))
