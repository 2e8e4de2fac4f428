"""How a model is shared among ranks: what is counted in order, none with more than one beyond another's;
layers by tensor parallelism, experts by expert parallelism, over the same ranks. No numpy.
"""

from __future__ import annotations

import msgspec


def share_of(count: int, rank: int, num_ranks: int) -> slice:
    """The part of `count` that a rank has; as `share` of op.h."""
    return slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that each layer is cut into, and groups of ranks over which whole experts are spread. One divides
    the other; there are as many ranks as the larger says.

    Where there are fewer parts than ranks, several ranks have the same one. Where there are fewer groups, the
    ranks of a group share the inner elements of its experts.
    """

    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.tensor, self.expert)

    @property
    def expert_parts(self) -> int:
        """Ranks of a group, each of which has a part of each of its experts."""
        return self.size // self.expert

    def part_of(self, rank: int) -> int:
        """Which part of layers a rank has."""
        return rank % self.tensor

    def group_of(self, rank: int) -> int:
        """Which experts a rank has, of `expert` groups."""
        return rank // self.expert_parts

    def expert_part_of(self, rank: int) -> int:
        """Which part of these a rank has."""
        return rank % self.expert_parts

    def held_by(self, rank: int, num_experts: int) -> slice:
        """The experts of which a rank has all, or its part."""
        return share_of(num_experts, self.group_of(rank), self.expert)
