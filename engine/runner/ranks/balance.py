"""The leader's end of experts that change ranks: measures how rows are spread, and says who moves.

A rank counts the rows that experts of its stage get, in memory that all share. Now and then the leader looks:
older rows count half for every so many that came since. Where the most loaded rank of a layer has clearly
more than the mean, and another placement clearly less, that layer's experts change places two by two, and one
pair at a time (engine.model.expert_places says how).

Shape letters: L layers with experts, of all stages; X experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.model.expert_places import ExpertExchange, ExpertMove
from engine.runner.ranks.placement import exchanges, group_loads, imbalance, longest_first
from engine.types.experts import ExpertSpread
from kernels.ranks.native import Ranks


class KeepWeights:
    """Ranks write what they have packed, if they keep that: nothing moves before."""


@dataclass(frozen=True, kw_only=True)
class BalanceRule:
    """When experts move."""

    # Steps from one look to the next.
    look_steps: int = 64
    # Rows of the model after which older ones count half: so many that a few long prompts of one kind move
    # nothing.
    half_life_rows: int = 1 << 15
    # Rows that must have come before a layer is judged.
    least_rows: int = 1 << 11
    # How many times the mean the most loaded rank has, above which experts may move; and by how much less
    # that must become.
    threshold: float = 1.1
    margin: float = 0.05
    # See longest_first.
    slack: float = 0.02


RULE = BalanceRule()


class ExpertBalance:
    """Called by the runner, in the thread that computes steps."""

    def __init__(
        self,
        ranks: Ranks,
        exchange: ExpertExchange,
        tell: Callable[[ExpertMove | KeepWeights], None],
        is_settled: Callable[[], bool],
    ) -> None:
        """`tell`: the other ranks, before the next step. `is_settled`: whether none but steps read the
        leader's weights any more.
        """
        shape = ranks.shape
        self._ranks, self._exchange, self._tell, self._is_settled = ranks, exchange, tell, is_settled
        self._num_groups, self._num_active = shape.degrees.expert, shape.num_active
        layers, experts = shape.num_sparse_layers, shape.num_experts
        self._seen, self._loads = ranks.expert_counts.copy(), np.zeros((layers, experts))
        self._positions = np.tile(np.arange(experts), (layers, 1))
        # Bytes of an expert, by layer; 0 where experts stay.
        self._bytes = [_common_bytes(ranks, layer) for layer in range(layers)]
        self._num_steps, self._next_layer = 0, 0
        # What is to change places in a layer, the pair under way first; how far that has come, and the step
        # behind which its last piece was told.
        self._layer, self._pairs = 0, list[tuple[int, int]]()
        self._piece, self._told_behind = 0, -1
        self._has_asked = False
        self.spread = ExpertSpread(imbalance=1.0, num_moves=0)

    def before_step(self) -> None:
        """Looks, or goes on with what moves, in front of a step."""
        if self._pairs:
            self._go_on()
            return
        self._num_steps += 1
        if self._num_steps % RULE.look_steps == 0 and self._may_move():
            self._look()

    def _may_move(self) -> bool:
        """Whether no rank's weights are being written to a file any more."""
        if not self._is_settled():
            return False
        if not self._has_asked:
            # Rows of the first steps, which were none of a client's, are not counted.
            self._has_asked, self._seen = True, self._ranks.expert_counts.copy()
            self._tell(KeepWeights())
        return bool(self._ranks.settled[1:].all())

    def _look(self) -> None:
        counts = self._ranks.expert_counts.copy()
        fresh, self._seen = counts - self._seen, counts
        # All layers get all rows.
        num_rows = fresh.sum(-1).max() / self._num_active
        self._loads = self._loads * 0.5 ** (num_rows / RULE.half_life_rows) + fresh
        by_group = group_loads(self._positions, self._loads, self._num_groups)
        if by_group.any():
            whole = float(by_group.max(-1).sum() / by_group.mean(-1).sum())
            self.spread = ExpertSpread(imbalance=whole, num_moves=self.spread.num_moves)
        known = self._loads.sum(-1) >= RULE.least_rows * self._num_active
        uneven = imbalance(by_group)
        layers = [each for each in np.flatnonzero(known & (uneven > RULE.threshold)) if self._bytes[each]]
        if layers:
            # One at a look, and all in turn: where nothing helps another layer may still be helped.
            layer = next((each for each in layers if each >= self._next_layer), layers[0])
            self._next_layer = int(layer) + 1
            self._plan(int(layer), float(uneven[layer]))

    def _plan(self, layer: int, present: float) -> None:
        positions, loads = self._positions[layer], self._loads[layer]
        wanted = longest_first(positions, loads, self._num_groups, RULE.slack)
        by_group = np.bincount(wanted, loads, self._num_groups).astype(np.float64)
        if present - float(imbalance(by_group)) >= RULE.margin:
            self._layer, self._pairs = layer, exchanges(positions, wanted, loads)
            self._go_on()

    def _go_on(self) -> None:
        """The next piece of what moves. Ranks have read the last one once a step was handed over behind it,
        which none is where that failed before.
        """
        if self._told_behind == self._ranks.num_handed_over:
            return
        self._told_behind = self._ranks.num_handed_over
        experts = self._pairs[0]
        num_pieces = -(-self._bytes[self._layer] // self._ranks.shape.piece_bytes)
        move = ExpertMove(self._layer, experts, self._piece, num_pieces)
        self._tell(move)
        self._exchange.take(move)
        self._piece += 1
        if move.piece == num_pieces:
            positions, (first, second) = self._positions[self._layer], experts
            positions[[first, second]] = positions[[second, first]]
            self.spread = ExpertSpread(
                imbalance=self.spread.imbalance, num_moves=self.spread.num_moves + len(experts)
            )
            self._piece = 0
            del self._pairs[0]


def _common_bytes(ranks: Ranks, layer: int) -> int:
    """Of each expert of a layer, where all ranks of its stage have all of theirs in the same form; else 0."""
    degrees = ranks.shape.degrees
    stage = next(each for each, end in enumerate(ranks.shape.sparse_cuts[1:]) if layer < end)
    first = degrees.first_of(stage)
    forms = ranks.expert_forms[first : first + degrees.stage_size, layer]
    return int(forms[0, 1]) if (forms == forms[0]).all() else 0
