"""Attention over paged history, sequence by sequence, as the formula says: the oracle of every other back
end.

Shape letters: T tokens, H query heads, K kv heads, D key dim, E value dim, L history of one sequence, Q its
new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.store import LayerCache


class ReferenceAttention:
    """One softmax over the whole history of each query."""

    name = "reference"

    def __init__(self, *, num_heads: int, num_kv_heads: int) -> None:
        self.group = num_heads // num_kv_heads

    def plan(self, batch: RaggedBatch, device: torch.device) -> RaggedBatch:
        """Nothing to prepare."""
        return batch

    def run(
        self,
        plan: RaggedBatch,
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        assert plan.is_by_block or not isinstance(cache, ChannelCache), "cut at blocks"
        out: Tensor | None = None
        for index, length in enumerate(plan.context_lens.tolist()):
            first, last = plan.query_starts[index : index + 2].tolist()
            blocks = torch.from_numpy(plan.block_tables[index : index + 1, : -(-length // plan.block_size)])
            keys, values = (part[0, :, :length] for part in cache.gather(blocks.to(q.device)))
            if isinstance(cache, ChannelCache):
                # The last block is that of all its queries.
                begin = (length - 1) // plan.block_size * plan.block_size
                keys[:, begin:] = cache.whole_of_pieces(slice(index, index + 1))[0, :, : length - begin]
            if options.window is not None:
                # Values before every query's window are zeroed, because their blocks may have been given up
                # and hold anything, even NaN.
                values = values.clone()
                values[:, : max(0, length - (last - first) + 1 - options.window)] = 0.0
            rows = self._one(q[first:last], keys, values, options, sinks)
            if out is None:
                out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
            out[first:last] = rows.to(q.dtype)
        assert out is not None, "a step has at least one sequence"
        return out

    def _one(
        self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """q [Q, H, D], keys [K, L, D], values [K, L, E] -> [Q, H, E] in float32."""
        num_queries, length = q.shape[0], keys.shape[1]
        keys, values = keys.repeat_interleave(self.group, 0), values.repeat_interleave(self.group, 0)
        scores = torch.einsum("qhd,hld->hql", q.float() * options.scale, keys)
        if options.soft_cap is not None:
            scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
        query_at = torch.arange(length - num_queries, length, device=q.device)[:, None]
        key_at = torch.arange(length, device=q.device)[None]
        visible = key_at <= query_at + options.ahead
        if options.window is not None:
            visible &= key_at > query_at - options.window
        if options.chunk is not None:
            visible &= key_at >= query_at // options.chunk * options.chunk
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            extra = sinks.float()[:, None, None].expand(-1, num_queries, 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        return torch.einsum("hql,hle->qhe", weights, values)
