"""Where in a program the ranks of a stage meet: sums of what each has of a product, and rows of experts,
which go to rooms that take turns. ProgramBuilder asks as it appends the ops of layers.

Shape letters: T tokens.
"""

from __future__ import annotations

from engine.model.expert_places import ExpertPlaces
from engine.model.records import Floats
from kernels.experts.native import ExpertsApart
from kernels.native.library import Op
from kernels.ranks.native import Ranks


class Meetings:
    """Those of one program, in order; the same in all ranks of a stage."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._count = 0

    @property
    def is_alone(self) -> bool:
        """Whether the rank has all of each layer but experts."""
        return self._ranks.shape.degrees.tensor == 1

    def part(self, max_tokens: int, width: int) -> Floats:
        """[max_tokens, width]: where this rank's part of the next sum goes."""
        return self._ranks.part(self._count, width)[:max_tokens]

    def sum_op(self, step: int, out: Floats, join: bool, among: int = 0) -> Op:
        """The next sum: out [T, width] (+)= the parts of all, or of as many as `among`."""
        self._count += 1
        return self._ranks.sum_op(step, self._count - 1, out, accumulate=join, among=among)

    def experts(self, step: int, num_experts: int, places: ExpertPlaces | None) -> ExpertsApart:
        """How ranks have experts of the next layer: each puts what its own gave where all find it. `places`:
        where they may change ranks.
        """
        ranks, turn = self._ranks, self._count
        self._count += 1
        degrees, parts = ranks.shape.degrees, ranks.parts_of_experts(turn)
        return ExpertsApart(
            first=degrees.held_by(ranks.rank, num_experts).start,
            rows=parts[degrees.expert_part_of(ranks.rank)],
            parts=parts,
            meet=ranks.meet_op(step),
            positions=None if places is None else places.positions,
            counts=None if places is None else places.counts,
            placed=None if places is None else places.weights,
        )
