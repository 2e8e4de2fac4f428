"""Scores of a prompt's tokens under kvzap, computed while the prompt is, from what each layer's attention
computes upon (`engine/model/kv_scorer`).

States are collected until all of a group are there, so a score is a product of the same shape however the
prompt was cut into steps, and the choice is the same to the bit. Used by the executors for sequences of that
policy; others cost nothing.

Shape letters: T tokens, E hidden size, K kv heads, F tokens of the prompt's whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.retention import SCORED
from engine.model.forward_batch import ForwardBatch
from engine.model.kv_scorer import KvScorer
from engine.runner.forgotten.votes import Votes
from kernels.attention.native_ops import vote_rows

# States that are scored together, counted from the first position.
_TOGETHER = 64
# What a scorer whose sums overflow says at most: a token that has no score is the last to stay.
_MOST = 1e30
# The first tokens of a prompt, which take what attention has to spare: they stay, as under KVzip.
_NUM_SINKS = 4


class LayerScores:
    """Adds to the scores [K, F] of one layer's tokens, in the place of votes."""

    def __init__(self, sums: NDArray[np.float64], scorer: KvScorer, layer: int) -> None:
        self._sums, self._scorer, self._layer = sums, scorer, layer
        self._end = sums.shape[1]
        sums[:, :_NUM_SINKS] = np.inf
        # States [T, E] that follow those which are scored, and the first one's position.
        self._states: list[Any] = []
        self._scored = 0

    def read(self, states: Any, start: int) -> None:
        """States [T, E] of positions from `start` on; those that were here before are left out."""
        expected = self._scored + sum(map(len, self._states))
        new = states[max(0, expected - start) : max(0, self._end - start)]
        if not len(new):
            return
        self._states.append(new.copy() if isinstance(new, np.ndarray) else new.clone())
        while (count := min(_TOGETHER, self._end - self._scored)) > 0:
            if sum(map(len, self._states)) < count:
                return
            there = _joined(self._states)
            self._take(self._scorer.score(self._layer, there[:count]))
            self._states = [there[count:]]

    def _take(self, scores: NDArray[np.float64]) -> None:
        """Scores [K, T] of the next tokens. Layers that share their keys choose together."""
        end = self._scored + scores.shape[1]
        self._sums[:, self._scored : end] += np.nan_to_num(scores, nan=-_MOST, posinf=_MOST, neginf=-_MOST)
        self._scored = end


def _joined(states: list[Any]) -> Any:
    if isinstance(states[0], np.ndarray):
        return np.concatenate(states)
    import torch

    return torch.cat(states)


@dataclass(kw_only=True)
class _ScoredRow:
    """A row of the step of which states are read."""

    votes: Votes
    tokens: slice
    start: int


class StateReader:
    """Scores a step's rows while it is computed: `read` is called by every layer before its attention."""

    def __init__(
        self, rows: Sequence[_ScoredRow], caches: Sequence[Any], scorer: KvScorer, layers: Sequence[int]
    ) -> None:
        """`layers`: numbers of those that attend, by which their `caches` are found."""
        self._rows, self._scorer, self._layers, self._number = rows, scorer, layers, 0
        self._caches = caches
        self._first_rows, num_rows = vote_rows(caches)
        for row in rows:
            row.votes.open(num_rows, np.float64)

    def read(self, states: Any) -> None:
        """What the next layer's attention computes upon [T, E]."""
        layer = self._layers[self._number]
        cache = self._caches[layer]
        first = self._first_rows[id(cache)]
        for row in self._rows:
            layers = row.votes.layers
            if len(layers) == self._number:
                sums = row.votes.sums[first : first + cache.keys.shape[1]]
                layers.append(LayerScores(sums, self._scorer, layer))
            layers[self._number].read(states[row.tokens], row.start)
        self._number += 1


def reader_of(
    votes: Sequence[Votes | None],
    starts: NDArray[np.int64],
    batch: ForwardBatch,
    caches: Sequence[Any],
    scorer: KvScorer | None,
    layers: Sequence[int],
) -> StateReader | None:
    """A reader for the rows of a batch whose positions begin at `starts` [S]; None where nobody is scored."""
    bounds, rows = batch.ragged.query_starts, []
    for member, (each, start) in enumerate(zip(votes, starts.tolist(), strict=True)):
        if each is not None and each.kept.policy == SCORED:
            tokens = slice(int(bounds[member]), int(bounds[member + 1]))
            rows.append(_ScoredRow(votes=each, tokens=tokens, start=start))
    if not rows:
        return None
    assert scorer is not None, "refused otherwise"
    return StateReader(rows, caches, scorer, layers)
