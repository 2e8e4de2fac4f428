"""Attention in plain torch that is fast on a CPU and whose rows do not depend on the batch.

Queries are cut into tiles: a decode row (or a few tokens) is one small tile, a prefill chunk becomes tiles of
PREFILL_TILE tokens. All tiles of a kind advance together over the history in chunks of HISTORY_CHUNK tokens,
with the running maximum and sum of flash attention (arXiv 2205.14135). For one query the arithmetic is then
always the same: chunks begin at fixed positions, are added first to last, and are products of fixed inner
size with a number of rows that is a multiple of 16 (see kernels/linear). Chunks that are wholly masked change
nothing, bit for bit. So a token's output does not depend on the other sequences, on how its prompt was
chunked, or on prefix hits.

Shape letters: T tokens, H query heads, K kv heads, G = H/K, D key dim, E value dim, B tiles, Q tokens of a
tile, M = Q*G rounded up to 16, C tokens of a chunk, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.ragged import AttentionOptions, RaggedBatch, Reach
from kernels.linear.batched import batched_product
from kernels.linear.rows import ROW_MULTIPLE
from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.store import LayerCache

HISTORY_CHUNK = 256
# Ends of the first chunks of a history without a window: short ones, so that short prompts do little in vain.
FIRST_ENDS = (64, 128, 256)
LARGEST_BLOCK = FIRST_ENDS[0]
PREFILL_TILE = 64


@dataclass(kw_only=True)
class _ChunkPlan:
    """One step along the history: the first `num_tiles` tiles take part."""

    num_tiles: int
    blocks: Tensor  # [num_tiles, C / block size], C tokens being the length of this chunk
    hidden: Tensor | None  # [num_tiles, 1, Q, 1, C] True where a query may not look; None: all visible
    stale: (
        Tensor | None
    )  # [num_tiles, 1, C, 1] True past the sequence's end and before the window, where the cache holds
    # anything at all
    # Of a step that is cut at blocks: tiles whose own block this chunk has, which of its blocks that is, and
    # the pieces of sequences that they are of [3, O].
    own: Tensor | None = None


@dataclass(kw_only=True)
class TilePlan:
    """Tiles of one size that look equally far back, those with the longest history first."""

    tile_tokens: int
    tokens: Tensor  # [B * Q] index on the token axis; places beyond a tile's last token repeat that token
    chunks: list[_ChunkPlan]


class StepPlan:
    """Tile plans of one step, made when the first layer with some reach asks for them."""

    def __init__(self, batch: RaggedBatch, group: int, device: torch.device) -> None:
        self.batch = batch
        self.device = device
        small = max(1, ROW_MULTIPLE // group)
        lens = batch.query_lens
        self.kinds = [(small, np.flatnonzero(lens <= small)), (PREFILL_TILE, np.flatnonzero(lens > small))]
        self._plans: dict[Reach, list[TilePlan]] = {}

    def of(self, reach: Reach) -> list[TilePlan]:
        """The tiles for layers whose queries look so far back."""
        if reach not in self._plans:
            kinds = [(size, chosen) for size, chosen in self.kinds if chosen.size]
            self._plans[reach] = [
                _plan_tiles(self.batch, size, who, reach, self.device) for size, who in kinds
            ]
        return self._plans[reach]


class TiledAttention:
    """See the module."""

    name = "torch"

    def __init__(self, *, num_heads: int, num_kv_heads: int) -> None:
        self.group = num_heads // num_kv_heads

    def plan(self, batch: RaggedBatch, device: torch.device) -> StepPlan:
        """Cuts the step into tiles. The block size is a power of two up to LARGEST_BLOCK."""
        assert LARGEST_BLOCK % batch.block_size == 0, f"block size {batch.block_size}"
        return StepPlan(batch, self.group, device)

    def run(
        self,
        plan: StepPlan,
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        out: Tensor | None = None
        for tiles in plan.of(options.reach):
            rows = self._run_tiles(tiles, q, cache, options, sinks)  # [B * Q, H, E]
            if out is None:
                out = q.new_zeros(q.shape[0], q.shape[1], rows.shape[-1])
            # Repeated tokens carry equal rows, so it does not matter which of them is written last.
            out[tiles.tokens] = rows.to(q.dtype)
        assert out is not None, "a step has at least one sequence"
        return out

    def _run_tiles(
        self, tiles: TilePlan, q: Tensor, cache: LayerCache, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        num_heads, dim = q.shape[1:]
        size, group = tiles.tile_tokens, self.group
        num_kv_heads, num_tiles = num_heads // group, tiles.tokens.shape[0] // size
        num_rows = size * group
        padded = -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        queries = q.index_select(0, tiles.tokens).float() * options.scale
        queries = queries.view(num_tiles, size, num_kv_heads, group, dim).transpose(1, 2)
        queries = queries.reshape(num_tiles, num_kv_heads, num_rows, dim)
        queries = F.pad(queries, (0, 0, 0, padded - num_rows))  # [B, K, M, D]
        state: RunningSoftmax | None = None
        for chunk in tiles.chunks:
            keys, values = cache.gather(chunk.blocks)
            if isinstance(cache, ChannelCache):
                _take_whole(keys, cache, chunk)
            scores = products(queries[: chunk.num_tiles], keys.transpose(2, 3))  # [B', K, M, C]
            if options.soft_cap is not None:
                scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
            if chunk.hidden is not None:
                seen = scores[:, :, :num_rows].view(chunk.num_tiles, num_kv_heads, size, group, -1)
                seen.masked_fill_(chunk.hidden, float("-inf"))
                scores[:, :, num_rows:] = 0.0
            if chunk.stale is not None:
                # Both are copies of the cache, and the keys (which may hold the values) have served.
                values.masked_fill_(chunk.stale, 0.0)
            if state is None:
                state = RunningSoftmax(queries, values.shape[-1])
            state.add(scores, values)
        assert state is not None, "a history is at least one token long"
        per_row = None if sinks is None else _sinks_of_rows(sinks.float(), num_kv_heads, size, padded)
        rows = state.finish(per_row)[:, :, :num_rows]
        rows = rows.view(num_tiles, num_kv_heads, size, group, -1).transpose(1, 2)
        return rows.reshape(num_tiles * size, num_heads, -1)


class RunningSoftmax:
    """Running softmax-weighted sum: maximum, sum of weights and weighted values of each query row."""

    def __init__(self, queries: Tensor, value_dim: int) -> None:
        shape = queries.shape[:3]
        self.maximum = queries.new_full((*shape, 1), float("-inf"))  # [B, K, M, 1]
        self.total = queries.new_zeros(*shape, 1)
        self.weighted = queries.new_zeros(*shape, value_dim)  # [B, K, M, E]

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Takes in scores [B', K, M, C] of values [B', K, C, E] for the first B' tiles."""
        part = slice(0, scores.shape[0])
        before = self.maximum[part]
        maximum = torch.maximum(before, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has maximum -inf; subtract 0 there, so that its weights are 0 and
        # not NaN.
        base = maximum.masked_fill(maximum == float("-inf"), 0.0)
        weights = torch.exp(scores - base)
        kept = torch.exp(before - base)
        self.total[part] = self.total[part] * kept + weights.sum(-1, keepdim=True)
        self.weighted[part] = self.weighted[part] * kept + products(weights, values)
        self.maximum[part] = maximum

    def finish(self, sinks: Tensor | None) -> Tensor:
        """[B, K, M, E]; sinks [K, M, 1] join the sum of weights."""
        if sinks is None:
            return self.weighted / self.total
        maximum = torch.maximum(self.maximum, sinks)
        kept = torch.exp(self.maximum - maximum)
        return self.weighted * kept / (self.total * kept + torch.exp(sinks - maximum))


def products(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product over the first two axes."""
    product = batched_product(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:3], right.shape[-1])


def _take_whole(keys: Tensor, cache: ChannelCache, chunk: _ChunkPlan) -> None:
    """Whole keys take the place of those of the queries' own blocks in keys [B', K, C, D] of a chunk."""
    assert chunk.own is not None, "the step is cut at blocks"
    if chunk.own.shape[1]:
        tiles, columns, pieces = chunk.own
        blocks = keys.view(*keys.shape[:2], -1, cache.block_size, keys.shape[3])
        blocks[tiles, :, columns] = cache.whole_of_pieces(pieces)


def _sinks_of_rows(sinks: Tensor, num_kv_heads: int, tile_tokens: int, num_rows: int) -> Tensor:
    """sinks [H] -> [K, M, 1], the order of a tile's rows (token, then head of the group)."""
    rows = sinks.view(num_kv_heads, 1, -1).expand(-1, tile_tokens, -1).reshape(num_kv_heads, -1)
    return F.pad(rows, (0, num_rows - rows.shape[1]))[..., None]


def _plan_tiles(
    batch: RaggedBatch, size: int, chosen: NDArray[np.int64], reach: Reach, device: torch.device
) -> TilePlan:
    """Tiles of `size` tokens for the sequences `chosen`, all arrays at once."""
    lens = batch.query_lens[chosen]
    per_sequence = -(-lens // size)
    owner = np.repeat(chosen, per_sequence)  # [B] sequence of each tile
    within = np.arange(owner.size) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    offsets = within[:, None] * size + np.arange(size)  # [B, Q] token inside its sequence's span
    offsets = np.minimum(offsets, batch.query_lens[owner][:, None] - 1)
    positions = (batch.context_lens - batch.query_lens)[owner][:, None] + offsets  # [B, Q]
    graded = reach.is_whole
    first = np.zeros(owner.size, np.int64)
    if not graded:
        first = reach.first(positions[:, 0]) // HISTORY_CHUNK
    # Last position that each query sees.
    seen = np.minimum(positions + reach.ahead, batch.context_lens[owner][:, None] - 1)
    num_chunks = _chunk_at(seen[:, -1], graded) + 1 - first
    order = np.argsort(-num_chunks, kind="stable")
    owner, offsets, positions, seen, first, num_chunks = (
        part[order] for part in (owner, offsets, positions, seen, first, num_chunks)
    )
    tokens = batch.query_starts[owner][:, None] + offsets
    chunks = []
    for step in range(int(num_chunks[0])):
        active = int(np.searchsorted(-num_chunks, -step, side="left"))
        rows = positions[:active], seen[:active]
        chunks.append(_plan_chunk(batch, owner[:active], rows, first[:active] + step, reach, device))
    return TilePlan(tile_tokens=size, tokens=torch.from_numpy(tokens.ravel()).to(device), chunks=chunks)


def _plan_chunk(
    batch: RaggedBatch,
    owner: NDArray[np.int64],
    rows: tuple[NDArray[np.int64], NDArray[np.int64]],
    chunk: NDArray[np.int64],
    reach: Reach,
    device: torch.device,
) -> _ChunkPlan:
    """The `chunk`-th [B] piece of each tile's history; rows [B, Q] are the queries' positions, and the last
    ones that they see.
    """
    positions, seen = rows
    start, length = _chunk_span(chunk, graded=reach.is_whole)
    columns = start[:, None] // batch.block_size + np.arange(length // batch.block_size)
    inside = columns < batch.block_tables.shape[1]
    blocks = np.where(inside, batch.block_tables[owner[:, None], np.where(inside, columns, 0)], 0)
    own = _own_blocks(batch, owner, positions, columns, device)
    end = start + length
    begins = reach.first(positions)  # [B, Q]
    begins_early = not reach.is_whole and bool((start < begins[:, 0]).any())
    needs_mask = bool((end - 1 > seen[:, 0]).any())
    needs_mask = needs_mask or (not reach.is_whole and bool((start < begins[:, -1]).any()))
    hidden = stale = None
    if needs_mask:
        first_at = torch.from_numpy(begins).to(device)[:, :, None]
        key_at = (torch.from_numpy(start).to(device)[:, None] + torch.arange(length, device=device))[:, None]
        masked = key_at > torch.from_numpy(seen).to(device)[:, :, None]
        if not reach.is_whole:
            masked |= key_at < first_at
        hidden = masked[:, None, :, None, :]
        if begins_early or bool((end > seen[:, -1] + 1).any()):
            stale = key_at[:, 0] > torch.from_numpy(seen[:, -1:]).to(device)
            if not reach.is_whole:
                # Blocks before the window may be given up.
                stale |= key_at[:, 0] < first_at[:, 0]
            stale = stale[:, None, :, None]
    return _ChunkPlan(
        num_tiles=owner.size, blocks=torch.from_numpy(blocks).to(device), hidden=hidden, stale=stale, own=own
    )


def _own_blocks(
    batch: RaggedBatch,
    owner: NDArray[np.int64],
    positions: NDArray[np.int64],
    columns: NDArray[np.int64],
    device: torch.device,
) -> Tensor | None:
    """As in _ChunkPlan, of tiles [B] whose queries are at positions [B, Q], and of blocks [B, C]."""
    if not batch.is_by_block:
        return None
    tiles, places = np.nonzero(columns == positions[:, -1:] // batch.block_size)
    return torch.from_numpy(np.stack((tiles, places, owner[tiles]))).to(device)


def _chunk_at(positions: NDArray[np.int64], graded: bool) -> NDArray[np.int64]:
    """Number of the chunk that holds each position. Graded: FIRST_ENDS, then steps of HISTORY_CHUNK."""
    if not graded:
        return positions // HISTORY_CHUNK
    late = len(FIRST_ENDS) + (positions - FIRST_ENDS[-1]) // HISTORY_CHUNK
    return np.where(positions < FIRST_ENDS[-1], np.searchsorted(FIRST_ENDS, positions, side="right"), late)


def _chunk_span(chunk: NDArray[np.int64], *, graded: bool) -> tuple[NDArray[np.int64], int]:
    """Start of each tile's chunk [B], and the length they share. Graded tiles are all at the same chunk."""
    if not graded:
        return chunk * HISTORY_CHUNK, HISTORY_CHUNK
    index = int(chunk[0])
    starts = (0, *FIRST_ENDS)
    if index < len(FIRST_ENDS):
        return np.full_like(chunk, starts[index]), starts[index + 1] - starts[index]
    return FIRST_ENDS[-1] + (chunk - len(FIRST_ENDS)) * HISTORY_CHUNK, HISTORY_CHUNK
