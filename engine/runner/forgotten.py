"""How much of attention an answer's forgotten keys would have had: a bound that is never below it.

Of every block that an answer forgets (`engine.types.retention`) its keys stay here in eight bits, a step for
each channel of each block, with the length of what rounding took of each key, in steps: a score is then known
up to that length times the length of the query in steps (Cauchy-Schwarz), and so is the weight that the key
would have had. Beyond
MOST_WHOLE_BLOCKS blocks the oldest leave their boxes alone, the least and the most of each channel; of boxes
beyond MOST_BOXES, neighbours become one. So an endless answer has constant memory, and a bound that grows
loose. Keys are as the cache holds them, and the sum of what was attended to is computed beside attention,
from the same queries. Used by the executors for requests that have a bound (`kv.max_lost`); others cost
nothing.

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
from engine.types import KeptBlocks
from kernels.attention.ragged import AttentionOptions
from kernels.paged_cache.host import HostCache

Floats = NDArray[np.float32]

MOST_WHOLE_BLOCKS = 512
MOST_BOXES = 256
_LEVELS = 255.0
# Part of all that is attended to which blocks may have too much, together, by being told from their boxes.
_FROM_BOXES = 1e-3
# Of the lengths of a key and a query, for each of their elements: what float32 may take of a score.
_ROUNDING = 2.0**-22


class LayerKeys:
    """The forgotten keys of one layer."""

    def __init__(self) -> None:
        self.num_blocks = 0
        # Of blocks that are here whole, for each channel [K, B, D]: the least, and the step between two
        # levels; for each key the levels [K, B, P, D] and the length that rounding took [K, B, P]; for each
        # block what scores may be off by float32 arithmetic, as a part of the query's length [K, B].
        self._low = self._step = self._lengths = np.zeros((0, 0, 0), np.float32)
        self._off = np.zeros((0, 0), np.float32)
        self._levels = np.zeros((0, 0, 0, 0), np.uint8)
        # Boxes of others, with the keys in each [B].
        self._boxes: list[Floats] = []
        self._counts = np.zeros(0, np.int64)

    def add(self, keys: Floats) -> None:
        """Keys [K, B, P, D] of blocks that follow those before."""
        for first in range(0, keys.shape[1], MOST_WHOLE_BLOCKS):
            self._add(keys[:, first : first + MOST_WHOLE_BLOCKS])

    def _add(self, keys: Floats) -> None:
        count = keys.shape[1]
        low, high = keys.min(2), keys.max(2)
        step = np.maximum((high - low) / _LEVELS, np.float32(1e-30))
        levels = np.rint((keys - low[:, :, None]) / step[:, :, None])
        taken = (keys - (low[:, :, None] + levels * step[:, :, None])) / step[:, :, None]
        lengths = np.linalg.norm(taken, axis=3) * np.float32(1.0001)
        off = np.linalg.norm(keys, axis=3).max(2) * np.float32(_ROUNDING * keys.shape[3])
        whole: tuple[Any, ...] = (low, step, levels.astype(np.uint8), lengths, off)
        held: tuple[Any, ...] = (self._low, self._step, self._levels, self._lengths, self._off)
        if self.num_blocks:
            excess = max(0, self._low.shape[1] + count - MOST_WHOLE_BLOCKS)
            self._leave_boxes(excess)
            whole = tuple(
                np.concatenate((old[:, excess:], new), 1) for old, new in zip(held, whole, strict=True)
            )
        self._low, self._step, self._levels, self._lengths, self._off = whole
        self.num_blocks += count

    def _leave_boxes(self, count: int) -> None:
        if not count:
            return
        low, wide = self._low[:, :count], _LEVELS * self._step[:, :count]
        boxes = [low, low + wide + 1e-6 * (np.abs(low) + wide)]
        counts = np.full(count, self._levels.shape[2])
        if self._boxes:
            boxes = [np.concatenate(pair, 1) for pair in zip(self._boxes, boxes, strict=True)]
            counts = np.concatenate((self._counts, counts))
        while counts.size > MOST_BOXES:
            even = counts.size // 2 * 2
            merged = [
                np.concatenate((pick(box[:, 0:even:2], box[:, 1:even:2]), box[:, even:]), 1)
                for pick, box in zip((np.minimum, np.maximum), boxes, strict=True)
            ]
            counts = np.concatenate((counts[0:even:2] + counts[1:even:2], counts[even:]))
            boxes = merged
        self._boxes, self._counts = boxes, counts

    def log_mass(self, q: Floats, log_seen: Floats, soft_cap: float | None) -> NDArray[np.float64]:
        """At least the logarithm of the weights' sum [K, G] that scaled queries [K, G, D] would have given to
        the forgotten keys, where what they look at has the sum exp(`log_seen`).
        """
        sums: list[Floats] = []
        if self._boxes:
            low, high = self._boxes
            scores = np.maximum(q, 0) @ high.swapaxes(1, 2) + np.minimum(q, 0) @ low.swapaxes(1, 2)
            reach = np.maximum(np.abs(low), np.abs(high)).swapaxes(1, 2)
            scores += np.float32(_ROUNDING * q.shape[2]) * (np.abs(q) @ reach)
            sums.append(_capped(scores, soft_cap) + np.log(self._counts, dtype=np.float32))
        num_whole, block_size = self._levels.shape[1:3]
        at_low = q @ self._low.swapaxes(1, 2) + np.linalg.norm(q, axis=2)[..., None] * self._off[:, None]
        most = at_low + np.maximum(q, 0) @ (_LEVELS * self._step).swapaxes(1, 2)
        most = _capped(most, soft_cap) + np.float32(np.log(block_size))
        least = log_seen[..., None] + np.log(_FROM_BOXES / num_whole)
        for head in range(q.shape[0]):
            read = np.flatnonzero((most[head] > least[head]).any(0))
            if read.size:
                steps = q[head][None] * self._step[head, read][:, None]  # [B, G, D]
                scores = steps @ self._levels[head, read].astype(np.float32).swapaxes(1, 2)  # [B, G, P]
                scores += at_low[head][:, read].T[..., None]
                scores += np.linalg.norm(steps, axis=2)[..., None] * self._lengths[head, read][:, None]
                most[head][:, read] = _log_sum(_capped(scores, soft_cap)).T
        sums.append(most)
        return _log_sum(np.concatenate(sums, 2))


@dataclass(kw_only=True)
class ForgottenKeys:
    """Those of one sequence."""

    num_blocks: int = 0
    # Whether some were gone before they could be taken.
    is_partial: bool = False
    layers: dict[int, LayerKeys] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Row:
    """A row of the step that does not look at everything."""

    member: int
    forgotten: ForgottenKeys
    tokens: slice
    blocks: NDArray[np.int64]  # of what it looks at
    num_seen: int  # tokens in them, up to the row's last
    shares: NDArray[np.float64]  # [T] sums over heads


class LossMeter:
    """Measures a step's rows while it is computed: `watch` is called by every layer before its attention."""

    def __init__(self, rows: Sequence[_Row], caches: Sequence[Any]) -> None:
        self._rows = rows
        self._layers = {id(cache): index for index, cache in enumerate(caches)}
        self._num_heads = 0

    def watch(self, q: Any, cache: Any, options: AttentionOptions) -> None:
        """Queries [T, H, D] of the layer whose keys are in `cache`, the step's among them."""
        queries = q if isinstance(q, np.ndarray) else q.float().cpu().numpy()
        num_heads = queries.shape[1]
        self._num_heads += num_heads
        for row in self._rows:
            if row.forgotten.is_partial:
                row.shares += num_heads
                continue
            keys = _keys_of(cache, row.blocks)[:, : row.num_seen]  # [K, C, D]
            own = queries[row.tokens] * np.float32(options.scale)
            num_tokens, num_kv = own.shape[0], keys.shape[0]
            own = own.reshape(num_tokens, num_kv, -1, own.shape[2]).swapaxes(0, 1)
            own = np.ascontiguousarray(own.reshape(num_kv, -1, own.shape[3]))  # [K, T * G, D]
            scores = _capped(own @ keys.swapaxes(1, 2), options.soft_cap)
            ends = row.num_seen - num_tokens + np.arange(num_tokens)
            hidden = np.arange(row.num_seen) > np.repeat(ends, own.shape[1] // num_tokens)[:, None]
            # What was rounded of the scores that are seen comes off their sum.
            slack = 1e-5 * (1.0 + np.abs(scores).max(2))
            log_seen = _log_sum(np.where(hidden, np.float32(-np.inf), scores)) - slack
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


class WatchedAttention:
    """A back end whose queries are measured before it runs; or, where a native program computes attention,
    the meter alone.
    """

    def __init__(self, attention: Any, meter: LossMeter) -> None:
        self._attention, self.watch = attention, meter.watch

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
                _Row(
                    member=member,
                    forgotten=forgotten,
                    tokens=slice(first, end),
                    blocks=blocks,
                    num_seen=num_seen,
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
            keys = _keys_of(cache, blocks)
            keys = keys.reshape(keys.shape[0], blocks.size, kept.block_size, -1)
            forgotten.layers.setdefault(index, LayerKeys()).add(keys)


def _keys_of(cache: Any, blocks: NDArray[np.int64]) -> Floats:
    """Keys [K, C, D] of blocks [B], one after another."""
    if not isinstance(cache, HostCache) or cache.type_name in ("fp8", "int4"):
        return _gathered(cache, blocks)
    found = cache.keys[blocks]  # [B, K, P, D]
    if cache.type_name == "bfloat16":
        keys = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        keys = found.astype(np.float32)
    if cache.scales is not None:
        keys *= cache.scales[blocks][..., :1]
    return keys.swapaxes(0, 1).reshape(keys.shape[1], -1, keys.shape[3])


def _gathered(cache: Any, blocks: NDArray[np.int64]) -> Floats:
    """The same of tensors, and of types that torch alone can read."""
    import torch

    from kernels.paged_cache.store import FourBitCache, QuantizedCache

    if isinstance(cache, HostCache):
        keys, values, scales = (
            None if each is None else torch.from_numpy(each)
            for each in (cache.keys, cache.values, cache.scales)
        )
        assert keys is not None, "it has keys"
        assert values is not None, "latent attention forgets nothing"
        assert scales is not None, "both types have some"
        if cache.type_name == "int4":
            cache = FourBitCache(keys, values, scales)
        else:
            cache = QuantizedCache(keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn), scales)
    where = torch.from_numpy(np.ascontiguousarray(blocks))[None].to(cache.tensors()[0].device)
    found: Floats = cache.gather(where)[0][0].cpu().numpy()
    return found


def _capped(scores: Any, soft_cap: float | None) -> Any:
    return scores if soft_cap is None else np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))


def _log_sum(scores: Floats) -> NDArray[np.float64]:
    """Logarithm of the exponentials' sum over the last axis."""
    most = scores.max(-1, keepdims=True)
    total = np.exp(scores - most).sum(-1, dtype=np.float64)
    found: NDArray[np.float64] = np.log(total) + most[..., 0]
    return found
