"""How tokens choose experts, as `reference` and the native op `route` compute it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """A router picks `num_active` of `num_experts` for each token."""

    num_experts: int
    num_active: int
    # Softmax over all experts and then the best; over the best alone; DeepSeek-V3's sigmoid; or SparseMixer
    # (arXiv 2310.00811): of each choice, over those that are left and not much worse.
    scoring: Literal["softmax", "softmax_of_best", "sigmoid", "sparse_mixer"] = "softmax"
    # How much worse those may be, in proportion to their size.
    tolerance: float = 0.0
    # Whether the weights of the chosen experts are scaled to sum to one.
    normalized: bool = True
    scaling: float = 1.0
    # The weights multiply what experts take in, instead of what they give.
    weighs_inputs: bool = False
    # Experts form groups; only the best groups are eligible. 0 is ungrouped.
    num_groups: int = 0
    num_active_groups: int = 0
    # How a group is judged: by its best expert, or by the sum of its two best.
    group_score: Literal["best", "two_best"] = "best"
