"""How a model is shared among ranks: what is counted in order, none with more than one beyond another's;
layers by tensor parallelism, experts by expert parallelism, over the same ranks, and runs of layers by
pipeline parallelism over groups of these. No numpy.
"""

from __future__ import annotations

import msgspec

# Ranks of one machine (kMostRanks in ranks.h).
MOST_RANKS = 16


def share_of(count: int, rank: int, num_ranks: int) -> slice:
    """The part of `count` that a rank has; as `share` of op.h."""
    return slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that each layer is cut into, and groups of ranks over which whole experts are spread. One divides
    the other; there are as many ranks as the larger says, in each stage of the pipeline.

    Where there are fewer parts than ranks of a stage, several ranks have the same one. Where there are fewer
    groups, the ranks of a group share the inner elements of its experts.
    """

    tensor: int = 1
    expert: int = 1
    # Stages one behind another, each with a run of the layers.
    pipeline: int = 1

    @property
    def first_above_one(self) -> str:
        """Name of the first degree that asks for ranks."""
        return next((name for name in self.__struct_fields__ if getattr(self, name) > 1), "tensor")

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage."""
        return max(self.tensor, self.expert)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.stage_size

    @property
    def expert_parts(self) -> int:
        """Ranks of a group, each of which has a part of each of its experts."""
        return self.stage_size // self.expert

    def stage_of(self, rank: int) -> int:
        """Which stage a rank belongs to; its ranks follow one another."""
        return rank // self.stage_size

    def first_of(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * self.stage_size

    def part_of(self, rank: int) -> int:
        """Which part of layers a rank has."""
        return rank % self.tensor

    def group_of(self, rank: int) -> int:
        """Which experts a rank has, of `expert` groups."""
        return rank % self.stage_size // self.expert_parts

    def expert_part_of(self, rank: int) -> int:
        """Which part of these a rank has."""
        return rank % self.expert_parts

    def held_by(self, rank: int, num_experts: int) -> slice:
        """The experts of which a rank has all, or its part."""
        return share_of(num_experts, self.group_of(rank), self.expert)
