"""Which tokens of a prompt stay in each layer and kv head, by the attention that its queries pay to them.

The queries of voters are collected until all of a group are there, so a vote is a product of the same shapes
however the prompt was cut into steps, and the choice is the same to the bit. Used by the executors for
sequences whose policy chooses (snapkv, h2o); others cost nothing.

Shape letters: T tokens, H query heads, K kv heads, G queries of a kv head, D key dim, B blocks, P block size,
C tokens of a history, F tokens of the prompt's whole blocks, M tokens that are chosen of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.retention import SCORED
from engine.model.forward_batch import ForwardBatch
from engine.runner.forgotten.keys import Floats, LayerKeys, capped
from engine.runner.forgotten.meter import ForgottenKeys, keys_of
from engine.types import ChosenTokens
from kernels.attention.ragged import AttentionOptions

# Queries that vote together, counted from the first voter.
_TOGETHER = 64
# Neighbours whose votes a token has the mean of, itself among them, under snapkv.
_POOLED = 5


class LayerVotes:
    """What the queries of one layer have said so far."""

    def __init__(self, kept: ChosenTokens) -> None:
        self._kept = kept
        # Weights [K, F], summed over queries and their heads.
        self.sums: NDArray[np.float64] | None = None
        # Queries [T, H, D] that follow those which have voted, and the first one's position.
        self._waiting: list[Floats] = []
        self._next = kept.first_voter

    def take(
        self, queries: Floats, start: int, keys_until: Callable[[int], Floats], cap: float | None
    ) -> None:
        """Scaled queries [T, H, D] of positions from `start` on; those that were here before are left out.
        `keys_until(n)` is the keys [K, n, D] of the first n positions.
        """
        expected = self._next + sum(map(len, self._waiting))
        new = queries[max(0, expected - start) : max(0, self._kept.start - start)]
        if new.size:
            self._waiting.append(new.copy())
        while (count := min(_TOGETHER, self._kept.start - self._next)) > 0:
            if sum(map(len, self._waiting)) < count:
                return
            there = np.concatenate(self._waiting)
            self._vote(there[:count], keys_until(self._next + count), cap)
            self._next, self._waiting = self._next + count, [there[count:]]

    def _vote(self, queries: Floats, keys: Floats, cap: float | None) -> None:
        """Queries [T, H, D] of the last positions that keys [K, C, D] are of."""
        count, num_kv, num_seen = len(queries), keys.shape[0], keys.shape[1]
        own = queries.reshape(count, num_kv, -1, queries.shape[2]).transpose(1, 2, 0, 3)  # [K, G, T, D]
        future = np.arange(num_seen) > np.arange(num_seen - count, num_seen)[:, None]
        size = self._kept.num_whole * self._kept.block_size
        if self.sums is None:
            self.sums = np.zeros((num_kv, size))
        # One head after another, because weights of all take hundreds of megabytes at 32,768 tokens.
        for head in range(num_kv):
            weights = capped(own[head] @ keys[head].T, cap)  # [G, T, C]
            weights[:, future] = -np.inf
            weights = np.exp(weights - weights.max(2, keepdims=True))
            weights /= weights.sum(2, keepdims=True)
            self.sums[head, :num_seen] += weights[..., :size].sum((0, 1), dtype=np.float64)


class Votes:
    """Of one sequence, until its prompt is computed."""

    def __init__(self, kept: ChosenTokens, fresh: Sequence[int]) -> None:
        self.kept = kept
        # Blocks that the chosen tokens are copied into.
        self.fresh = np.asarray(fresh, np.int64)
        # By the number of the layer among those that attend.
        self.layers: list[LayerVotes] = []

    def layer(self, number: int) -> LayerVotes:
        """The layer's."""
        while len(self.layers) <= number:
            self.layers.append(LayerVotes(self.kept))
        return self.layers[number]


def chosen_of(sums: NDArray[np.float64], kept: ChosenTokens) -> NDArray[np.int64]:
    """Tokens [K, M] that stay, ascending, by their votes [K, F]: the last ones of the prompt, and those with
    the most votes of the others; of equals the first.
    """
    num_whole = sums.shape[1]
    num_last = max(0, kept.num_last - kept.start % kept.block_size)
    others = sums[:, : num_whole - num_last]
    if kept.policy == "snapkv":
        padded = np.pad(others, ((0, 0), (_POOLED // 2, _POOLED // 2)))
        others = np.lib.stride_tricks.sliding_window_view(padded, _POOLED, axis=1).sum(2)
    num_chosen = kept.num_sinks * kept.block_size - num_last
    best = np.argsort(-others, axis=1, kind="stable")[:, :num_chosen]
    last = np.broadcast_to(np.arange(num_whole - num_last, num_whole), (len(sums), num_last))
    return np.concatenate((np.sort(best, 1), last), 1)


@dataclass(kw_only=True)
class _VotingRow:
    """A row of the step with voters."""

    votes: Votes
    tokens: slice
    start: int
    blocks: NDArray[np.int64]


class VoteCounter:
    """Counts a step's rows while it is computed: `watch` is called by every layer before its attention."""

    def __init__(self, rows: Sequence[_VotingRow]) -> None:
        self._rows, self._number = rows, 0

    def watch(self, q: Any, cache: Any, options: AttentionOptions) -> None:
        """Queries [T, H, D] of the layer whose keys are in `cache`, the step's among them."""
        queries = q if isinstance(q, np.ndarray) else q.float().cpu().numpy()
        for row in self._rows:

            def keys_until(count: int, row: _VotingRow = row) -> Floats:
                return keys_of(cache, row.blocks[: -(-count // cache.block_size)])[:, :count]

            own = queries[row.tokens] * np.float32(options.scale)
            row.votes.layer(self._number).take(own, row.start, keys_until, options.soft_cap)
        self._number += 1


def counter_of(
    votes: Sequence[Votes | None], starts: NDArray[np.int64], batch: ForwardBatch
) -> VoteCounter | None:
    """A counter for the rows of a batch whose positions begin at `starts` [S]; None where nobody votes."""
    ragged, rows = batch.ragged, []
    for member, (each, start) in enumerate(zip(votes, starts.tolist(), strict=True)):
        first, end = int(ragged.query_starts[member]), int(ragged.query_starts[member + 1])
        if each is None or each.kept.policy == SCORED:
            continue
        if start + end - first > each.kept.first_voter:
            blocks = ragged.block_tables[member]
            rows.append(_VotingRow(votes=each, tokens=slice(first, end), start=start, blocks=blocks))
    return VoteCounter(rows) if rows else None


def choose(
    votes: Votes, table: NDArray[np.int64], caches: Sequence[Any], spare: int, forgotten: ForgottenKeys | None
) -> None:
    """Copies what is chosen in each layer into the fresh blocks, which come first in `table` [B] from then
    on; the `spare` block is in the place of the others of the prompt's whole blocks. Keys of what was not
    chosen go to those that are `forgotten`, where somebody wants to know what that loses.
    """
    kept = votes.kept
    blocks = table[: kept.num_whole].copy()
    attending = [cache for cache in caches if hasattr(cache, "keys")]
    done: set[int] = set()
    for index, cache in enumerate(caches):
        if not hasattr(cache, "keys") or id(cache) in done:
            continue
        done.add(id(cache))
        # Layers that share their keys choose together.
        sums = [
            each.sums
            for each, its in zip(votes.layers, attending, strict=True)
            if its is cache and each.sums is not None
        ]
        chosen = chosen_of(np.sum(sums, axis=0), kept)
        if forgotten is not None:
            forgotten.layers[index] = _keys_of_others(cache, blocks, chosen, kept.block_size)
        _copy(cache, blocks, chosen, votes.fresh)
    if forgotten is not None:
        forgotten.num_blocks = kept.num_hidden(kept.start)
    table[: kept.num_whole] = spare
    table[: votes.fresh.size] = votes.fresh


def _keys_of_others(
    cache: Any, blocks: NDArray[np.int64], chosen: NDArray[np.int64], block_size: int
) -> LayerKeys:
    """Keys of what was not chosen, as if it lay in blocks; for each head other ones."""
    keys = keys_of(cache, blocks)  # [K, F, D]
    is_other = np.ones(keys.shape[:2], np.bool_)
    np.put_along_axis(is_other, chosen, False, 1)
    found = LayerKeys()
    found.add(keys[is_other].reshape(keys.shape[0], -1, block_size, keys.shape[2]))
    return found


def _copy(cache: Any, blocks: NDArray[np.int64], chosen: NDArray[np.int64], fresh: NDArray[np.int64]) -> None:
    """Tokens [K, M] of blocks [B] into fresh ones, as they are stored, with their scales."""
    size = cache.block_size
    places: Any = (
        np.arange(len(chosen))[:, None],
        blocks[chosen // size],
        chosen % size,
        np.repeat(fresh, size)[None],
        np.tile(np.arange(size), fresh.size)[None],
    )
    tensors = cache.tensors()
    if not isinstance(tensors[0], np.ndarray):
        import torch

        places = [torch.from_numpy(np.ascontiguousarray(each)).to(tensors[0].device) for each in places]
    heads, from_blocks, from_slots, into_blocks, into_slots = places
    for tensor in tensors:
        tensor[into_blocks, heads, into_slots] = tensor[from_blocks, heads, from_slots]
