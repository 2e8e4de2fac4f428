"""Measures what steps lose by what their sequences have forgotten: a bound that is never below it.

Keys are as the cache holds them, and the sum of what was attended to is computed beside attention, from the
same queries. Used by the executors for requests that have a bound (`kv.max_lost`); others cost nothing.

Shape letters: T tokens, H query heads, K kv heads, G queries of a kv head, D key dim, B blocks, P block size,
C tokens of a history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.forward_batch import ForwardBatch
from engine.model.watched import Reader, Watcher
from engine.runner.forgotten.keys import Floats, LayerKeys, capped, log_sum
from engine.types import KeptBlocks
from kernels.attention.ragged import AttentionOptions
from kernels.paged_cache.host import BY_CHANNEL, HostCache


@dataclass(kw_only=True)
class ForgottenKeys:
    """Those of one sequence."""

    num_blocks: int = 0
    # Whether some were gone before they could be taken.
    is_partial: bool = False
    layers: dict[int, LayerKeys] = field(default_factory=dict)


@dataclass(kw_only=True)
class MeasuredRow:
    """A row of the step that does not look at everything."""

    member: int
    forgotten: ForgottenKeys
    tokens: slice
    blocks: NDArray[np.int64]  # of what it looks at
    num_seen: int  # tokens in them, up to the row's last
    recent: int  # where its newest keys are whole (ForwardBatch.recent_rows)
    shares: NDArray[np.float64]  # [T] sums over heads


class LossMeter:
    """Measures a step's rows while it is computed: `watch` is called by every layer before its attention."""

    def __init__(self, rows: Sequence[MeasuredRow], caches: Sequence[Any]) -> None:
        self._rows = rows
        self._layers = {id(cache): index for index, cache in enumerate(caches)}
        self._num_heads = 0

    def watch(self, q: Any, cache: Any, options: AttentionOptions, keys: Any = None) -> None:
        """See Watcher."""
        queries = q if isinstance(q, np.ndarray) else q.float().cpu().numpy()
        num_heads = queries.shape[1]
        self._num_heads += num_heads
        for row in self._rows:
            if row.forgotten.is_partial:
                row.shares += num_heads
                continue
            own = queries[row.tokens] * np.float32(options.scale)
            num_tokens, num_kv = own.shape[0], cache.keys.shape[1]
            own = own.reshape(num_tokens, num_kv, -1, own.shape[2]).swapaxes(0, 1)
            own = np.ascontiguousarray(own.reshape(num_kv, -1, own.shape[3]))  # [K, T * G, D]
            whole = _whole_keys(row, cache, keys)
            if whole is None:
                scores = own @ keys_of(cache, row.blocks)[:, : row.num_seen].swapaxes(1, 2)  # [K, T * G, C]
            else:
                scores = _scores_by_channel(own, row, cache, whole)
            scores = capped(scores, options.soft_cap)
            ends = row.num_seen - num_tokens + np.arange(num_tokens)
            hidden = np.arange(row.num_seen) > np.repeat(ends, own.shape[1] // num_tokens)[:, None]
            # What was rounded of the scores that are seen comes off their sum.
            slack = 1e-5 * (1.0 + np.abs(scores).max(2))
            log_seen = log_sum(np.where(hidden, np.float32(-np.inf), scores)) - slack
            layer = row.forgotten.layers[self._layers[id(cache)]]
            log_lost = layer.log_mass(own, log_seen.astype(np.float32), options.soft_cap)
            shares = 1.0 / (1.0 + np.exp(np.minimum(log_seen - log_lost, 700.0)))
            row.shares += shares.reshape(num_kv, num_tokens, -1).sum((0, 2))

    def shares(self) -> dict[int, tuple[float, ...]]:
        """Of each token of the rows that do not look at everything, by the row's number: the most that its
        attention has lost, on average over layers and heads; once the step is computed.
        """
        found = {row.member: row.shares / max(1, self._num_heads) for row in self._rows}
        return {member: tuple(np.minimum(shares, 1.0).tolist()) for member, shares in found.items()}


def _whole_keys(row: MeasuredRow, cache: Any, keys: Any) -> Floats | None:
    """Keys [K, C, D] of the blocks in which a row computes, up to its last, where they are rounded by channel
    elsewhere; `keys` [T, K, D] are the step's, of native programs. None where all are as they are stored.
    """
    first = row.num_seen - (row.tokens.stop - row.tokens.start)
    begin = first // cache.block_size * cache.block_size
    if keys is not None:
        before = cache.newest_keys(row.recent, first // cache.block_size)[:, : first - begin]
        return np.concatenate((before, keys[row.tokens].swapaxes(0, 1)), 1)
    if cache.type_name != BY_CHANNEL:
        return None
    found: Floats = cache.whole_keys_of(row.member)[:, : row.num_seen - begin].cpu().numpy()
    return found


def _scores_by_channel(own: Floats, row: MeasuredRow, cache: Any, whole: Floats) -> Floats:
    """Scores [K, T * G, C] of queries [K, T * G, D] where keys are rounded by channel: of a query's own block
    they are `whole`.
    """
    size, begin, full = cache.block_size, row.num_seen - whole.shape[1], row.num_seen // cache.block_size
    num_tokens = row.tokens.stop - row.tokens.start
    scores = np.zeros((*own.shape[:2], row.num_seen), np.float32)
    scores[:, :, : full * size] = own @ keys_of(cache, row.blocks[:full]).swapaxes(1, 2)
    blocks = np.arange(begin, row.num_seen) // size
    is_own = np.repeat(blocks[-num_tokens:], own.shape[1] // num_tokens)[:, None] == blocks
    scores[:, :, begin:] = np.where(is_own, own @ whole.swapaxes(1, 2), scores[:, :, begin:])
    return scores


class WatchedAttention:
    """A back end whose queries are seen by others before it runs; or, where a native program computes
    attention, these alone. A `reader` sees what these are computed from.
    """

    def __init__(self, attention: Any, watchers: Sequence[Watcher], reader: Reader | None = None) -> None:
        self._attention, self._watchers = attention, watchers
        self.read = None if reader is None else reader.read

    def watch(self, q: Any, cache: Any, options: AttentionOptions, keys: Any = None) -> None:
        """See Watcher."""
        for each in self._watchers:
            each.watch(q, cache, options, keys)

    def plan(self, batch: Any, device: Any) -> Any:
        """See AttentionBackend."""
        return self._attention.plan(batch, device)

    def run(self, plan: Any, q: Any, cache: Any, options: AttentionOptions, sinks: Any = None) -> Any:
        """See AttentionBackend."""
        self.watch(q, cache, options)
        return self._attention.run(plan, q, cache, options, sinks)


def meter_of(
    states: Sequence[tuple[KeptBlocks | None, ForgottenKeys | None]],
    starts: NDArray[np.int64],
    batch: ForwardBatch,
    caches: Sequence[Any],
) -> LossMeter | None:
    """A meter for the rows of a batch whose positions begin at `starts` [S]; None where nobody has a bound,
    or forgot anything. What they forgot has been taken.
    """
    ragged, rows = batch.ragged, []
    for member, ((kept, forgotten), start) in enumerate(zip(states, starts.tolist(), strict=True)):
        if kept is not None and forgotten is not None and kept.num_hidden(start):
            first, end = int(ragged.query_starts[member]), int(ragged.query_starts[member + 1])
            num_seen = int(ragged.context_lens[member])
            blocks = ragged.block_tables[member, : -(-num_seen // ragged.block_size)]
            rows.append(
                MeasuredRow(
                    member=member,
                    forgotten=forgotten,
                    tokens=slice(first, end),
                    blocks=blocks,
                    num_seen=num_seen,
                    recent=0 if batch.recent_rows is None else int(batch.recent_rows[member]),
                    shares=np.zeros(end - first),
                )
            )
    return LossMeter(rows, caches) if rows else None


def take_forgotten(
    forgotten: ForgottenKeys,
    kept: KeptBlocks,
    position: int,
    table: NDArray[np.int64],
    caches: Sequence[Any],
    spare: int,
) -> None:
    """Takes the keys of what `position` and later ones do not look at, while they are there. `table` has the
    sequence's blocks [B]; the `spare` block in their place says that they are gone.
    """
    count = kept.num_hidden(position)
    blocks = table[kept.num_sinks + forgotten.num_blocks : kept.num_sinks + count]
    if not blocks.size:
        return
    forgotten.num_blocks = count
    forgotten.is_partial |= bool((blocks == spare).any())
    if forgotten.is_partial:
        forgotten.layers.clear()
        return
    done: set[int] = set()
    for index, cache in enumerate(caches):
        if hasattr(cache, "keys") and id(cache) not in done:
            done.add(id(cache))
            keys = keys_of(cache, blocks)
            keys = keys.reshape(keys.shape[0], blocks.size, kept.block_size, -1)
            forgotten.layers.setdefault(index, LayerKeys()).add(keys)


def keys_of(cache: Any, blocks: NDArray[np.int64]) -> Floats:
    """Keys [K, C, D] of blocks [B], one after another."""
    if not isinstance(cache, HostCache):
        found: Floats = gathered(cache, blocks).cpu().numpy()
        return found
    keys = cache.wide_keys(blocks)
    return keys.swapaxes(0, 1).reshape(keys.shape[1], -1, keys.shape[3])


def gathered(cache: Any, blocks: NDArray[np.int64]) -> Any:
    """The same of tensors, as one where they are."""
    import torch

    where = torch.from_numpy(np.ascontiguousarray(blocks))[None].to(cache.tensors()[0].device)
    return cache.gather(where)[0][0]
