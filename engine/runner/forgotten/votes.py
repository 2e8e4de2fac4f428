"""Which tokens of a prompt stay in each layer and kv head, by the attention that its queries pay to them.

A native program adds votes up while it computes attention, in whole numbers, whose sums are the same in any
order (kernels/attention/attention_votes.h). Beside torch's back ends the weights are computed once more here:
the queries of voters are collected until all of a group are there, so a vote is a product of the same shapes
however the prompt was cut into steps. Either way the choice is the same to the bit. Used by the executors for
sequences whose policy chooses (snapkv, h2o); others cost nothing.

Shape letters: T tokens, S sequences, H query heads, K kv heads, G queries of a kv head, D key dim, B blocks,
P block size, C tokens of a history, F tokens of the prompt's whole blocks, M tokens that are chosen of them,
R kv heads of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.retention import SCORED
from engine.model.forward_batch import ForwardBatch
from engine.runner.forgotten.keys import LayerKeys
from engine.runner.forgotten.meter import ForgottenKeys, gathered, keys_of
from engine.types import ChosenTokens
from kernels.attention.native_ops import VOTE, vote_rows
from kernels.attention.ragged import AttentionOptions
from kernels.paged_cache.host import BY_CHANNEL, HostCache

# Queries that vote together beside torch's attention, counted from the first voter.
_TOGETHER = 64
# Weights that are computed at a time, 64 MiB.
_MOST_WEIGHTS = 1 << 24
# Neighbours whose votes a token has the mean of, itself among them, under snapkv.
_POOLED = 5


class LayerVotes:
    """What the queries of one layer have said so far, beside torch's attention."""

    def __init__(self, kept: ChosenTokens, sums: NDArray[np.int64]) -> None:
        self._kept = kept
        # Weights [K, F], summed over queries and their heads, in parts of VOTE.
        self._sums = sums
        # Queries [T, H, D] that follow those which have voted, and the first one's position.
        self._waiting: list[Any] = []
        self._next = kept.first_voter

    def take(
        self,
        queries: Any,
        start: int,
        keys_until: Callable[[int], Any],
        cap: float | None,
        *,
        by_block: bool = False,
    ) -> None:
        """Scaled queries [T, H, D] of positions from `start` on; those that were here before are left out.
        `keys_until(n)` is the keys [K, n, D] of the first n positions, as the last of these sees them. All
        are tensors of one device. `by_block`: queries that vote together are of one block.
        """
        expected = self._next + sum(map(len, self._waiting))
        new = queries[max(0, expected - start) : max(0, self._kept.start - start)]
        if len(new):
            self._waiting.append(new.float().clone())
        while (count := min(self._together(by_block), self._kept.start - self._next)) > 0:
            if sum(map(len, self._waiting)) < count:
                return
            there = _joined(self._waiting)
            self._vote(there[:count], keys_until(self._next + count), cap)
            self._next, self._waiting = self._next + count, [there[count:]]

    def _together(self, by_block: bool) -> int:
        size = self._kept.block_size
        return size - self._next % size if by_block else _TOGETHER

    def _vote(self, queries: Any, keys: Any, cap: float | None) -> None:
        """Queries [T, H, D] of the last positions that keys [K, C, D] are of."""
        count, (num_kv, num_seen) = len(queries), keys.shape[:2]
        own = queries.view(count, num_kv, -1, queries.shape[2]).permute(1, 2, 0, 3)  # [K, G, T, D]
        size = self._sums.shape[1]
        # So many heads at a time that their weights are no hundreds of megabytes.
        together = max(1, _MOST_WEIGHTS // (queries.shape[1] // num_kv * count * num_seen))
        for first in range(0, num_kv, together):
            heads = slice(first, first + together)
            scores = own[heads] @ keys[heads, None].mT  # [k, G, T, C]
            if cap is not None:
                scores = cap * (scores / cap).tanh()
            future = scores.new_ones(scores.shape[2:]).triu(num_seen - count + 1).bool()
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            votes = weights[..., :size].double().sum((1, 2))
            self._sums[heads, : votes.shape[1]] += (VOTE * votes).round().long().cpu().numpy()


def _joined(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(tensors))


class Votes:
    """Of one sequence, until its prompt is computed."""

    def __init__(self, kept: ChosenTokens, fresh: Sequence[int]) -> None:
        self.kept = kept
        # Blocks that the chosen tokens are copied into.
        self.fresh = np.asarray(fresh, np.int64)
        # What each token has of all weights [R, F], in parts of VOTE, or its scores; once there is any.
        self.sums: NDArray[Any] = np.zeros((0, 0), np.int64)
        # The first position that may still vote.
        self.next = kept.first_voter
        # Beside torch's attention, by the number of the layer among those that attend; LayerScores of states.
        self.layers: list[Any] = []

    def open(self, num_rows: int, dtype: type[np.generic] = np.int64) -> None:
        """Makes room for the votes of so many kv heads, R."""
        if not self.sums.size:
            self.sums = np.zeros((num_rows, self.kept.num_whole * self.kept.block_size), dtype)

    def layer(self, number: int, first_row: int, num_heads: int) -> LayerVotes:
        """The layer's, whose kv heads have rows from `first_row` on."""
        if number == len(self.layers):
            sums = self.sums[first_row : first_row + num_heads]
            self.layers.append(LayerVotes(self.kept, sums))
        layer: LayerVotes = self.layers[number]
        return layer


def chosen_of(sums: NDArray[Any], kept: ChosenTokens) -> NDArray[np.int64]:
    """Tokens [K, M] that stay, ascending, by their votes [K, F]: the last ones of the prompt, and those with
    the most votes of the others; of equals the first.
    """
    num_whole = sums.shape[1]
    num_last = max(0, kept.num_last - kept.start % kept.block_size)
    others = sums[:, : num_whole - num_last]
    if kept.policy == "snapkv":
        padded = np.pad(others, ((0, 0), (_POOLED // 2, _POOLED // 2)))
        others = np.lib.stride_tricks.sliding_window_view(padded, _POOLED, axis=1).sum(2)
    last = np.broadcast_to(np.arange(num_whole - num_last, num_whole), (len(sums), num_last))
    num_chosen = kept.num_sinks * kept.block_size - num_last
    if not num_chosen:
        return last
    least = np.partition(others, -num_chosen, axis=1)[:, -num_chosen, None]
    best = others >= least
    if np.count_nonzero(best) > num_chosen * len(best):
        best, equal = others > least, others == least
        best |= equal & (np.cumsum(equal, 1) <= num_chosen - best.sum(1, keepdims=True))
    return np.concatenate((np.nonzero(best)[1].reshape(-1, num_chosen), last), 1)


@dataclass(kw_only=True)
class _VotingRow:
    """A row of the step with voters."""

    votes: Votes
    member: int
    tokens: slice
    start: int
    blocks: NDArray[np.int64]


class VoteCounter:
    """Counts a step's rows while torch computes it: `watch` is called by every layer before its attention."""

    def __init__(self, rows: Sequence[_VotingRow], caches: Sequence[Any]) -> None:
        self._rows, self._number = rows, 0
        self._first_rows, num_rows = vote_rows(caches)
        for row in rows:
            row.votes.open(num_rows)

    def watch(self, q: Any, cache: Any, options: AttentionOptions, keys: Any = None) -> None:
        """See Watcher."""
        for row in self._rows:

            def keys_until(count: int, row: _VotingRow = row) -> Any:
                return _seen_keys(cache, row, count)

            own = q[row.tokens].float() * options.scale
            layer = row.votes.layer(self._number, self._first_rows[id(cache)], cache.keys.shape[1])
            layer.take(own, row.start, keys_until, options.soft_cap, by_block=cache.type_name == BY_CHANNEL)
        self._number += 1


def _seen_keys(cache: Any, row: _VotingRow, count: int) -> Any:
    """Keys [K, C, D] of the first C positions as the last of these sees them."""
    keys = gathered(cache, row.blocks[: -(-count // cache.block_size)])[:, :count]
    if cache.type_name == BY_CHANNEL:
        # Of its own block they are whole, which this step computes the end of.
        begin, first = ((at - at % cache.block_size) for at in (count - 1, row.start))
        keys[:, begin:] = cache.whole_keys_of(row.member)[:, begin - first : count - first]
    return keys


def _voting(
    votes: Sequence[Votes | None], starts: NDArray[np.int64], batch: ForwardBatch
) -> Iterator[tuple[int, _VotingRow]]:
    """The rows of a batch that vote, whose positions begin at `starts` [S], each with its number."""
    ragged = batch.ragged
    for member, (each, start) in enumerate(zip(votes, starts.tolist(), strict=True)):
        first, end = int(ragged.query_starts[member]), int(ragged.query_starts[member + 1])
        if each is None or each.kept.policy == SCORED:
            continue
        if start + end - first > each.next:
            blocks = ragged.block_tables[member]
            tokens = slice(first, end)
            yield member, _VotingRow(votes=each, member=member, tokens=tokens, start=start, blocks=blocks)


def counter_of(
    votes: Sequence[Votes | None], starts: NDArray[np.int64], batch: ForwardBatch, caches: Sequence[Any]
) -> VoteCounter | None:
    """A counter for the rows of a batch that torch computes, whose positions begin at `starts` [S]; None
    where nobody votes.
    """
    rows = [row for _, row in _voting(votes, starts, batch)]
    return VoteCounter(rows, caches) if rows else None


def with_votes(
    votes: Sequence[Votes | None], starts: NDArray[np.int64], batch: ForwardBatch, caches: Sequence[Any]
) -> ForwardBatch:
    """The batch as a native program computes it: it says which rows vote, and where their votes go."""
    rows = list(_voting(votes, starts, batch))
    if not rows:
        return batch
    _, num_rows = vote_rows(caches)
    given = np.zeros((len(votes), 4), np.int64)
    for member, row in rows:
        each = row.votes
        each.open(num_rows)
        given[member] = each.sums.ctypes.data, each.next, each.kept.start, each.sums.shape[1]
    return replace(batch, ragged=replace(batch.ragged, votes=given))


def choose(
    votes: Votes, table: NDArray[np.int64], caches: Sequence[Any], spare: int, forgotten: ForgottenKeys | None
) -> None:
    """Copies what is chosen in each layer into the fresh blocks, which come first in `table` [B] from then
    on; the `spare` block is in the place of the others of the prompt's whole blocks. Keys of what was not
    chosen go to those that are `forgotten`, where somebody wants to know what that loses.
    """
    kept = votes.kept
    blocks = table[: kept.num_whole].copy()
    first_rows, _ = vote_rows(caches)
    all_chosen = chosen_of(votes.sums, kept)
    for index, cache in enumerate(caches):
        first = first_rows.pop(id(cache), None)
        if first is None:
            continue
        chosen = all_chosen[first : first + cache.keys.shape[1]]
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
    """Tokens [K, M] of blocks [B] into fresh ones, as they are stored, with their scales. They are read row
    by row, and written in whole blocks. Keys by channel are rounded once more, with the others of their new
    block.
    """
    size, num_kv = cache.block_size, len(chosen)
    rows: Any = (blocks[chosen // size] * num_kv + np.arange(num_kv)[:, None]) * size + chosen % size
    rows = rows.reshape(num_kv, fresh.size, size).swapaxes(0, 1).ravel()
    into: Any = fresh
    by_channel = cache.type_name == BY_CHANNEL
    tensors = cache.by_slot() if by_channel or isinstance(cache, HostCache) else cache.tensors()
    found: Any
    if by_channel:
        found = np.take_along_axis(keys_of(cache, blocks), chosen[..., None], 1)
        found = found.reshape(num_kv, fresh.size, size, -1).swapaxes(0, 1)
    if not isinstance(tensors[0], np.ndarray):
        import torch

        rows, into = (torch.from_numpy(each).to(tensors[0].device) for each in (rows, into))
        found = torch.from_numpy(found).to(tensors[0].device) if by_channel else None
    if by_channel:
        cache.put_keys(found, into)
    for tensor in tensors:
        flat = tensor.reshape(-1, tensor.shape[3])
        found = flat.take(rows, 0) if isinstance(flat, np.ndarray) else flat.index_select(0, rows)
        tensor[into] = found.reshape(-1, *tensor.shape[1:])
