"""Attention over the positions that an indexer chooses (DeepSeek-V3.2): a small attention without values says
of each position how much it matters to a query, and the query attends to the best of them alone.

The cache holds the indexer's key of a position where other caches hold its value; the value is the first part
of the key. Both attentions go along the history in the tiles and chunks of `tiled`, so that neither scores
nor sums depend on the batch, and of equal scores the earlier position is chosen.

Shape letters: T tokens, H query heads, D key dim, E value dim, I heads of the indexer, J their dim, B tiles,
Q tokens of a tile, M rows of a tile, C tokens of a chunk, L history, A chosen positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.ragged import AttentionOptions, RaggedBatch, Reach
from kernels.attention.tiled import RunningSoftmax, StepPlan, TilePlan, products
from kernels.linear.rows import ROW_MULTIPLE
from kernels.paged_cache.store import LayerCache


@dataclass(kw_only=True)
class IndexQueries:
    """What the indexer asks for the step's tokens."""

    queries: Tensor  # [T, I, J]
    # Of each head, its scale and that of the scores included.
    weights: Tensor  # [T, I]
    num_chosen: int
    # Once it has answered, whether each query attends to a position: [B, Q, L] of each plan's tiles.
    chosen: list[Tensor] = field(default_factory=list)


class IndexedAttention:
    """See the module; all query heads share one key."""

    name = "indexed"

    def __init__(self, *, num_heads: int) -> None:
        self.num_heads = num_heads

    def plan(self, batch: RaggedBatch, device: torch.device) -> StepPlan:
        """Cuts the step into tiles."""
        return StepPlan(batch, self.num_heads, device)

    def run_indexed(
        self, plan: StepPlan, q: Tensor, index: IndexQueries, cache: LayerCache, options: AttentionOptions
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. What `index` has not chosen yet, for a layer before,
        is chosen by the keys of this one.
        """
        out = q.new_zeros(q.shape[0], q.shape[1], cache.shared_value_dim)
        plans = plan.of(Reach())
        if not index.chosen:
            index.chosen = [_chosen(tiles, index, cache) for tiles in plans]
        for tiles, chosen in zip(plans, index.chosen, strict=True):
            rows = self._attend(tiles, q, cache, options, chosen)
            # Repeated tokens carry equal rows, so it does not matter which of them is written last.
            out[tiles.tokens] = rows.to(q.dtype)
        return out

    def _attend(
        self, tiles: TilePlan, q: Tensor, cache: LayerCache, options: AttentionOptions, chosen: Tensor
    ) -> Tensor:
        """[B * Q, H, E] over the positions that are chosen [B, Q, L]."""
        size, heads = tiles.tile_tokens, self.num_heads
        num_tiles, num_rows = tiles.tokens.shape[0] // size, size * heads
        queries = q.index_select(0, tiles.tokens).float() * options.scale
        queries = _padded(queries.view(num_tiles, 1, num_rows, -1))
        state = RunningSoftmax(queries, cache.shared_value_dim)
        begin = 0
        for chunk in tiles.chunks:
            keys = cache.gather(chunk.blocks)[0]
            values = keys[..., : cache.shared_value_dim].clone()
            scores = products(queries[: chunk.num_tiles], keys.transpose(2, 3))  # [B', 1, M, C]
            kept = chosen[: chunk.num_tiles, :, begin : begin + keys.shape[2]]
            seen = scores[:, 0, :num_rows].view(chunk.num_tiles, size, heads, -1)
            seen.masked_fill_(~kept[:, :, None], float("-inf"))
            scores[:, :, num_rows:] = 0.0
            if chunk.stale is not None:
                values.masked_fill_(chunk.stale, 0.0)
            state.add(scores, values)
            begin += keys.shape[2]
        rows = state.finish(None)[:, 0, :num_rows]
        return rows.reshape(num_tiles * size, heads, -1)


def _chosen(tiles: TilePlan, index: IndexQueries, cache: LayerCache) -> Tensor:
    """Whether each query attends to a position [B, Q, L]."""
    size, (heads, dim) = tiles.tile_tokens, index.queries.shape[1:]
    num_tiles = tiles.tokens.shape[0] // size
    queries = index.queries.index_select(0, tiles.tokens).float()
    queries = _padded(queries.view(num_tiles, 1, size * heads, dim))
    weights = index.weights.index_select(0, tiles.tokens).view(num_tiles, size, heads, 1)
    merits = []
    for chunk in tiles.chunks:
        keys = cache.gather(chunk.blocks)[1]  # [B', 1, C, J]
        scores = products(queries[: chunk.num_tiles], keys.transpose(2, 3))[:, 0, : size * heads]
        scores = scores.view(chunk.num_tiles, size, heads, -1).clamp(min=0.0)
        merit = (scores * weights[: chunk.num_tiles]).sum(2)  # [B', Q, C]
        if chunk.hidden is not None:
            merit = merit.masked_fill(chunk.hidden[:, 0, :, 0], float("-inf"))
        merits.append(F.pad(merit, (0, 0, 0, 0, 0, num_tiles - chunk.num_tiles), value=float("-inf")))
    merit = torch.cat(merits, dim=-1)  # [B, Q, L]
    order = torch.sort(merit, dim=-1, descending=True, stable=True).indices
    best = order[..., : min(index.num_chosen, merit.shape[-1])]
    chosen = torch.zeros_like(merit, dtype=torch.bool).scatter(-1, best, True)
    return chosen & (merit > float("-inf"))


def _padded(queries: Tensor) -> Tensor:
    """Rows [B, 1, M, D] up to a multiple of ROW_MULTIPLE."""
    return F.pad(queries, (0, 0, 0, -queries.shape[2] % ROW_MULTIPLE))
